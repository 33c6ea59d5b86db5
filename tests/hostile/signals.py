"""Signals at random moments of `stepscope run`, from its first line of code on: exit code, words, and what is kept.

python -m tests.hostile.signals --signals 300 --out results/cpu/hostile/signals.json
"""

import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from stepscope.core.run_directory import load_runs
from tests.hostile.campaign import (
    STEPSCOPE,
    as_in_a_terminal,
    conclude,
    environment,
    generator,
    parser,
    wait_until_it_answers,
)

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
TINY = ("--d-model", "32", "--layers", "2", "--heads", "2", "--vocabulary", "101", "--seq-len", "16")
QUICK = (*TINY, "--device", "cpu", "--warmup", "1", "--steps", "5", "--seconds", "0")
STAGES = ("build", "warm-up", "measure", "observe", "profile", "ceiling")
LAST = "stepscope: as a page: "


def main(arguments: list[str] | None = None) -> int:
    """Send them, one process each."""
    options = parser(__doc__)
    options.add_argument("--signals", type=int, default=300, help="how many")
    options.add_argument("--span", type=float, default=8.0, help="seconds over which the moments are spread")
    asked = options.parse_args(arguments)
    numbers = generator(asked.seed)
    faults: list[str] = []
    ends: Counter[str] = Counter()
    for i in range(asked.signals):
        sent = (*CODES,)[i % 3]
        # Half of them while torch is imported, where it went wrong.
        delay_s = numbers.uniform(0, asked.span / 4 if i % 2 else asked.span)
        again = i % 5 == 0
        with tempfile.TemporaryDirectory() as folder:
            end, fault = interrupt(sent, delay_s, again, Path(folder))
        ends[end] += 1
        if (i + 1) % 25 == 0:
            print(f"{i + 1} signals, {len(faults)} faults", file=sys.stderr)
        if fault:
            faults.append(f"{sent.name}{' twice' if again else ''} after {delay_s:.3f} s: {fault}")
    result = {"signals": asked.signals, "seed": asked.seed, "span_s": asked.span, "ends": dict(ends)}
    told = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    return conclude("signals", result, faults, f"{asked.signals} signals at random moments of a run: {told}", asked.out)


def interrupt(sent: signal.Signals, delay_s: float, again: bool, out: Path) -> tuple[str, str]:
    """One run, and one signal, or two; how it ended, and what is wrong with that."""
    process = subprocess.Popen(
        (*STEPSCOPE, "run", *QUICK, "--runs", str(out)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        preexec_fn=as_in_a_terminal,  # noqa: PLW1509  (there are no threads)
    )  # fmt: skip
    wait_until_it_answers(process.pid)
    time.sleep(delay_s)
    ended = process.poll() is not None
    for _ in range(2 if again else 1):
        process.send_signal(sent)
        time.sleep(0.02 if again else 0)
    stdout, stderr = process.communicate(timeout=120)
    runs, unread = load_runs([out])
    words = [line for line in stderr.splitlines() if not line.removeprefix("stepscope: ").startswith(STAGES)]
    status = runs[0].status if runs else "nothing kept"
    all_was_said = status == "done" and "forward" in stdout and all(word.startswith(LAST) for word in words)
    # It may end between the look at it and the signal.
    if all_was_said and process.returncode in (0, -sent):
        return "after the end" if ended else "while Python took itself down", ""
    if process.returncode != CODES[sent]:
        return "wrong code", f"exit code {process.returncode}, {stderr[-400:]!r}"
    if len(words) > 1 or "Traceback" in stderr:
        return "too many words", repr(stderr[-400:])
    if unread:
        return "unreadable", unread[0]
    if status == "interrupted" and not runs[0].failure:
        return "no reason", "an interrupted run does not say where"
    return status, ""


if __name__ == "__main__":
    sys.exit(main())
