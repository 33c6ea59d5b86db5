"""What the launcher in C++ (kernels/native.py) learns of flash attention: its recordings, which replay.py keeps."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.kernels import native
from stepscope.kernels.flash import replay
from stepscope.kernels.launch_parameters import Described, Place
from stepscope.kernels.native import Forward, Operation, Pass, layout_of

ATTENTION = Operation("FlashAttentionBackward0")
_OUT, _LOGSUMEXP = 3, 4
"""Their numbers in forward, after q, k and v."""


class Backward(NamedTuple):
    """What backward takes beside forward: the key of its recording, the gradient, its results and its buffers."""

    key: Hashable
    gradient: Tensor
    gradients: tuple[Tensor, Tensor, Tensor]
    statistics: Tensor
    sums: Tensor | None


def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, configuration: int) -> Tensor | None:
    """The output of a call in C++; None where its launches are not known."""
    found = ATTENTION.call((q, k, v), _options(causal, scale, configuration))
    return None if found is None else found[0]


def _options(causal: bool, scale: float, configuration: int) -> tuple[int, ...]:
    return int(causal), native.bits(scale), configuration


def learn(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, *, causal: bool, scale: float, configuration: int,
    key: Hashable, backward: Backward | None = None,
) -> None:  # fmt: skip
    """Teach the launcher a call whose launches are recorded under the keys: forward alone, or both passes."""
    of_call = ATTENTION.key((q, k, v), _options(causal, scale, configuration))
    if not native.may_learn(of_call + (b"both" if backward else b"forward")):
        return

    def by_python(gradient: Tensor | None, *saved: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.stepscope.flash_attention_backward(gradient, None, *saved, causal, scale, None, None)

    out_layout, made = layout_of(out), [layout_of(out), layout_of(logsumexp)]
    ran = _pass(key, made, [(_OUT, out_layout)])
    of_backward = None
    if backward is not None:
        buffers = [backward.statistics, *([] if backward.sums is None else [backward.sums])]
        results = [layout_of(each) for each in backward.gradients]
        # Before what backward makes come the gradient and what forward saved: q, k, v, out, logsumexp.
        of_backward = _pass(
            backward.key, [*results, *map(layout_of, buffers)], [(6 + i, each) for i, each in enumerate(results)]
        )
    if ran is None or (backward is not None and of_backward is None):
        return
    forward = Forward(
        operation=ATTENTION, key=of_call, inputs=[layout_of(each) for each in (q, k, v)], ran=ran,
        saved=[0, 1, 2, _OUT, _LOGSUMEXP],
    )  # fmt: skip
    native.teach(
        forward, by_python, backward=of_backward, any_order=backward is not None and backward.sums is not None,
        gradients=[] if backward is None else [layout_of(backward.gradient)],
    )  # fmt: skip


def _pass(key: Hashable, made: list[native.Layout], results: list[tuple[int, native.Layout]]) -> Pass | None:
    """A recorded pass; None where there is no recording, or its launches are of a kind that is not known."""
    recording = replay.recorded(key)
    if recording is None:
        return None
    launches = [
        native.launch_of(compiled, grid, _placed(template, operands))
        for compiled, grid, template, operands in recording.launches
    ]
    if any(each is None for each in launches):
        return None
    return Pass(
        made=made, launches=[each for each in launches if each is not None],
        results=[(number, 0, layout) for number, layout in results],
    )  # fmt: skip


def _placed(template: list[object], operands: list[replay.Operand]) -> list[Any]:
    """The arguments of a recorded launch, with the tensors' numbers in their places."""
    arguments = list(template)
    for at, number, descriptor in operands:
        arguments[at] = Place(number) if descriptor is None else Described(number, *descriptor)
    return arguments
