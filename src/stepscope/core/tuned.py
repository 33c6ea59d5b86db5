"""The result of a search for the fastest step: each change that was tried, and the step that it ended with."""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from stepscope.core.document import decode_document
from stepscope.core.errors import InputError, choose
from stepscope.core.own_workload import DrivenWorkload
from stepscope.core.parts import PARTS
from stepscope.core.processes import Change
from stepscope.core.samples import Interval

TUNED_FIELDS = (
    "attention", "dtype", "optimizer", "compile", "graph", "checkpointing", "accumulation", "parallel", *PARTS,
    "projections",
)  # fmt: skip
"""Fields of a workload that a search may change."""


def fields_kept(names: Iterable[str]) -> frozenset[str]:
    """The fields that stay as they are. Raises InputError for another name, and where nothing is left to change."""
    kept = frozenset(choose(name, TUNED_FIELDS, "keep") for name in names)
    if kept.issuperset(TUNED_FIELDS):
        raise InputError(f"keep names all that tune changes: leave one out of {', '.join(TUNED_FIELDS)}")
    return kept


Verdict = Literal[
    "taken", "faster", "undecided", "slower", "slower by plan", "refused", "does not fit", "failed", "doubted",
    "not right", "not reached",
]  # fmt: skip
"""taken: the fastest of its round, and part of every later step. faster: surely, but another of its round was more so.
undecided: its interval holds 1, or it has none. slower by plan: so much slower by prediction that it was not measured.
refused: it cannot run here, or beside another choice. does not fit: by prediction, or it ran out of memory. failed: it
was measured, and ended without a result. doubted: a check of its run found an error. not right: its losses depart from
the baseline's. not reached: the time was over."""


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the step, and what it gave beside the best step until then."""

    round: str
    """What was changed, in a word: `attention`, `precision`."""
    change: dict[str, str | int]
    """Fields of the workload with their new values."""
    verdict: Verdict
    step_s: float | None = None
    """Its median step, in seconds; None where none was measured."""
    ratio: float | None = None
    """How many times as long it took as the best step until then."""
    interval: Interval | None = None
    """Of the ratio, within one process."""
    p_value: float | None = None
    """Two-sided, of "both take equally long", by the interval; a round's are judged together (Holm)."""
    apart: bool = False
    """Whether there is no interval, and each of its steps was shorter, or each longer, than every step of the best
    until then. That settles the race. How much processes differ, the end tells."""
    peak_bytes: int | None = None
    """The most bytes of tensors at once; None where two models lay in the memory, or it was not counted."""
    why: str = ""
    """The reason of a refusal, a failure or a doubt, in one line."""
    runs: tuple[str, ...] = ()
    """The runs of the best step until then, and of this one."""


def change_words(change: Mapping[str, str | int]) -> str:
    """A change in words: `dtype bf16-master, kernels fused`, where all parts have one name."""
    said, parts = dict(change), {change.get(part) for part in PARTS}
    if len(parts) == 1 and None not in parts:
        said = {name: value for name, value in change.items() if name not in PARTS} | {"kernels": parts.pop() or ""}
    return ", ".join(f"{name} {value}" for name, value in said.items())


class LossCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The losses of a short training: of each step, before its update."""

    name: str
    losses: tuple[float, ...]


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """A search, as far as it came."""

    asked: DrivenWorkload
    """The step that the user asked for."""
    baseline: DrivenWorkload
    """The step that the search began with: the one asked for, or one that fits."""
    best: DrivenWorkload
    tried: tuple[Tried, ...] = ()
    confirmed: Change | None = None
    """The best step against the baseline, in processes of their own; None where that was not reached."""
    baseline_s: float | None = None
    """The typical step of the baseline in these processes, in seconds."""
    best_s: float | None = None
    baseline_peak_bytes: int | None = None
    best_peak_bytes: int | None = None
    confirmed_by: tuple[str, ...] = ()
    """The runs of these processes."""
    curves: tuple[LossCurve, ...] = ()
    """Losses of the baseline, of the baseline from other starts, and of the best."""
    departs_at: int | None = None
    """The step at which the best one's losses depart from the baseline's; None where they do not."""
    why_no_losses: str = ""
    """Why no losses were compared, or why they cannot tell how much is far, in one line."""
    doubt: str = ""
    """The error that a check found in the run of the baseline by itself, in one line."""
    own_optimizer: str = ""
    """The class of the optimizer that the model's factory gives: no change replaces it."""
    seconds: float = 0.0
    """How long the search took."""
    needed_s: float = 0.0
    """The time that one more race and the confirmation of the end would have taken, when it was asked for last."""
    budget_s: float = 0.0
    interrupted: bool = False
    device: str = ""
    versions: dict[str, str] = {}
    folder: str = ""
    """Where the runs are."""


def decode_tuned(data: bytes, source: str) -> Tuned:
    """What `stepscope tune --json` wrote. Raises InputError that names the source."""
    return decode_document(data, Tuned, source, holds="search of `stepscope tune --json`")
