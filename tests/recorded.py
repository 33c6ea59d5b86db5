"""Run the suite and keep what it said: on which machine, with which versions and settings, and which tests failed.

    python tests/recorded.py --out results/h200/tests/suite.json -- -n 14 --dist worksteal
    python tests/recorded.py --out results/cpu/tests/avx2-1.json --capability avx2 --threads 1 -- -n 2 --dist loadfile
    python tests/recorded.py --show results/*/tests/*.json

What follows `--` goes to pytest. `--limit` seconds interrupt it, and what it has done by then is kept. A capability
limits PyTorch's vector instructions, and those of MKL and oneDNN under it, so that a machine shows what an older one
would. Exit code: pytest's. `--show` prints what was kept as a table in Markdown.
"""

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

import msgspec
import torch

from stepscope.recording.environment import read_environment

CAPABILITIES = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
}


_CLOSING = re.compile(r"\d+ (passed|failed|error|skipped).* in [\d.]+s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--capability", choices=CAPABILITIES)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--limit", type=float)
    parser.add_argument("pytest", nargs="*", help="what pytest is given")
    given = parser.parse_args()
    if given.show:
        print(table(given.show))
        return 0
    if given.out is None:
        parser.error("--out says where to keep what the tests said, --show shows what was kept")
    settings = dict(CAPABILITIES.get(given.capability, {}))
    if given.threads is not None:
        settings["OMP_NUM_THREADS"] = str(given.threads)
    environment = read_environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        compiled: dict[str, str] = {}
        if given.capability is not None:  # what was compiled for other instructions must not be taken from a cache
            compiled["TORCHINDUCTOR_CACHE_DIR"] = str(Path(directory) / "inductor")
        start = time.monotonic()
        suite = subprocess.Popen(
            [sys.executable, "-m", "pytest", f"--junitxml={report}", *given.pytest],
            env={**os.environ, **settings, **compiled},
            stdout=subprocess.PIPE,
            text=True,
        )
        printed: list[str] = []
        copying = threading.Thread(target=_copy, args=(suite.stdout, printed))
        copying.start()
        try:
            suite.wait(given.limit)
        except subprocess.TimeoutExpired:
            suite.send_signal(signal.SIGINT)
            suite.wait()
        copying.join()
        seconds = time.monotonic() - start
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    outcomes = [(_name(case), *_outcome(case)) for case in cases]
    reasons = [why for _, outcome, why in outcomes if outcome == "skipped"]
    found = {
        "kind": "stepscope-tests", "version": 1,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": msgspec.to_builtins(environment),
        # When a suite is interrupted, JUnit's report counts tests that had begun as passed; pytest's own line does not.
        "closing_line": next((line.strip("= \n") for line in reversed(printed) if _CLOSING.search(line)), ""),
        "settings": settings, "pytest": given.pytest, "exit_code": suite.returncode, "seconds": round(seconds, 1),
        **{kind: sum(outcome == kind for _, outcome, _ in outcomes) for kind in ("passed", "failed", "skipped")},
        "skipped_because": {why: reasons.count(why) for why in sorted(set(reasons))},
        "failures": [{"test": name, "message": why} for name, outcome, why in outcomes if outcome == "failed"],
        "slowest": sorted(((round(float(case.get("time", 0)), 1), _name(case)) for case in cases), reverse=True)[:10],
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped in {seconds:.0f} s")
    return suite.returncode


def table(paths: list[Path]) -> str:
    """What suites said, a row each, as docs/results/tests.md shows it."""
    rows = ["| suite | machine | versions | passed | failed | skipped |", "|---|---|---|---|---|---|"]
    for path in sorted(paths):
        kept = json.loads(path.read_text())
        versions = kept["environment"]["versions"]
        named = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "triton") if name in versions)
        suite = Path(*path.parts[-3:])
        counts = (kept[kind] for kind in ("passed", "failed", "skipped"))
        cells = (f"[{suite}](../../results/{suite})", kept["environment"]["device_name"], named, *map(str, counts))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _copy(lines: IO[str], printed: list[str]) -> None:
    """Show what pytest prints as it comes, and keep it."""
    for line in lines:
        print(line, end="", flush=True)
        printed.append(line)


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    """passed, failed or skipped, and why."""
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(kind)
        if found is not None:
            return outcome, str(found.get("message", ""))[:500]
    return "passed", ""


if __name__ == "__main__":
    sys.exit(main())
