"""Which module's precision the gradients depend on: one step, again from the same weights, batch and random state, with
each module alone in 16 bits, ranked by how far this moves the gradients, beside how far the step again moves them. Or
in a format of blocks: each linear layer's products alone, and all at once by several recipes, beside the noise of the
batch.
"""

import contextlib
import dataclasses
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.core.answer import Answer, Cell, Finding, Panel, Point, Table, note, warning
from stepscope.core.errors import InputError, StepscopeError, choose
from stepscope.core.figures import digits
from stepscope.core.float_formats import BlockFormat, block_format
from stepscope.core.model_config import ModelConfig
from stepscope.core.range_names import FORWARD
from stepscope.questions import replays
from stepscope.questions.answers import computed_answer, dtype_of
from stepscope.questions.replays import Distance, Subject, share
from stepscope.questions.steps import folded, layers_folded, one_step_of
from stepscope.recording.environment import resolve_device
from stepscope.recording.flops import FlopCounts
from stepscope.recording.step import Recorder
from stepscope.training.scaled_products import (
    PRODUCTS,
    BlockLoss,
    Product,
    Recipe,
    block_products,
    first_and_last,
    linears_replaced,
    takes_blocks,
)
from stepscope.training.user_module.module_step import ModuleStep, UserModule
from stepscope.training.user_module.user_code import user_errors

# The parts of a step whose precision can be changed: modules by what they compute themselves, and the loss.
#
# A part is a module's own operators. What another module inside it computes is a part of its own and keeps its
# precision, so that a block is what stands between its modules: the sums of a residual stream, or an attention written
# out.


LOSS = "the loss"
"""The name of the part that is no module: what the loss function computes."""

_NO_ARITHMETIC = ("_to_copy", "clone", "copy_", "detach", "alias", "contiguous")
"""Operators that move numbers and compute none."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module's own operators; of layers that differ in a number alone, those of all of them."""

    name: str
    """The path, with * for the numbers of layers; LOSS for the loss function."""
    kind: str
    """The class, and that it is what stands between modules where it has some."""
    paths: tuple[str, ...]
    """The module of each layer. Empty for the loss."""
    widest: int
    """The bytes of the widest floating number that its operators take."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What computes in a step, and what does not."""

    computing: tuple[Part, ...]
    """In the order in which they first compute."""
    called: frozenset[str]
    """The paths of all modules that run."""
    idle: tuple[str, ...]
    """Modules that run and compute nothing, such as a dropout that is off."""


def find_parts(step: ModuleStep, seed: int) -> Parts:
    """Run a step once, and see which modules compute."""
    seeing = _Seeing()
    with seeing._watching, replays.hooked(step.model, seeing.enter, seeing.leave):
        replays.run_step(step, seed, seeing)
    # Modules of a Sequential differ in a number alone, too: only those of one class are layers.
    grouped: dict[tuple[str, str], list[str]] = {}
    for path in seeing.widest:
        kind = step.user_module.loss_name if path is None else type(step.model.get_submodule(path)).__name__
        if path is not None and nearest_inside(path, frozenset(seeing.called)):
            kind += ", between its modules"
        grouped.setdefault((LOSS if path is None else folded(path), kind), []).extend([] if path is None else [path])
    names = {key: paths[0] if len(paths) == 1 and paths[0] else key[0] for key, paths in grouped.items()}
    several = Counter(names.values())
    parts = tuple(
        Part(
            name=f"{names[key]} ({key[1]})" if several[names[key]] > 1 else names[key],
            kind=key[1],
            paths=tuple(paths),
            widest=max(seeing.widest[path] for path in paths or (None,)),
        )
        for key, paths in grouped.items()
    )
    inside = {path for path in seeing.called if any(_is_inside(other, path) for other in seeing.called)}
    idle = {folded(path): None for path in seeing.called if path not in seeing.widest and path not in inside}
    return Parts(computing=parts, called=frozenset(seeing.called), idle=tuple(idle))


def nearest_inside(path: str, called: frozenset[str]) -> list[str]:
    """The modules inside of one that run, without those that stand inside of another of them."""
    inside = [other for other in called if _is_inside(other, path)]
    return [other for other in inside if not any(_is_inside(other, between) for between in inside)]


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and path.startswith(f"{outer}." if outer else "")


