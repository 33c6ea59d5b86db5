"""What torch.compile really did, from dynamo's counters: a fall-back to eager is silent otherwise.

It also tells what dynamo, inductor and Triton compiled while the measured steps ran, since that is in their times.
"""

import contextlib
import importlib
import sys
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo import utils as dynamo_utils

from stepscope.core.errors import portable_path
from stepscope.core.evidence import CompileReport, MeasuredCompilation

_LIMIT_PHRASES = ("recompile limit exceeded", "recompile_limit", "cache_size_limit", "cache size limit")

MODE_OPTIONS = ("triton.cudagraphs", "max_autotune", "coordinate_descent_tuning")
"""The options of inductor in which the modes of torch.compile differ."""

# Regions that PyTorch times, from 2.11 to 2.13 at least (`dynamo_timed`); each is entered once for each piece of work.
_FRAME, _LATE_BACKWARD = "_compile.compile_inner", "backward._backward_impl"
_RECORDING, _TUNING = "CUDAGraphNode.record", "CachingAutotuner.benchmark_all_configs"


def reset_compilation() -> None:
    """Forget compiled code and counters, so that the next report speaks of one workload only."""
    torch._dynamo.reset()
    dynamo_utils.counters.clear()
    dynamo_utils.clear_compilation_metrics()


def compile_report(compiled: nn.Module | None = None) -> CompileReport:
    """Read the counters gathered since `reset_compilation`, and what `compiled` says it was made with."""
    counters = dynamo_utils.counters
    # Where each graph was broken, by the first line of the reason.
    places: dict[str, list[str]] = {}
    for broken in getattr(dynamo_utils, "graph_break_reasons", ()):
        if broken.user_stack:
            frame = broken.user_stack[-1]
            places.setdefault(_first_line(broken.reason), []).append(f"{portable_path(frame.filename)}:{frame.lineno}")
    at = {reason: f" at {', '.join(dict.fromkeys(lines))}" for reason, lines in places.items()}
    breaks = {_first_line(reason): count for reason, count in counters["graph_break"].items()}
    refusals = [*counters["graph_break"], *counters["unimplemented"]]
    metrics = dynamo_utils.get_compilation_metrics()
    # A compile id reads frame/attempt: attempt 1 and later of a frame are recompilations.
    forward_ids = {m.compile_id for m in metrics if m.compile_id and not m.compile_id.startswith("!")}
    recompiles = {i for i in forward_ids if "/" in i and i.rpartition("/")[2].split("_")[0] not in ("0", "")}
    reasons: list[str] = []
    for metric in metrics:
        if getattr(metric, "recompile_reason", None):
            file, line = getattr(metric, "co_filename", None), getattr(metric, "co_firstlineno", None)
            function = f"{metric.co_name} at {portable_path(file)}:{line}: " if file and line else ""
            reasons.append(f"{function}{_first_line(metric.recompile_reason)}")
    # A hit in autograd's cache brings its inductor graphs along, which may be counted by themselves too.
    cached = max(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
    seconds = [m.entire_frame_compile_time_s for m in metrics if m.entire_frame_compile_time_s]
    return CompileReport(
        frames_total=counters["frames"]["total"],
        frames_compiled=counters["frames"]["ok"],
        graphs=counters["stats"]["unique_graphs"],
        graph_breaks=sum(breaks.values()),
        graph_break_reasons=tuple(f"{reason}{at.get(reason, '')}" for reason in breaks),
        recompiles=len(recompiles),
        recompile_reasons=tuple(dict.fromkeys(reasons)),
        limit_hit=any(phrase in str(reason).lower() for reason in refusals for phrase in _LIMIT_PHRASES),
        compile_s=sum(seconds) if seconds else None,
        cached_graphs=cached,
        options=_options(compiled),
        parts_compiled=len(_compiled_by_themselves(compiled)) if compiled is not None else None,
        graphs_recorded=_counts().recordings,
    )


class CompilationWatch:
    """Counts what this process compiles between `start` and `read`. Nothing is called while steps run, except by
    Triton for each kernel that it compiles.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            with contextlib.suppress(ImportError):  # without Triton, nothing is compiled by it
                importlib.import_module("triton")  # imported later, it could not be watched
        self._started = False
        self._kernels = 0
        self._before = _counts()

    def start(self) -> None:
        """Start to count what is compiled."""
        _listen(self)
        self._started, self._kernels, self._before = True, 0, _counts()

    def read(self) -> MeasuredCompilation | None:
        """What was compiled since `start`; None where `start` was never called."""
        if not self._started:
            return None
        _listen(None)
        now, before = _counts(), self._before
        return MeasuredCompilation(
            frames=now.frames - before.frames,
            graphs=now.graphs - before.graphs,
            recordings=now.recordings - before.recordings,
            kernels=self._kernels,
            tunings=now.tunings - before.tunings,
            compile_s=now.compile_s - before.compile_s,
        )

    def __call__(self, **_: object) -> None:
        """Count a kernel that Triton has compiled, or found in its cache; Triton calls this."""
        self._kernels += 1


def _counts() -> MeasuredCompilation:
    """What dynamo and inductor have done in this process so far."""
    counters = dynamo_utils.counters
    times_s: dict[str, list[float]] = getattr(dynamo_utils, "compilation_time_metrics", {})
    compiling_s, late_s = times_s.get(_FRAME, ()), times_s.get(_LATE_BACKWARD, ())
    return MeasuredCompilation(
        frames=counters["frames"]["total"],
        # A backward is compiled when it first runs, long after its frame; a cached one comes with its frame.
        graphs=counters["stats"]["unique_graphs"] + len(late_s),
        recordings=len(times_s.get(_RECORDING, ())),
        tunings=len(times_s.get(_TUNING, ())),
        compile_s=sum(compiling_s) + sum(late_s),
    )


def _listen(listener: CompilationWatch | None) -> None:
    """Set the listener to which a loaded Triton reports what it compiles; a user's own listener stays."""
    knobs: Any = getattr(sys.modules.get("triton"), "knobs", None)
    compilation = getattr(knobs, "compilation", None)
    if compilation is None or not (compilation.listener is None or isinstance(compilation.listener, CompilationWatch)):
        return
    compilation.listener = listener


def _options(compiled: nn.Module | None) -> dict[str, bool | int | str | None] | None:
    """MODE_OPTIONS as the compiled module has them; None where it does not say (another backend than inductor)."""
    ask = getattr(compiled, "get_compiler_config", None)
    if ask is None and (parts := _compiled_by_themselves(compiled)):
        ask = getattr(parts[0], "get_compiler_config", None)
    config = ask() if callable(ask) else None
    return {name: config.get(name) for name in MODE_OPTIONS} if isinstance(config, dict) else None


def _compiled_by_themselves(module: nn.Module | None) -> list[object]:
    """What `Module.compile` made of the modules in it."""
    calls = (getattr(part, "_compiled_call_impl", None) for part in (module.modules() if module is not None else ()))
    return [compiled for compiled in calls if compiled is not None]


def _first_line(reason: object) -> str:
    return (str(reason).splitlines() or ["(no reason given)"])[0][:200]
