"""A sweep of eight cells, killed again and again at random moments, and resumed until it is done.

    python -m tests.hostile.kills --kills 100 --out results/cpu/hostile/kills.json

Each kill takes the sweep's process (SIGKILL, SIGTERM, SIGINT or SIGHUP), a cell of it (SIGKILL or SIGTERM), or both at
once. In the end every cell has exactly one result, and no process of it lives on. When the sweep is done before the
kills are, another begins in a new place.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from stepscope.core.run import REPEATED
from stepscope.core.run_directory import load_runs
from tests.hostile.campaign import (
    STEPSCOPE,
    alive,
    as_in_a_terminal,
    conclude,
    environment,
    generator,
    parser,
    processes_with,
    wait_until_it_answers,
)

MOST_STARTS = 1000
KINDS = (
    ("sweep", signal.SIGKILL), ("sweep", signal.SIGTERM), ("sweep", signal.SIGINT), ("sweep", signal.SIGHUP),
    ("cell", signal.SIGKILL), ("cell", signal.SIGTERM), ("both", signal.SIGKILL),
)  # fmt: skip
ENDS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -9}
RECIPE = """
from stepscope.core.model_config import configure
from stepscope.core.workloads import TextbookWorkload

def sweep():
    model = configure("tiny", d_model=32, d_ff=64, layers=1, heads=2, vocabulary=101)
    return [TextbookWorkload(model=model, seq_len=8 * n, batch_size=1) for n in range(1, CELLS + 1)]
"""
STOP_S = 3.0
"""How long a sweep may take to stop when it is asked to."""


def main(arguments: list[str] | None = None) -> int:
    """Kill and resume."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=100, help="how many")
    options.add_argument("--cells", type=int, default=8, help="of each sweep")
    options.add_argument("--span", type=float, default=8.0, help="seconds after a start within which a kill comes")
    asked = options.parse_args(arguments)
    numbers = generator(asked.seed)
    campaign = _Campaign(numbers, asked.cells, asked.span)
    while campaign.kills.total() < asked.kills:
        with tempfile.TemporaryDirectory() as folder:
            campaign.one_sweep(Path(folder), asked.kills)
    told = ", ".join(f"{count} {status}" for status, count in sorted(campaign.results.items()))
    sentence = (
        f"{campaign.kills.total()} kills of {campaign.sweeps} sweeps of {asked.cells} cells, {campaign.starts} starts: "
        f"{campaign.cells} cells, each with exactly one result ({told})"
    )
    result = {
        "kills": {f"{whom} {name}": count for (whom, name), count in sorted(campaign.kills.items())},
        "sweeps": campaign.sweeps, "cells_each": asked.cells, "starts": campaign.starts, "cells": campaign.cells,
        "results": dict(campaign.results), "stopped_s": sorted(round(seconds, 3) for seconds in campaign.stopped_s),
        "seed": asked.seed, "span_s": asked.span,
    }  # fmt: skip
    return conclude("kills", result, campaign.faults, sentence, asked.out)


class _Campaign:
    def __init__(self, numbers: Random, each: int, span_s: float) -> None:
        self._numbers, self._each, self._span_s = numbers, each, span_s
        self.kills: Counter[tuple[str, str]] = Counter()
        self.results: Counter[str] = Counter()
        self.faults: list[str] = []
        self.stopped_s: list[float] = []
        self.sweeps = self.starts = self.cells = 0

    def one_sweep(self, folder: Path, wanted: int) -> None:
        """One sweep to its end, killed on the way as long as kills are wanted."""
        self.sweeps += 1
        recipe, out = folder / "recipe.py", folder / "runs"
        recipe.write_text(RECIPE.replace("CELLS", str(self._each)))
        code = None
        for _ in range(MOST_STARTS):
            process = self._start(recipe, out)
            if self.kills.total() < wanted:
                self._kill(process, str(folder))
            said = process.communicate(timeout=300)[1]
            if "Traceback" in said or "Event loop is closed" in said:
                self.faults.append(f"words: {said[-600:]!r}")
            code = process.returncode
            if code in (0, 1, 2, 3):
                break
        self._judge(out, str(folder), code)
        print(f"{self.kills.total()} kills, {self.sweeps} sweeps, {len(self.faults)} faults", file=sys.stderr)

    def _start(self, recipe: Path, out: Path) -> "subprocess.Popen[str]":
        self.starts += 1
        command = (*STEPSCOPE, "sweep", str(recipe), "--runs", str(out), "--device", "cpu")
        return subprocess.Popen(
            (*command, "--warmup", "1", "--steps", "3", "--seconds", "0", "--no-profile"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(HOSTILE=str(recipe.parent)),
            preexec_fn=as_in_a_terminal,  # noqa: PLW1509  (there are no threads)
        )  # fmt: skip

    def _kill(self, process: "subprocess.Popen[str]", folder: str) -> None:
        whom, sent = self._numbers.choice(KINDS)
        wait_until_it_answers(process.pid)
        time.sleep(self._numbers.uniform(0, self._span_s))
        cells = [pid for pid in processes_with(f"HOSTILE={folder}") if pid != process.pid]
        if process.poll() is not None or (whom != "sweep" and not cells):
            return
        if whom != "cell":
            process.send_signal(sent)
        if whom != "sweep":
            for pid in cells:
                _send(pid, sent)
        self.kills[whom, sent.name] += 1
        if whom == "cell":
            return
        began = time.monotonic()
        code = process.wait(timeout=300)
        if code != ENDS[sent]:
            self.faults.append(f"{sent.name} to the sweep: exit code {code}")
        if sent != signal.SIGKILL:
            self.stopped_s.append(time.monotonic() - began)
            if self.stopped_s[-1] > STOP_S:
                self.faults.append(f"{sent.name}: the sweep took {self.stopped_s[-1]:.1f} s to stop")

    def _judge(self, out: Path, folder: str, code: int | None) -> None:
        """Every cell has exactly one result, and nothing of it lives on."""
        runs, unread = load_runs([out])
        found = Counter(run.workload.key for run in runs if run.status not in REPEATED)
        self.results.update(run.status for run in runs if run.status not in REPEATED)
        self.cells += len(found)
        self.faults += unread
        if len(found) != self._each or set(found.values()) != {1}:
            self.faults.append(f"sweep {self.sweeps}, which ended with {code}: results by cell {dict(found)}")
        if left := [pid for pid in processes_with(f"HOSTILE={folder}") if alive(pid)]:
            self.faults.append(f"sweep {self.sweeps}: processes {left} live on")


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
