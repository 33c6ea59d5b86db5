"""Prices graph breaks and recompilations of a step: the step is compiled with them and without them, and measured.

A break can hide others: where the frame that it is in cannot go on, its caller is not compiled either. So what breaks
the step is looked for again with each break avoided, until no new one comes up. The price of a break is then what it
adds to the step in which all the others are avoided.
"""

import contextlib
import gc
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import torch._dynamo
from torch import nn
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.backends.registry import lookup_backend
from torch.utils._traceback import shorten_filename

from stepscope.core.errors import portable_path
from stepscope.core.range_names import FORWARD
from stepscope.core.run import Settings
from stepscope.core.study_results import CompiledStep, GraphBreak, PricedBreak, Recompilation
from stepscope.recording.compilation import CompilationWatch, reset_compilation
from stepscope.recording.device import timing_device
from stepscope.recording.driven import observe_step
from stepscope.recording.keepers import saved_tensors
from stepscope.recording.step import Recorder, Step, drive
from stepscope.recording.timer import measure_one

_ROUNDS = 2
"""Times that each batch is run before anything is counted."""
_MOST_ROUNDS = 16
_MOST_LAYERS = 5
"""Times that a step is compiled anew to find breaks behind breaks."""
_SETTING = re.compile(r"torch\._dynamo\.config\.(\w+) = True")
_LOGGING = {"print": print, "warnings.warn": warnings.warn}
_OURS = "stepscope/training/user_module/"
_LINE = re.compile(r"[\w/.\-]+\.py:\d+")

Make = Callable[[], Step]
"""Makes the step, not compiled, with the same weights and batches each time."""


