"""Stepscope: a laboratory for one thing, a transformer training step.

    measured = stepscope.run(net, batch, loss, record="kineto")    # a module of your own, or the textbook's by name
    measured.trace, measured.samples["backward"].median_s
    stepscope.measure({"forward": forward, "backward": backward})  # phases of anything, on the same timer
    stepscope.trace("trace.json.gz")                               # any capture of torch.profiler or nsys, explained
    stepscope.memory("snapshot.pickle")                            # any snapshot of PyTorch's allocator, explained
    stepscope.fit(net, batch, loss, memory="80GiB")                # will it fit? Or fit("xl", seq_len=1024, ...)
    stepscope.show("last")                                         # a run that is stored
    stepscope.compare("runs/before", "runs/after")                 # is it faster, and how sure is that
    stepscope.tune("large", dtype="bf16", budget="10min")          # the fastest step that stays right
    stepscope.replace_parts(model, norm="fused", mlp="fused")      # fused kernels in your own model
    with stepscope.watch(model, optimizer) as watched:
        ...  # your own training loop

Each is what the command line runs, and `help` of each says what it takes. What they return shows itself in a notebook.
To import stepscope imports next to nothing: what needs PyTorch or polars imports it when it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.app.api.comparing import Compared, compare
    from stepscope.app.api.fitting import Fitted, fit
    from stepscope.app.api.measuring import Timed, measure
    from stepscope.app.api.reading import Measured, Remembered, Traced, memory, show, trace
    from stepscope.app.api.replacing import replace_parts
    from stepscope.app.api.running import run
    from stepscope.app.api.tuning import Found, tune
    from stepscope.app.api.watching import Watched, watch
    from stepscope.core.errors import InputError, StepscopeError
    from stepscope.training.parts.replaced import Replaced

__version__ = "0.1.0"
__all__ = [
    "Compared", "Fitted", "Found", "InputError", "Measured", "Remembered", "Replaced", "StepscopeError", "Timed",
    "Traced", "Watched", "__version__", "compare", "fit", "measure", "memory", "replace_parts", "run", "show",
    "trace", "tune", "watch",
]  # fmt: skip

_WHERE = {
    **dict.fromkeys(("compare", "Compared"), "stepscope.app.api.comparing"),
    **dict.fromkeys(("fit", "Fitted"), "stepscope.app.api.fitting"),
    **dict.fromkeys(("measure", "Timed"), "stepscope.app.api.measuring"),
    **dict.fromkeys(("memory", "show", "trace", "Measured", "Remembered", "Traced"), "stepscope.app.api.reading"),
    "replace_parts": "stepscope.app.api.replacing",
    "Replaced": "stepscope.training.parts.replaced",
    **dict.fromkeys(("run",), "stepscope.app.api.running"),
    **dict.fromkeys(("tune", "Found"), "stepscope.app.api.tuning"),
    **dict.fromkeys(("watch", "Watched"), "stepscope.app.api.watching"),
    **dict.fromkeys(("InputError", "StepscopeError"), "stepscope.core.errors"),
}
"""The module of each name that is imported when it is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
