"""Whether a step of a user's module fits: its code runs with the user's rights, in a process of its own."""

import contextlib
import ctypes
import gc
import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from stepscope.allocations.prediction.estimate import DeviceType, HeldTensor
from stepscope.allocations.prediction.fit import Budget, FakeEstimate, Fit, judge
from stepscope.core.errors import InputError
from stepscope.core.workloads import FactoryWorkload
from stepscope.engine.request import Stage, Tell
from stepscope.engine.user_code import answer_apart, ask_apart, tell_asker

_Kind = TypeVar("_Kind")


class Request(msgspec.Struct, frozen=True):
    """What the process of its own is asked."""

    workload: FactoryWorkload
    budgets: tuple[Budget, ...]
    device_type: DeviceType
    search: bool
    tensors: bool = False
    """Whether the tensors at the peak are asked for, in place of what fits."""


class Held(msgspec.Struct, frozen=True):
    """The prediction of a step's peak, and the tensors that are alive at it, the largest first."""

    fit: Fit[FakeEstimate]
    tensors: tuple[HeldTensor, ...]


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
    return _asked(Request(workload, tuple(budgets), device_type, search), list[Fit[FakeEstimate]], tell, know)


def held_apart(workload: FactoryWorkload, tell: Tell) -> Held:
    """What a step holds at its peak on a GPU. Raises InputError for what cannot be predicted."""
    return _asked(Request(workload, (), "cuda", search=False, tensors=True), Held, tell)


def _asked(
    request: Request, kind: type[_Kind], tell: Tell | None, know: Callable[[Any], object] = lambda _: None
) -> _Kind:
    """What the request's process answers."""
    factory = request.workload.factory
    what = f"{'--model' if factory.endswith('.json') else '--module'} {factory}"

    def hear(line: bytes) -> None:
        if line.startswith(b"["):
            know(msgspec.json.decode(line, type=list[Fit[FakeEstimate]]))
        elif tell is not None:
            tell(msgspec.json.decode(line, type=Stage))

    if tell is not None:
        tell(Stage(name=f"loading {factory.rpartition(':')[0] or factory}"))
    asked = msgspec.json.encode(request).decode()
    try:
        answer = ask_apart(__name__, asked, what=what, hears=None if tell is None else hear)
        return msgspec.json.decode(answer, type=kind)
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

    options = msgspec.json.decode(request, type=Request)
    if options.workload.phase == "train":
        importlib.import_module("torch._dynamo")  # an optimizer's first update imports it
    # Each step that is tried ends with a collection: through all that is imported it would take longer than the step.
    gc.freeze()
    gc.enable()

    def tell(what: Stage | list[Fit[FakeEstimate]]) -> None:
        tell_asker(msgspec.json.encode(what))

    if options.tensors:
        return msgspec.json.encode(held_at_peak(options, tell)).decode()
    fits = fit_module(
        options.workload, options.budgets, options.device_type, search=options.search, know=tell, tell=tell
    )
    return msgspec.json.encode(fits).decode()


def held_at_peak(request: Request, tell: Tell = lambda _: None) -> Held:
    """The tensors at the peak. Those that are alike but for numbers in their names, as of layers, are one row."""
    from stepscope.engine.fake_module import FakePredictor, at_peak

    predictor = FakePredictor(request.workload, request.device_type, None, tell, describes=True)
    alike: dict[tuple[object, ...], HeldTensor] = {}
    for index, given in at_peak(predictor.first)[1].items():
        each = predictor.first.watch.allocations[index]
        name = re.sub(r"(^|(?<=\.))\d+(?=\.)", "*", each.name)
        if each.category not in _NAMED:
            operator = each.operator.removeprefix("aten.").partition(".")[0]
            name = f"{operator} ({each.name})" if each.name else operator
        key = (each.category, name, each.shape, each.dtype, each.nbytes)
        before = alike.get(key)
        alike[key] = HeldTensor(
            category=each.category,
            name=name,
            shape=each.shape,
            dtype=each.dtype,
            bytes_each=each.nbytes,
            count=1 + (before.count if before else 0),
            total_bytes=given + (before.total_bytes if before else 0),
        )
    return Held(judge(predictor, None), tuple(sorted(alike.values(), key=lambda each: -each.total_bytes)))


_NAMED = ("parameters", "frozen quantised weights", "gradients", "optimizer state", "inputs")
"""Categories whose tensors have names of their own."""


if __name__ == "__main__":
    answer_apart(main)
