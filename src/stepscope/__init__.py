"""Stepscope: a laboratory for one thing, a transformer training step.

    measured = stepscope.run(net, batch, loss, record="kineto")    # a module of your own, or the textbook's by name
    measured.trace, measured.samples["backward"].median_s
    stepscope.measure({"forward": forward, "backward": backward})  # phases of anything, on the same timer
    stepscope.bench({"mine": f, "torch": g}, shape="4096x1024")    # a kernel of your own: right, and faster?
    stepscope.trace("trace.json.gz")                               # any capture of torch.profiler or nsys, explained
    stepscope.memory("snapshot.pickle")                            # any snapshot of PyTorch's allocator, explained
    stepscope.fit(net, batch, loss, memory="80GiB")                # will it fit? Or fit("xl", seq_len=1024, ...)
    stepscope.show("last")                                         # a run that is stored
    stepscope.advise("last").patch                                 # what to change in the script that it watched
    stepscope.compare("runs/before", "runs/after")                 # is it faster, and how sure is that
    stepscope.tune("large", dtype="bf16", budget="10min")          # the fastest step that stays right
    stepscope.replace_parts(model, norm="fused", mlp="fused")      # fused kernels in your own model
    with stepscope.watch(model, optimizer) as watched:
        ...  # your own training loop

Each is what the command line runs, and `help` of each says what it takes. What they return shows itself in a notebook.
To import stepscope imports next to nothing: what needs PyTorch or polars imports it when it is asked for.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.app.verbs.bench import Benched, bench
    from stepscope.app.verbs.compare import Compared, compare
    from stepscope.app.verbs.fit import Fitted, fit
    from stepscope.app.verbs.measure import Timed, measure
    from stepscope.app.verbs.memory import Remembered, memory
    from stepscope.app.verbs.run import run
    from stepscope.app.verbs.stored_runs import Advised, Measured, advise, show
    from stepscope.app.verbs.trace import Traced, trace
    from stepscope.app.verbs.tune import Found, tune
    from stepscope.core.errors import InputError, LimitExceeded, StepscopeError
    from stepscope.engine.watched_run import Watched, watch
    from stepscope.training.parts.replaced import Replaced, replace_parts

__version__ = "0.1.0"
__all__ = [
    "Advised", "Benched", "Compared", "Fitted", "Found", "InputError", "LimitExceeded", "Measured", "Remembered",
    "Replaced", "StepscopeError", "Timed", "Traced", "Watched", "__version__", "advise", "bench", "compare", "fit",
    "measure", "memory", "replace_parts", "run", "show", "trace", "tune", "watch",
]  # fmt: skip

_WHERE = {
    **dict.fromkeys(("bench", "Benched"), "app.verbs.bench"),
    **dict.fromkeys(("compare", "Compared"), "app.verbs.compare"),
    **dict.fromkeys(("fit", "Fitted"), "app.verbs.fit"),
    **dict.fromkeys(("measure", "Timed"), "app.verbs.measure"),
    **dict.fromkeys(("memory", "Remembered"), "app.verbs.memory"),
    **dict.fromkeys(("replace_parts", "Replaced"), "training.parts.replaced"),
    "run": "app.verbs.run",
    **dict.fromkeys(("advise", "show", "Advised", "Measured"), "app.verbs.stored_runs"),
    **dict.fromkeys(("trace", "Traced"), "app.verbs.trace"),
    **dict.fromkeys(("tune", "Found"), "app.verbs.tune"),
    **dict.fromkeys(("watch", "Watched"), "engine.watched_run"),
    **dict.fromkeys(("InputError", "LimitExceeded", "StepscopeError"), "core.errors"),
}
"""The module of each name that is imported when it is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "IPython" in sys.modules:
        importlib.import_module("stepscope.app.verbs.results")  # tells it how a Run shows itself
    return getattr(importlib.import_module(f"stepscope.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
