"""A run in words: its status, its doubts, and which run it is."""

import re

from stepscope.core.doubts import doubting_kinds
from stepscope.core.errors import printable
from stepscope.core.run import Run

OUT_OF_MEMORY_REMEDY = "a smaller --batch-size or --seq-len, --attention sdpa, or --dtype bf16 needs less memory"
_OF_OWN = "a smaller batch or model, --checkpointing every-1, or --dtype bf16 needs less memory"


def identify(run: Run) -> str:
    """One line: which run this is, and what lies beside it."""
    commit = run.environment.git_commit if run.environment else None
    dirty = ", changed since" if run.environment and run.environment.git_dirty else ""
    own = run.environment.own_commit if run.environment else None
    own_dirty = ", changed since" if run.environment and run.environment.own_dirty else ""
    parts = [
        f"Run {run.id}",
        f"tag {run.tag}" if run.tag else "",
        f"stepscope at {commit[:10]}{dirty}" if commit else "",
        f"own code at {own[:10]}{own_dirty}" if own else "",
        *run.artifacts.values(),
    ]
    return printable("; ".join(part for part in parts if part))


def status_sentence(run: Run) -> str:
    """What became of a run that is not done."""
    if run.failure is None:
        return f"{run.status}: the run was started and never ended."
    remedy = f" Remedy: {OUT_OF_MEMORY_REMEDY if run.textbook else _OF_OWN}." if run.status == "out-of-memory" else ""
    return printable(f"{run.status} ({run.failure.where}): {run.failure.message}{remedy}")


def status_in_short(run: Run) -> str:
    """What became of a run that is not done, without the message of a library, which may be long."""
    if run.failure is None or run.status != "out-of-memory":
        return status_sentence(run)
    where = run.environment.limited_device if run.environment else "the device"
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ [KMGT]i?B)", run.failure.message)
    wanted = f": {asked[1]} more were asked for" if asked else ""
    return printable(f"Out of memory on {where}, in {run.failure.where}{wanted}.")


def status_word(run: Run) -> str:
    """The status as it stands in a cell."""
    return "OOM" if run.status == "out-of-memory" else run.status


def doubts(run: Run) -> str:
    """The kinds of finding that say to take care, for a cell."""
    return printable(", ".join(doubting_kinds(run)))
