"""Which module's precision the gradients depend on: one step, again from the same weights, batch and random state, with
each module alone in 16 bits, ranked by how far this moves the gradients, beside how far the step again moves them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stepscope.core.answer import Answer, Cell, Panel, Point, Table
from stepscope.core.errors import InputError, StepscopeError, choose
from stepscope.core.figures import digits
from stepscope.core.model_config import ModelConfig
from stepscope.questions.against_float64 import DTYPES
from stepscope.questions.answers import computed_answer
from stepscope.questions.replays.results import Distance, StepResult, distance, patient, run_step
from stepscope.questions.replays.subject import Subject, drawing_modules, without_dropout
from stepscope.questions.shadow.cast import computing_in, with_cast_loss
from stepscope.questions.shadow.findings import shadow_found
from stepscope.questions.shadow.parts import Part, find_parts
from stepscope.questions.shadow.ranked import Ranked, Ranking
from stepscope.questions.steps import one_step_of, settings_of
from stepscope.recording.device import resolve_device
from stepscope.training.own.user_code import said_of

RANKING, LAYERS = "Modules, each alone", "The first of them, layer by layer"
"""Titles of the tables."""
LOW = ("bf16", "fp16")
"""Formats that a module can be changed to."""
MOST_LAYERS = 64
"""Layers of the first module that are changed one at a time."""
_REPEATS = 3
_MOST_BARS = 40
_SCALES = (16, 12, 8, 4, 0)
"""Loss scales that are tried for fp16, as powers of two: the first with which all modules at once stay finite."""


def study_shadow(
    *, to: str = "bf16", model: ModelConfig | None = None, batch_size: int = 4, seq_len: int = 64, seed: int = 0,
    own: str | None = None, arguments: Mapping[str, Any] | None = None, device: str = "auto",
    tell: Callable[[str, float], None] | None = None,
) -> Answer:  # fmt: skip
    """Rank the modules of a step by the error that each makes in the gradients, alone in bf16 or fp16.

    own: the factory of a model of the user's own, or its config.json, in place of a model and its sizes; `arguments`:
    what it is called with. Raises InputError where nothing can be changed.
    """
    low, on, told = DTYPES[choose(to, LOW, "precision")], resolve_device(device), patient(tell)
    workload = one_step_of(own, arguments, model=model, batch_size=batch_size, seq_len=seq_len, seed=seed)
    with torch.random.fork_rng([on] if on.type == "cuda" else []):
        replay = Replay(Subject(workload, on), low, told)
        ranking = replay.ranking(to)
    settings: dict[str, Cell] = {
        **settings_of(workload),
        "seed": seed,
        "to": to,
        "run-to-run noise": digits(ranking.noise),
    }
    if replay.scale:
        settings["loss scale"] = f"2**{replay.scale}"
    tables = [_ranking_table(ranking)]
    if ranking.layers:
        tables.append(_table(LAYERS, ranking.layers, ranking))
    return computed_answer(
        on,
        study="shadow",
        question=f"Which module of {replay.subject.name}, alone in {to}, moves the gradients of a step farthest?",
        settings=settings,
        tables=tables,
        panels=(_panel(ranking),),
        findings=shadow_found(ranking),
    )


class Replay:
    """A step that runs again from one state, each time with other parts in 16 bits."""

    def __init__(self, subject: Subject, low: torch.dtype, told: Callable[[str, float], None]) -> None:
        self.subject, self._low, self._told = subject, low, told
        self._step = subject.step(adapt=with_cast_loss)
        self.quiet = tuple(drawing_modules(self._step.model))
        without_dropout(self._step.model)
        self._buffers = [(buffer, buffer.clone()) for buffer in self._step.model.buffers()]
        self.scale = 0
        told("the step as given", 0.0)
        self._found = find_parts(self._step, subject.seed)
        self._given = self._run(())
        if not self._given.is_finite:
            raise InputError(
                f"{self._given.not_finite} of the step of {subject.name} is not finite: give another batch"
            )

    def ranking(self, to: str) -> Ranking:
        """Every part alone, then all at once, then the layers of the first."""
        parts = [part for part in self._found.computing if part.widest > self._low.itemsize]
        if not parts:
            raise InputError(f"nothing in {self.subject.name} is wider than {to}: there is no precision to change")
        at_once = Part(name="all at once", kind="", paths=(), widest=0)
        if self._low == torch.float16:
            self._choose_scale(parts)
        together = self._ranked(at_once, parts)
        ranked: list[Ranked] = []
        for i, part in enumerate(parts):
            self._told(part.name, (i + 1) / (len(parts) + 1))
            ranked.append(self._ranked(part, (part,)))
        ranked.sort(key=lambda each: each.error, reverse=True)
        first = ranked[0].part
        layers = [Part(name=path, kind=first.kind, paths=(path,), widest=0) for path in first.paths[:MOST_LAYERS]]
        other = distance(self._run((), self.subject.seed + 1), self._given).gradients
        noise = max(distance(self._run(()), self._given).gradients for _ in range(_REPEATS))
        return Ranking(
            to=to, parts=ranked, at_once=together if together.off else None, noise=noise, idle=self._found.idle,
            layers=[self._ranked(layer, (layer,)) for layer in layers] if len(layers) > 1 else (), quiet=self.quiet,
            draws=other > 8 * max(noise, 2.0**-23),
        )  # fmt: skip

    def _ranked(self, part: Part, changed: Sequence[Part]) -> Ranked:
        try:
            found = self._run(changed)
        except StepscopeError as error:
            return Ranked(part=part, refused=str(error))
        off = distance(found, self._given)
        worst, worst_off = _worst(off, self._given)
        return Ranked(part=part, off=off, finite=found.is_finite, worst=worst, worst_off=worst_off)

    def _run(self, changed: Sequence[Part], seed: int | None = None) -> StepResult:
        with torch.no_grad():
            for buffer, kept in self._buffers:
                buffer.copy_(kept)
        weights = (2.0**self.scale,) if self.scale else ()
        # What fails is the user's code in a precision that it was not written for.
        with said_of(self.subject.name), computing_in(self._low, self._step.own, changed, self._found):
            return run_step(self._step, self.subject.seed if seed is None else seed, weights=weights)

    def _choose_scale(self, parts: Sequence[Part]) -> None:
        for self.scale in _SCALES:
            self._given = self._run(())
            try:
                if self._given.is_finite and self._run(parts).is_finite:
                    return
            except StepscopeError:
                continue


def _worst(off: Distance, given: StepResult) -> tuple[str, float]:
    """The parameter that is farthest for its own size, and how far. One whose gradient is next to zero does not count:
    what is left of it is rounding."""
    norms = {name: float(each.double().norm()) for name, each in given.gradients.items()}
    whole = sum(each**2 for each in norms.values()) ** 0.5
    found = {
        name: each * whole / norms[name]
        for name, each in off.parameters.items()
        if norms.get(name, 0.0) > 1e-6 * whole
    }  # fmt: skip
    worst = max(found, key=found.__getitem__, default="")
    return worst, found.get(worst, 0.0)


def _ranking_table(ranking: Ranking) -> Table:
    more = [ranking.at_once] if ranking.at_once else []
    return _table(RANKING, [*ranking.parts, *more], ranking)


def _table(title: str, ranked: Sequence[Ranked], ranking: Ranking) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for each in ranked:
        figures: tuple[Cell, ...] = (None, None, "", None)
        if each.off is not None:
            figures = (digits(each.off.loss), digits(each.off.gradients), each.worst, digits(each.worst_off))
        rows.append((each.part.name, each.part.kind, len(each.part.paths) or None, *figures, _verdict(each, ranking)))
    columns = ("module", "class", "modules", "loss off by", "gradients off by", "worst parameter", "off by", "verdict")
    return Table(title=title, columns=columns, rows=tuple(rows))


def _verdict(ranked: Ranked, ranking: Ranking) -> str:
    if ranked.off is None:
        return "does not run"
    if not ranked.finite:
        return "not finite"
    return "within noise" if ranking.is_noise(ranked) else "above noise"


def _panel(ranking: Ranking) -> Panel:
    points = [_bar(each) for each in ranking.parts if each.off is not None][:_MOST_BARS]
    title = f"error of the gradients with it alone in {ranking.to}, relative"
    return Panel(x_title="", y_title=title, points=tuple(points), kind="bars", y_log=True)


def _bar(ranked: Ranked) -> Point:
    known = ranked.finite and ranked.error > 0
    missing = "" if known else "none" if ranked.finite else "not finite"
    return Point(line="error", name=ranked.part.name, y=ranked.error if known else 0.0, missing=missing)
