"""Whether a step of a user's module fits: its code runs with the user's rights, in a process of its own."""

import contextlib
import ctypes
import gc
import importlib
from collections.abc import Callable, Sequence

import msgspec

from stepscope.allocations.prediction.estimate import DeviceType
from stepscope.allocations.prediction.fit import Budget, FakeEstimate, Fit
from stepscope.core.errors import InputError
from stepscope.core.workloads import FactoryWorkload
from stepscope.engine.request import Stage, Tell
from stepscope.engine.user_code import answer_apart, ask_apart, tell_asker


class _Request(msgspec.Struct, frozen=True):
    workload: FactoryWorkload
    budgets: tuple[Budget, ...]
    device_type: DeviceType
    search: bool


_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's malloc.h."""


def fit_apart(
    workload: FactoryWorkload,
    budgets: Sequence[Budget],
    device_type: DeviceType = "cuda",
    *,
    search: bool = True,
    tell: Tell | None = None,
    know: Callable[[list[Fit[FakeEstimate]]], object] = lambda _: None,
) -> list[Fit[FakeEstimate]]:
    """The prediction of a step for each budget, or of its peak alone where there is none; with `search` also what would
    make it fit, and the largest sizes. Raises InputError for what cannot be predicted.

    tell: is told what is tried. know: with it, is called with the predictions as far as they are known, whenever that
    is more.
    """
    what = f"{'--model' if workload.factory.endswith('.json') else '--module'} {workload.factory}"
    request = msgspec.json.encode(_Request(workload, tuple(budgets), device_type, search)).decode()

    def hear(line: bytes) -> None:
        if line.startswith(b"["):
            know(msgspec.json.decode(line, type=list[Fit[FakeEstimate]]))
        elif tell is not None:
            tell(msgspec.json.decode(line, type=Stage))

    if tell is not None:
        tell(Stage(name=f"loading {workload.factory.rpartition(':')[0] or workload.factory}"))
    try:
        answer = ask_apart(__name__, request, what=what, hears=None if tell is None else hear)
        return msgspec.json.decode(answer, type=list[Fit[FakeEstimate]])
    except msgspec.DecodeError as error:
        raise InputError(f"{what} left no prediction: {error}") from error


def main(request: str) -> str:
    """The prediction as JSON, for `fit_apart`."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # a C library other than glibc
        # A block from 64 KiB on is given back when it is freed: of a step on fake tensors a fifth of the memory would
        # stay, in the gaps that masks and other real tensors leave.
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 64 * 1024)
    gc.disable()
    from stepscope.engine.fake_module import fit_module

    options = msgspec.json.decode(request, type=_Request)
    if options.workload.phase == "train":
        importlib.import_module("torch._dynamo")  # an optimizer's first update imports it
    # Each step that is tried ends with a collection: through all that is imported it would take longer than the step.
    gc.freeze()
    gc.enable()

    def tell(what: Stage | list[Fit[FakeEstimate]]) -> None:
        tell_asker(msgspec.json.encode(what))

    fits = fit_module(
        options.workload, options.budgets, options.device_type, search=options.search, know=tell, tell=tell
    )
    return msgspec.json.encode(fits).decode()


if __name__ == "__main__":
    answer_apart(main)