class Pricing:
    """Measures the prices of one step. settings: how each of its variants is timed; None to count alone."""

    def __init__(
        self,
        make: Make,
        device: torch.device,
        *,
        settings: Settings | None,
        backend: str = "inductor",
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._make, self._device, self._settings, self._backend, self._tell = make, device, settings, backend, tell
        self.steps = 0
        """Steps in which recompilations were looked for."""
        self.recompilations: tuple[Recompilation, ...] = ()
        """The recompilations of the step with no break avoided."""
        if settings is not None:
            # The backend loads what it needs once, or the first variant would seem to take that long to compile.
            x = torch.ones(4, device=device, requires_grad=True)
            torch.compile(lambda x: (2 * x).sum(), backend=backend)(x).backward()
        self._known: dict[str, CompiledStep] = {}
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # it would warn of the breaks of each variant
        self.as_it_is = self._measured("as it is", {})

    def breaks(self) -> tuple[CompiledStep, tuple[PricedBreak, ...]]:
        """The step with all breaks avoided that can be, and each break's price."""
        avoided: dict[str, Any] = {}
        by_place: dict[tuple[str, str], GraphBreak] = {}
        clean = self.as_it_is
        for _ in range(_MOST_LAYERS):
            by_place |= {(each.place, each.reason): each for each in clean.breaks}
            settings = {name: value for each in clean.breaks for name, value in _avoiding(each).items()}
            if settings.keys() <= avoided.keys():
                break
            for name, value in settings.items():
                unites = isinstance(value, set) and name in avoided
                avoided[name] = avoided[name] | value if unites else value
            clean = self._once("with breaks avoided", avoided)
        by_setting: dict[str, list[GraphBreak]] = {}
        for each in by_place.values():
            by_setting.setdefault(next(iter(_avoiding(each)), ""), []).append(each)
        lasting = by_setting.pop("", [])
        priced = [self._priced(setting, breaks, avoided, clean) for setting, breaks in by_setting.items()]
        return clean, (*priced, *(self._run_eagerly(each, avoided) for each in lasting))

    def dynamic(self) -> CompiledStep | None:
        """The step compiled with dynamic=True; None where nothing was compiled again."""
        return self._measured("dynamic=True", {}, dynamic=True) if self.recompilations else None

    def _priced(
        self, setting: str, breaks: list[GraphBreak], avoided: dict[str, Any], clean: CompiledStep
    ) -> PricedBreak:
        others = {name: value for name, value in avoided.items() if name != setting}
        with_them = self._once(f"with {breaks[0].place}", others) if others else self.as_it_is
        how = _LOGGED if setting == _LOGGED else f"{setting} = True"
        still_there = {each.place for each in clean.breaks}
        left = [each for each in breaks if each.place in still_there]
        if len(left) == len(breaks):
            return PricedBreak(breaks=tuple(breaks), how=how, why_not=f"{how} does not avoid it")
        return PricedBreak(breaks=tuple(breaks), how=how, with_them=with_them, without=clean)

    def _run_eagerly(self, one: GraphBreak, avoided: dict[str, Any]) -> PricedBreak:
        """A break that no setting avoids: it has no price, but its function could be left to run eagerly whole."""
        with _disabled(self._make, one) as done:
            eagerly = self._measured(f"{one.function} eagerly", avoided) if done else None
        return PricedBreak(
            breaks=(one,),
            eagerly=eagerly and msgspec.structs.replace(eagerly, breaks=()),
            why_not="no setting of dynamo avoids a break of this kind",
        )

    def _once(self, what: str, config: Mapping[str, Any]) -> CompiledStep:
        """The step with these settings, measured once."""
        key = repr(sorted((name, repr(value)) for name, value in config.items()))
        if key not in self._known:
            self._known[key] = self._measured(what, config)
        return self._known[key]

    def _measured(self, what: str, config: Mapping[str, Any], *, dynamic: bool | None = None) -> CompiledStep:
        self._tell(what)
        reset_compilation()
        dynamo_utils.graph_break_reasons.clear()
        gc.collect()
        calls = [0]

        def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
            compiled = lookup_backend(self._backend)(graph, inputs)

            def call(*args: Any) -> Any:
                calls[0] += 1
                return compiled(*args)

            return call

        step: Any = self._make()
        watch = CompilationWatch(self._device)
        watch.start()
        caches: AbstractContextManager[object] = contextlib.nullcontext()
        if not config and self._backend == "inductor":
            # The answer says how long inductor took to compile the step as given, so that step finds no cache.
            import torch._inductor.utils as inductor  # noqa: PLC0415  (seconds, which other backends do not need)

            caches = inductor.fresh_cache()
        with torch._dynamo.config.patch(**config), caches:
            step.forward_module = torch.compile(step.forward_module, backend=backend, dynamic=dynamic)
            step.compiled = True
            batches = max(1, len(step.batches))
            steps = min(_MOST_ROUNDS, _ROUNDS * batches)
            counted = min(batches, steps)
            known, again = 0, []
            for i in range(steps):
                if i == steps - counted:
                    calls[0] = 0
                step.prepare()
                drive(step)
                metrics = dynamo_utils.get_compilation_metrics()
                again += [(i, metric) for metric in metrics[known:] if getattr(metric, "recompile_reason", None)]
                known = len(metrics)
            pieces = calls[0] / counted
            compiled = watch.read()
            breaks = _breaks()
            saved = _SavedBytes(step)
            step.prepare()
            drive(step, saved)
            _, memory = observe_step(step, self._device)
            samples = None
            if self._settings is not None:
                samples = measure_one(step, device=timing_device(self._device), settings=self._settings)["step"]
        if dynamic is None and not config and not self.steps:
            self.steps = steps
            # Where dynamo reaches its limit it compiles nothing, and its record names no function.
            self.recompilations = tuple(_recompilation(i, metric) for i, metric in again if metric.co_filename)
            self.gave_up_at = next((_test_of(_guard(metric)) for _, metric in again if not metric.co_filename), "")
        return CompiledStep(
            pieces=pieces,
            graphs=dynamo_utils.counters["stats"]["unique_graphs"],
            compile_s=compiled.compile_s if compiled is not None else 0.0,
            saved_bytes=saved.bytes,
            peak_bytes=memory.allocated_peak,
            samples=samples,
            breaks=breaks,
        )


@dataclass(eq=False)
class _SavedBytes(Recorder):
    """Counts what the graph keeps for backward when forward has ended, but for parameters and buffers."""

    step: Step
    bytes: int | None = field(init=False, default=None)

    def phase_ends(self, name: str) -> None:
        loss = self.step.loss
        if name != FORWARD or loss is None or loss.grad_fn is None:
            return
        model = self.step.model
        resident = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        storages = [saved.tensor.untyped_storage() for saved in saved_tensors(loss.grad_fn)]
        kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self.bytes = sum(size for address, size in kept.items() if address not in resident)


_LOGGED = "reorderable_logging_functions"


def _avoiding(one: GraphBreak) -> dict[str, Any]:
    """The setting of dynamo that avoids such a break, as its own hint names it; empty where there is none."""
    function = next((name for name in _LOGGING if f"`{name}`" in one.reason), None)
    if function is not None:
        return {_LOGGED: {_LOGGING[function]}}
    named = _SETTING.search(one.reason)
    return {named[1]: True} if named and hasattr(torch._dynamo.config, named[1]) else {}


def _breaks() -> tuple[GraphBreak, ...]:
    """The breaks of the graphs that dynamo has made, each once."""
    breaks: dict[tuple[str, str], GraphBreak] = {}
    for broken in dynamo_utils.graph_break_reasons:
        if broken.user_stack and broken.graph_break:
            frame, reason = broken.user_stack[-1], " ".join(str(broken.reason).split())
            place = f"{portable_path(frame.filename)}:{frame.lineno}"
            breaks.setdefault((place, reason), GraphBreak(place, frame.name, reason))
    return tuple(breaks.values())


def _guard(metric: Any) -> str:
    """The guard that failed, as dynamo words it."""
    return str(metric.recompile_reason).splitlines()[0].partition(": ")[2] or str(metric.recompile_reason)


def _test_of(guard: str) -> str:
    """What a guard tests, without the line of source that made it."""
    return guard.partition("#")[0].strip()[:200]


def place_named(shortened: str, compiled: str) -> str:
    """The file and line that dynamo shortened, as they are named elsewhere. compiled: the file of the function that was
    compiled, which is most often the same.

    PyTorch cuts off what a file's path shares with its own; where that is the root alone, a letter, too: `/tmp/a.py` is
    `mp/a.py` then.
    """
    file, _, line = shortened.rpartition(":")
    modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    whole = next((each for each in (compiled, *modules) if each and shorten_filename(each) == file), file)
    return f"{portable_path(whole)}:{line}"


def _recompilation(step: int, metric: Any) -> Recompilation:
    guard = _guard(metric)
    named = _LINE.search(guard)
    if _OURS in (named[0] if named else metric.co_filename):
        place = "the call of the module"
    elif named:
        place = place_named(named[0], metric.co_filename)
    else:
        place = f"{portable_path(metric.co_filename)}:{metric.co_firstlineno}"
    return Recompilation(
        function=metric.co_name,
        place=place,
        guard=_test_of(guard),
        step=step,
        seconds=metric.entire_frame_compile_time_s or 0.0,
    )


@contextlib.contextmanager
def _disabled(make: Make, one: GraphBreak) -> Iterator[bool]:
    """A context in which the function that holds a break runs eagerly; gives whether it was found among the methods of
    the step's modules."""
    method = _owner(make().model.modules(), one)
    if method is None:
        yield False
        return
    owner, name, function = method
    setattr(owner, name, torch.compiler.disable(function))
    try:
        yield True
    finally:
        setattr(owner, name, function)


def _owner(modules: Iterator[nn.Module], one: GraphBreak) -> tuple[type, str, Callable[..., Any]] | None:
    """The class, and the method of it that holds the line of a break."""
    file, _, line = one.place.rpartition(":")
    classes: Sequence[type] = list(dict.fromkeys(owner for module in modules for owner in type(module).__mro__))
    for owner in classes:
        for name, function in vars(owner).items():
            code = getattr(function, "__code__", None)
            if code is None or portable_path(code.co_filename) != file:
                continue
            if int(line) in {at for _, _, at in code.co_lines() if at is not None}:
                return owner, name, function
    return None