class _Seeing(Recorder):
    """Knows which module runs, and sees the operators of forward by a mode."""

    def __init__(self) -> None:
        self.open: list[str] = []
        """The modules that run, the innermost last."""
        self._watching = contextlib.ExitStack()
        self.called: dict[str, None] = {}
        self.widest: dict[str | None, int] = {}
        """The bytes of the widest number that each module's own operators take; under None the loss's."""

    def enter(self, path: str, *_: object) -> None:
        """A hook before a module's forward."""
        self.open.append(path)
        self.called[path] = None

    def leave(self, *_: object) -> None:
        """A hook behind a module's forward."""
        self.open.pop()

    def phase_begins(self, name: str) -> None:
        if name == FORWARD:
            self._watching.enter_context(_Operators(self))

    def phase_ends(self, name: str) -> None:
        self._watching.close()


class _Operators(TorchDispatchMode):
    """A mode that notes how wide the floating numbers are that the open module's operators compute from others."""

    def __init__(self, seeing: _Seeing) -> None:
        super().__init__()
        self._seeing = seeing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        widest = _widest_number((args, kwargs))
        if not views and name not in _NO_ARITHMETIC and widest and _widest_number(output):
            module = self._seeing.open[-1] if self._seeing.open else None
            self._seeing.widest[module] = max(self._seeing.widest.get(module, 0), widest)
        return output


def _widest_number(value: Any) -> int:
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
    return max((leaf.dtype.itemsize for leaf in leaves), default=0)


# Runs some parts of a step in another precision, and all others as they were given.


class CastLoss:
    """A loss function whose output can be computed in another precision."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss = loss
        self.low: torch.dtype | None = None
        """The dtype in which it computes; None as given."""
        # A step reads from the signature what the loss takes beside the output.
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
        self.__name__ = getattr(loss, "__name__", type(loss).__name__)

    def __call__(self, output: Any, *others: Any) -> Any:
        if self.low is None:
            return self._loss(output, *others)
        wide = _widest(output)
        return _raised(self._loss(_lowered(output, self.low), *_lowered(others, self.low)), self.low, wide)


@contextlib.contextmanager
def computing_in(low: torch.dtype, user_module: UserModule, parts: Sequence[Part], modules: Parts) -> Iterator[None]:
    """While open, the own operators of these parts take inputs, parameters and buffers in `low`, and what they give is
    given on in its own dtype. Modules inside of them that are no such part compute as given."""
    with contextlib.ExitStack() as stack:
        guarded: list[tuple[nn.Module, _Cast]] = []
        for part in parts:
            if part.name == LOSS and isinstance(user_module.loss, CastLoss):
                user_module.loss.low = low
                stack.callback(setattr, user_module.loss, "low", None)
            for path in part.paths:
                module, inside = user_module.module.get_submodule(path), nearest_inside(path, modules.called)
                cast = _Cast(low, _owners(user_module.module, path, modules.called))
                stack.enter_context(_replaced_forward(module, cast.lowering))
                guarded += [(user_module.module.get_submodule(each), cast) for each in inside]
        # Outside of what lowers a module that is a part itself: it is raised first, which changes no number.
        for module, cast in guarded:
            stack.enter_context(_replaced_forward(module, cast.guarding))
        yield


@dataclass(eq=False)
class _Cast:
    """The cast of one module, while it runs."""

    low: torch.dtype
    owners: Sequence[nn.Module]
    _dtypes: list[torch.dtype] = field(init=False, default_factory=list[torch.dtype])
    """The dtype that is given on, of each call that is open."""
    _last: torch.dtype | None = field(init=False, default=None)
    """That of the last call: a checkpoint runs a module inside of it again in backward, when none is open."""

    def lowering(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of the module: it computes in the lower dtype."""

        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = [tensor for owner in self.owners for tensor in owner.parameters(recurse=False)]
            wide = _widest((args, kwargs, tensors))
            self._dtypes.append(wide)
            self._last = wide
            try:
                with self._lowered_state():
                    output = forward(*_lowered(args, self.low), **_lowered(kwargs, self.low))
            finally:
                self._dtypes.pop()
            return _raised(output, self.low, wide)

        return run

    def guarding(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a module inside: called by this one it computes as given."""

        def run(*args: Any, **kwargs: Any) -> Any:
            in_backward = torch._C._current_graph_task_id() != -1
            wide = self._dtypes[-1] if self._dtypes else self._last if in_backward else None
            if wide is None:
                return forward(*args, **kwargs)
            output = forward(*_raised(args, self.low, wide), **_raised(kwargs, self.low, wide))
            return _lowered(output, self.low)

        return run

    @contextlib.contextmanager
    def _lowered_state(self) -> Iterator[None]:
        """While open, the module's parameters and buffers are copies, through which gradients come back."""
        kept: list[tuple[dict[str, Any], str, Any]] = []
        for owner in self.owners:
            for held in (owner._parameters, owner._buffers):
                for name, tensor in held.items():
                    if tensor is not None and _is_wider(tensor, self.low):
                        kept.append((held, name, tensor))
        try:
            for held, name, tensor in kept:
                held[name] = tensor.to(self.low)
            yield
        finally:
            for held, name, tensor in kept:
                held[name] = tensor


def _owners(model: nn.Module, path: str, called: frozenset[str]) -> list[nn.Module]:
    """The module, and those inside of it that never run: it takes their parameters itself."""
    module = model.get_submodule(path)
    inside = nearest_inside(path, called)
    owners = [module]
    for below, other in module.named_modules(prefix=path):
        if other is not module and not any(below == each or below.startswith(f"{each}.") for each in inside):
            owners.append(other)
    return owners


@contextlib.contextmanager
def _replaced_forward(module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    instance_forward = module.__dict__.get("forward")
    module.forward = make(module.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if instance_forward is None:
            del module.forward
        else:
            module.forward = instance_forward  # type: ignore[method-assign]


def _is_wider(tensor: Tensor, low: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > low.itemsize


def _widest(value: Any) -> torch.dtype:
    dtypes = [leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.get_default_dtype())


def _lowered(value: Any, low: torch.dtype) -> Any:
    return tree_map(lambda leaf: leaf.to(low) if isinstance(leaf, Tensor) and _is_wider(leaf, low) else leaf, value)


def _raised(value: Any, low: torch.dtype, wide: torch.dtype) -> Any:
    return tree_map(lambda leaf: leaf.to(wide) if isinstance(leaf, Tensor) and leaf.dtype == low else leaf, value)


# How far each part of a step, alone in 16 bits, moves the gradients.


NOISE_FACTOR = 2.0
"""How many times as far as the step again a change may be and still be noise."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A part, and how far the step is moved where it alone is in 16 bits."""

    part: Part
    off: Distance | None = None
    """None where it does not run."""
    finite: bool = True
    worst: str = ""
    """The parameter whose gradient is farthest, for its own size."""
    worst_off: float = 0.0
    """How far that is, relative to its own norm."""
    refused: str = ""

    @property
    def error(self) -> float:
        """How far the gradients are off; infinite where they are not finite, and negative where it does not run."""
        if self.off is None:
            return -1.0
        return self.off.gradients if self.finite else float("inf")


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """All parts, the one that moves the gradients farthest first."""

    to: str
    parts: Sequence[Ranked]
    at_once: Ranked | None
    """All parts together; None where that does not run."""
    layers: Sequence[Ranked]
    """The layers of the first part, one at a time."""
    noise: float
    """How far the step again is, relative."""
    idle: Sequence[str]
    """Modules that compute nothing."""
    quiet: Sequence[str]
    """Modules whose dropout is off."""
    draws: bool
    """Whether forward draws random numbers all the same."""

    def is_noise(self, ranked: Ranked) -> bool:
        """Whether a part moves the gradients no farther than the step again does."""
        return ranked.off is not None and ranked.error <= NOISE_FACTOR * self.noise


# What the ranking of modules by their precision shows, in sentences.


def shadow_found(ranking: Ranking) -> Iterator[Finding]:
    """The module that matters most, those that do not matter, and what could not be seen."""
    ran = [each for each in ranking.parts if each.off is not None]
    above = [each for each in ran if not ranking.is_noise(each)]
    yield _headline(ranking, ran, above)
    broken = [each.part.name for each in above if not each.finite]
    if broken:
        yield warning(
            "shadow-not-finite",
            f"Not finite is the loss or a gradient with {_quoted(broken)} alone in {ranking.to}.",
            {"modules": len(broken)},
        )
    if ranking.layers:
        yield _layers(ranking)
    quiet = [each.part.name for each in ran if ranking.is_noise(each)]
    if quiet:
        yield note(
            "shadow-noise",
            f"Within noise ({_noise(ranking)}) are the gradients with {_quoted(quiet)} alone in {ranking.to}.",
            {"modules": len(quiet), "noise": ranking.noise},
        )
    for each in ranking.parts:
        if each.refused:
            yield note("shadow-refused", f"`{each.part.name}` does not run in {ranking.to}: {each.refused}")
    if ranking.idle:
        yield note("shadow-idle", f"Nothing is computed by {_quoted(ranking.idle)}, which stayed as given.")
    if ranking.quiet:
        yield note("shadow-dropout", f"Dropout is off, in {_quoted(ranking.quiet)}: another precision draws others.")
    if ranking.draws:
        yield warning(
            "shadow-dropout",
            "Forward draws random numbers of its own: another precision may draw others, which counts as error here.",
            remedy="give the factory an argument that turns randomness off in forward",
        )


def _headline(ranking: Ranking, ran: list[Ranked], above: list[Ranked]) -> Finding:
    if not ran:
        return warning("shadow", f"No module runs alone in {ranking.to}.")
    if not above:
        return note(
            "shadow",
            f"No module, alone in {ranking.to}, moves the gradients farther than the step again does "
            f"({_noise(ranking)}).",
            {"noise": ranking.noise},
        )
    first = above[0]
    evidence: dict[str, float | int | str | None] = {
        "module": first.part.name,
        "gradients_off": first.error,
        "noise": ranking.noise,
        "worst_parameter": first.worst,
        "worst_off": first.worst_off,
    }
    together = f" ({len(first.part.paths)} modules together)" if len(first.part.paths) > 1 else ""
    text = f"`{first.part.name}`{together} is the most sensitive to its precision: alone in {ranking.to} "
    if first.finite:
        text += f"it moves the gradients by {share(first.error)}, those of {first.worst} by {share(first.worst_off)}"
    else:
        text += "it makes them not finite"
    if len(ran) > 1:
        second = ran[1]
        evidence["second"], evidence["second_off"] = second.part.name, second.error
        times = f", {first.error / second.error:.3g} times as far" if 0 < second.error < float("inf") else ""
        text += f"; the next, `{second.part.name}`, by {share(second.error)}{times if first.finite else ''}"
    if ranking.at_once is not None:
        evidence["all_at_once"] = ranking.at_once.error
        text += (
            f". All at once move them by {share(ranking.at_once.error)}"
            if ranking.at_once.finite
            else (". All at once make them not finite")
        )
    return note("shadow", f"{text}; {_noise(ranking)}.", evidence)


def _layers(ranking: Ranking) -> Finding:
    known = [each for each in ranking.layers if each.off is not None]
    worst, least = max(known, key=lambda each: each.error), min(known, key=lambda each: each.error)
    return note(
        "shadow-layers",
        f"Of its {len(ranking.layers)} layers, one at a time, `{worst.part.name}` moves the gradients farthest, by "
        f"{share(worst.error)}, and `{least.part.name}` least, by {share(least.error)}.",
        {"most": worst.part.name, "most_off": worst.error, "least": least.part.name, "least_off": least.error},
    )


def _noise(ranking: Ranking) -> str:
    return (
        f"the step again moves them by {share(ranking.noise)}"
        if ranking.noise
        else ("the step again gives the same bits")
    )


def _quoted(names: Sequence[str]) -> str:
    return replays.listed([f"`{name}`" for name in names])


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
    factory: str | None = None, arguments: Mapping[str, Any] | None = None, device: str = "auto",
    tell: Callable[[str, float], None] | None = None,
) -> Answer:  # fmt: skip
    """Rank the modules of a step by the error that each makes in the gradients, alone in bf16 or fp16.

    factory: that of a model of the user's own, or its config.json, in place of a model and its sizes; `arguments`:
    what it is called with. Raises InputError where nothing can be changed.
    """
    low, on, report = dtype_of(choose(to, LOW, "precision")), resolve_device(device), replays.patient(tell)
    workload = one_step_of(factory, arguments, model=model, batch_size=batch_size, seq_len=seq_len, seed=seed)
    with torch.random.fork_rng([on] if on.type == "cuda" else []):
        replay = Replay(Subject(workload, on), low, report)
        ranking = replay.ranking(to)
    settings: dict[str, Cell] = {**workload.named, "seed": seed, "to": to, "run-to-run noise": digits(ranking.noise)}
    if replay.scale:
        settings["loss scale"] = f"2**{replay.scale}"
    tables = [_table(RANKING, [*ranking.parts, *filter(None, [ranking.at_once])], ranking)]
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

    def __init__(self, subject: Subject, low: torch.dtype, report: Callable[[str, float], None]) -> None:
        self.subject, self._low, self._report = subject, low, report
        # A loss outside of forward becomes one that can be cast.
        self._step = subject.step(
            adapt=lambda its: its if its.loss is None else dataclasses.replace(its, loss=CastLoss(its.loss))
        )
        self.quiet = tuple(replays.drawing_modules(self._step.model))
        replays.without_dropout(self._step.model)
        self._buffers = [(buffer, buffer.clone()) for buffer in self._step.model.buffers()]
        self.scale = 0
        report("the step as given", 0.0)
        self._parts = find_parts(self._step, subject.seed)
        self._unchanged = self._run(())
        if not self._unchanged.is_finite:
            raise InputError(
                f"{self._unchanged.not_finite} of the step of {subject.name} is not finite: give another batch"
            )

    def ranking(self, to: str) -> Ranking:
        """Every part alone, then all at once, then the layers of the first."""
        parts = [part for part in self._parts.computing if part.widest > self._low.itemsize]
        if not parts:
            raise InputError(f"nothing in {self.subject.name} is wider than {to}: there is no precision to change")
        at_once = Part(name="all at once", kind="", paths=(), widest=0)
        if self._low == torch.float16:
            self._choose_scale(parts)
        together = self._ranked(at_once, parts)
        ranked: list[Ranked] = []
        for i, part in enumerate(parts):
            self._report(part.name, (i + 1) / (len(parts) + 1))
            ranked.append(self._ranked(part, (part,)))
        ranked.sort(key=lambda each: each.error, reverse=True)
        first = ranked[0].part
        layers = [Part(name=path, kind=first.kind, paths=(path,), widest=0) for path in first.paths[:MOST_LAYERS]]
        other = replays.distance(self._run((), self.subject.seed + 1), self._unchanged).gradients
        noise = max(replays.distance(self._run(()), self._unchanged).gradients for _ in range(_REPEATS))
        return Ranking(
            to=to, parts=ranked, at_once=together if together.off else None, noise=noise, idle=self._parts.idle,
            layers=[self._ranked(layer, (layer,)) for layer in layers] if len(layers) > 1 else (), quiet=self.quiet,
            draws=other > 8 * max(noise, 2.0**-23),
        )  # fmt: skip

    def _ranked(self, part: Part, changed: Sequence[Part]) -> Ranked:
        try:
            result = self._run(changed)
        except StepscopeError as error:
            return Ranked(part=part, refused=str(error))
        off = replays.distance(result, self._unchanged)
        # A parameter whose gradient is next to zero does not count: what is left of it is rounding.
        norms = {name: float(replays.in_double(each).norm()) for name, each in self._unchanged.gradients.items()}
        whole = sum(each**2 for each in norms.values()) ** 0.5
        for_its_size = {
            name: each * whole / norms[name]
            for name, each in off.parameters.items()
            if norms.get(name, 0.0) > 1e-6 * whole
        }
        worst = max(for_its_size, key=for_its_size.__getitem__, default="")
        worst_off = for_its_size.get(worst, 0.0)
        return Ranked(part=part, off=off, finite=result.is_finite, worst=worst, worst_off=worst_off)

    def _run(self, changed: Sequence[Part], seed: int | None = None) -> replays.StepResult:
        with torch.no_grad():
            for buffer, kept in self._buffers:
                buffer.copy_(kept)
        weights = (2.0**self.scale,) if self.scale else ()
        # What fails is the user's code in a precision that it was not written for.
        with user_errors(self.subject.name), computing_in(self._low, self._step.user_module, changed, self._parts):
            return replays.run_step(self._step, self.subject.seed if seed is None else seed, weights=weights)

    def _choose_scale(self, parts: Sequence[Part]) -> None:
        for self.scale in _SCALES:
            self._unchanged = self._run(())
            try:
                if self._unchanged.is_finite and self._run(parts).is_finite:
                    return
            except StepscopeError:
                continue


def _table(title: str, ranked: Sequence[Ranked], ranking: Ranking) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for each in ranked:
        figures: tuple[Cell, ...] = (None, None, "", None)
        if each.off is not None:
            figures = (digits(each.off.loss), digits(each.off.gradients), each.worst, digits(each.worst_off))
        verdict = "within noise" if ranking.is_noise(each) else "above noise"
        if each.off is None or not each.finite:
            verdict = "does not run" if each.off is None else "not finite"
        rows.append((each.part.name, each.part.kind, len(each.part.paths) or None, *figures, verdict))
    columns = ("module", "class", "modules", "loss off by", "gradients off by", "worst parameter", "off by", "verdict")
    return Table(title=title, columns=columns, rows=tuple(rows))


def _panel(ranking: Ranking) -> Panel:
    points: list[Point] = []
    for each in ranking.parts:
        if each.off is None:
            continue
        known = each.finite and each.error > 0
        missing = "" if known else "none" if each.finite else "not finite"
        points.append(Point(line="error", name=each.part.name, y=each.error if known else 0.0, missing=missing))
    title = f"error of the gradients with it alone in {ranking.to}, relative"
    return Panel(x_title="", y_title=title, points=tuple(points[:_MOST_BARS]), kind="bars", y_log=True)


# What the gradients lose where the products of linear layers take operands in blocks of few bits.


RECIPES, BY_PRODUCT, BY_LAYER = (
    "Recipes, all layers at once",
    "Products, all layers at once",
    "Linear layers, each alone",
)
"""Titles of the tables."""
_PRODUCT_NAMES: dict[Product, str] = {"forward": "forward", "input": "input's gradient", "weight": "weight's gradient"}
_RECIPES: dict[str, dict[str, Any]] = {
    "nearest": {},
    "scales rounded up": {"rule": "up"},
    "gradients by chance": {"stochastic": True},
    "rotated": {"rotate": True},
    "first and last layers left": {},
    "by chance, rotated, first and last left": {"stochastic": True, "rotate": True},
}
"""The recipes by name, and how they differ from the first; those that name first and last layers leave them alone."""


@dataclass(frozen=True, kw_only=True)
class BlockRun:
    """How far a step is moved by operands in blocks, and what they lost."""

    off: Distance
    shares: tuple[float, float]

    @property
    def cells(self) -> tuple[Cell, ...]:
        return digits(self.off.gradients), *(digits(100 * each) for each in self.shares)


@dataclass(frozen=True, kw_only=True)
class BlockLayer:
    """Linear layers that differ in a number alone, in one format."""

    name: str
    paths: Sequence[str]
    whole: BlockRun
    apart: Sequence[BlockRun]
    """With one product at a time, in the order of PRODUCTS."""


@dataclass(frozen=True, kw_only=True)
class BlockResults:
    """What was seen of one format."""

    form: str
    recipes: Mapping[str, BlockRun]
    products: Mapping[Product, BlockRun]
    layers: Sequence[BlockLayer]
    """The one that moves the gradients farthest first."""


class BlockReplay:
    """A step that runs again from one state, each time with other products in blocks."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self._step = subject, subject.step()
        self.quiet = tuple(replays.drawing_modules(self._step.model))
        replays.without_dropout(self._step.model)
        self._buffers = [(buffer, buffer.clone()) for buffer in self._step.model.buffers()]
        self.paths: dict[str, None] = {}
        self.linear_share = 0.0
        """The share of forward's FLOPs that its linear layers do."""
        self.unknown: Sequence[str] = ()
        """Operators whose FLOPs nobody knows, which are not among forward's."""
        self._given = self._as_given()
        if not self.paths:
            raise InputError(f"{subject.name} has no linear layer: there are no products to take in blocks")
        if not self._given.is_finite:
            raise InputError(
                f"{self._given.not_finite} of the step of {subject.name} is not finite: give another batch"
            )
        if not any(gradient.any() for gradient in self._given.gradients.values()):
            raise InputError(f"every gradient of the step of {subject.name} is zero: give another batch")
        self.noise = self._noise()

    def _noise(self) -> float | None:
        """How far half of the batch moves the gradients, as another batch would; None where it cannot be cut."""
        try:
            halves = self.subject.step(accumulation=2)
            replays.without_dropout(halves.model)
            half = replays.run_step(halves, self.subject.seed, weights=(1.0, 0.0))
        except StepscopeError:
            return None
        return replays.distance(half, self._given).gradients

    def _as_given(self) -> replays.StepResult:
        """The step without blocks, and which linear layers it has."""
        counts, linear = FlopCounts("half"), 0

        def found(path: str, input: Tensor, weight: Tensor, _bias: Tensor | None) -> None:
            nonlocal linear
            in_backward = torch._C._current_graph_task_id() != -1  # a checkpoint runs it again
            if takes_blocks(input, weight) and not in_backward:
                self.paths[path] = None
                linear += 2 * input.numel() * weight.shape[0]

        counting = counts.running if "torch._dynamo" in sys.modules else counts.counting
        with linears_replaced(self._step.model, found), counting():
            result = self._again(counts)
        if all_flops := counts.work[FORWARD].flops:
            self.linear_share = min(1.0, linear / all_flops)
        self.unknown = sorted(counts.unknown)
        return result

    def _run(self, recipe_of: Callable[[str], Recipe | None]) -> replays.StepResult:
        with block_products(self._step.model, recipe_of):
            return self._again()

    def _again(self, *recorders: Recorder) -> replays.StepResult:
        """The step from its first state."""
        with torch.no_grad():
            for buffer, kept in self._buffers:
                buffer.copy_(kept)
        with user_errors(self.subject.name):
            return replays.run_step(self._step, self.subject.seed, *recorders)

    def with_blocks(self, paths: Sequence[str], form: BlockFormat, **changes: Any) -> BlockRun:
        """The step with these layers' products in blocks. changes: of the recipe."""
        loss = BlockLoss(form)
        recipe = Recipe(form=form, seen=loss.seen, **changes)
        result = self._run(lambda path: recipe if path in paths else None)
        return BlockRun(off=replays.distance(result, self._given), shares=loss.shares)

    def results(self, form: BlockFormat) -> BlockResults:
        """All layers by each recipe and each product, and layers alone."""
        paths, name_of = list(self.paths), layers_folded(self._step.model)
        between = [path for path in paths if path not in first_and_last(paths)]
        groups: dict[str, list[str]] = {}
        for path in paths:
            groups.setdefault(name_of(path), []).append(path)

        def layer(name: str, paths: Sequence[str]) -> BlockLayer:
            apart = [self.with_blocks(paths, form, products=(product,)) for product in PRODUCTS]
            return BlockLayer(name=name, paths=paths, whole=self.with_blocks(paths, form), apart=apart)

        return BlockResults(
            form=form.name,
            recipes={
                name: self.with_blocks(between if "last" in name else paths, form, **changes)
                for name, changes in _RECIPES.items()
                if ("rule" not in changes or form.powers_of_two) and ("last" not in name or between)
            },
            products={product: self.with_blocks(paths, form, products=(product,)) for product in PRODUCTS},
            layers=sorted(
                (layer(name, each) for name, each in groups.items()),
                key=lambda each: each.whole.off.gradients,
                reverse=True,
            ),
        )


def study_block_shadow(
    *,
    to: Sequence[str],
    model: ModelConfig | None = None,
    batch_size: int = 4,
    seq_len: int = 64,
    seed: int = 0,
    factory: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    device: str = "auto",
    tell: Callable[[str, float], None] | None = None,
) -> Answer:
    """Say what the gradients of a step lose where the products of its linear layers take operands in these formats of
    blocks: by recipe, by product and by layer. They are simulated.

    The other arguments are those of `study_shadow`. Raises InputError where there are no such layers.
    """
    forms = [block_format(name) for name in dict.fromkeys(to)]
    on, report = resolve_device(device), replays.patient(tell)
    workload = one_step_of(factory, arguments, model=model, batch_size=batch_size, seq_len=seq_len, seed=seed)
    results: list[BlockResults] = []
    with torch.random.fork_rng([on] if on.type == "cuda" else []):
        replay = BlockReplay(Subject(workload, on))
        for i, form in enumerate(forms):
            report(form.name, i / len(forms))
            results.append(replay.results(form))
    noise = replay.noise
    settings: dict[str, Cell] = {**workload.named, "seed": seed, "to": ", ".join(form.name for form in forms)}
    settings["noise of the batch"] = "unknown: the batch cannot be cut" if noise is None else digits(noise)
    settings["linear layers' share of forward's FLOPs"] = digits(replay.linear_share)
    return computed_answer(
        on,
        study="shadow",
        question=f"What do the gradients of {replay.subject.name} lose with products in blocks of few bits?",
        settings=settings,
        tables=_block_tables(results, noise),
        panels=(_block_panel(results),),
        findings=[*(_block_finding(each, noise) for each in results), *_left_out(replay)],
    )


def _left_out(replay: BlockReplay) -> Iterator[Finding]:
    """Products that are not linear layers', where they are the greater part; and that dropout is off."""
    if replay.linear_share < 0.5 or replay.unknown:
        beside = f", without those of {_quoted(replay.unknown)}, which nobody knows" if replay.unknown else ""
        yield warning(
            "shadow-left",
            f"Linear layers do {share(replay.linear_share)} of forward's FLOPs{beside}. All other products stay as "
            "they are, as those of attention, of convolutions, recurrent layers and experts that share one tensor: "
            "what these would lose is not in the figures.",
            {"linear_share": replay.linear_share},
        )
    if replay.quiet:
        yield note("shadow-dropout", f"Dropout is off, in {_quoted(replay.quiet)}.")


_LOST = ("gradients off by", "elements that vanish, %", "blocks that lose one, %")


def _block_tables(results: Sequence[BlockResults], noise: float | None) -> list[Table]:
    recipes: list[tuple[Cell, ...]] = []
    products: list[tuple[Cell, ...]] = []
    layers: list[tuple[Cell, ...]] = []
    for of in results:
        for name, run in of.recipes.items():
            over = run.off.gradients / noise if noise else None
            recipes.append((of.form, name, digits(run.off.loss), *run.cells, digits(over)))
        products += [(of.form, _PRODUCT_NAMES[product], *run.cells) for product, run in of.products.items()]
        for each in of.layers:
            verdict = "" if noise is None else "above noise" if each.whole.off.gradients > noise else "within noise"
            apart = (digits(one.off.gradients) for one in each.apart)
            layers.append((of.form, each.name, len(each.paths), *each.whole.cells, *apart, verdict))
    alone = (f"by {_PRODUCT_NAMES[product]}" for product in PRODUCTS)
    return [
        Table(title=RECIPES, columns=("format", "recipe", "loss off by", *_LOST, "over noise"), rows=tuple(recipes)),
        Table(title=BY_PRODUCT, columns=("format", "product", *_LOST), rows=tuple(products)),
        Table(title=BY_LAYER, columns=("format", "layer", "modules", *_LOST, *alone, "verdict"), rows=tuple(layers)),
    ]


def _block_panel(results: Sequence[BlockResults]) -> Panel:
    points = [
        Point(line=of.form, name=each.name, y=each.whole.off.gradients)
        for of in results
        for each in of.layers
        if each.whole.off.gradients > 0
    ]
    title = "error of the gradients with it alone in the format, relative"
    return Panel(x_title="", y_title=title, points=tuple(points), kind="bars", y_log=True)


def _block_finding(of: BlockResults, noise: float | None) -> Finding:
    """What a format costs, by which product and which layer; and which recipe costs least."""
    plain, first = of.recipes["nearest"], of.layers[0]
    name = min(of.recipes, key=lambda recipe: of.recipes[recipe].off.gradients)
    best = of.recipes[name].off.gradients
    most = max(PRODUCTS, key=lambda product: of.products[product].off.gradients)
    times = f", {plain.off.gradients / noise:.3g} times what half of the batch does" if noise else ""
    less = f"`{name}` moves them least: by {share(best)}."
    return note(
        "shadow-blocks",
        f"In {of.form} the products of all linear layers move the gradients by {share(plain.off.gradients)}{times}: "
        f"the {_PRODUCT_NAMES[most]} alone by {share(of.products[most].off.gradients)}, and of the layers "
        f"`{first.name}` by {share(first.whole.off.gradients)}. Of the operands' elements {share(plain.shares[0])} "
        f"vanish, in {share(plain.shares[1])} of the blocks. "
        + ("No other recipe moves them less." if name == "nearest" else f"Of the recipes {less}"),
        {
            "format": of.form,
            "gradients_off": plain.off.gradients,
            "noise": noise,
            "layer": first.name,
            "product": most,
            "vanish": plain.shares[0],
            "recipe": name,
            "recipe_off": best,
        },
    )
