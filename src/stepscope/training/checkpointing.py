"""Activation checkpointing: what a model's blocks keep for backward, and what they run again instead.

Chen et al. 2016 (arXiv:1604.06174) keep the inputs of groups of layers and run each group forward again when backward
reaches it; Korthikanti et al. 2022 (arXiv:2205.05198) keep what is dear to compute and run the cheap rest again.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from stepscope.core.attentions import ATTENTIONS
from stepscope.core.checkpointing import Span, grouped
from stepscope.core.range_names import RECOMPUTATION
from stepscope.core.workload import Workload
from stepscope.kernels.parts.projections import OPERATOR
from stepscope.recording import scaled_mm
from stepscope.recording.ranges import detail_range
from stepscope.training.attention import implementation
from stepscope.training.offloading import HostCopies, KeptByBlock, when_gradient_is_there

"""The name of the range that encloses what backward runs again, as readers of traces know it."""

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", OPERATOR, *scaled_mm.OPERATORS)


_OTHER_PRODUCTS = ("aten::convolution", "aten::_grouped_mm")
"""Products of models that are not ours: convolutions, and the products of experts."""


def _attentions() -> tuple[str, ...]:
    names: list[str] = []
    for attention, record in ATTENTIONS.items():
        if record.kept_operators:
            implementation(attention)  # its module defines its operators
            names += record.kept_operators
    return tuple(names)


_ATTENTIONS = _attentions()


def _operators(*names: str) -> list[Any]:
    parts = [name.split("::") for name in names]
    return [getattr(getattr(torch.ops, namespace), operator).default for namespace, operator in parts]


KEPT_OPERATORS: dict[str, list[Any]] = {
    "selective": _operators(*_PRODUCTS, *_ATTENTIONS),
    "attention": _operators(*_ATTENTIONS),
}
"""Operators whose outputs each checkpointing of KEEPING keeps: matrix products (a Linear is one) and fused attention.
Each output is kept, also that of a block's last product, which backward never asks for."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class BlockRunner(Protocol):
    """Runs blocks one after another, (B, S, M) to (B, S, M), and decides what they keep for backward."""

    def __call__(self, blocks: Iterable[nn.Module], x_BSM: Tensor) -> Tensor: ...


def keep_all(blocks: Iterable[nn.Module], x_BSM: Tensor) -> Tensor:
    """Run the blocks; autograd keeps whatever backward needs."""
    for block in blocks:
        x_BSM = block(x_BSM)
    return x_BSM


def keep_group_inputs(group_size: int) -> BlockRunner:
    """A runner by groups of consecutive blocks: each group keeps only its input, and backward runs it again whole."""

    def run(blocks: Iterable[nn.Module], x_BSM: Tensor) -> Tensor:
        blocks = tuple(blocks)
        for first in range(0, len(blocks), group_size):
            x_BSM = checkpointed(functools.partial(keep_all, blocks[first : first + group_size]), x_BSM)
        return x_BSM

    return run


def keep_outputs(contexts: Callable[[], Contexts]) -> BlockRunner:
    """A runner of single blocks: each keeps its input and what the contexts keep, and backward runs the rest again."""

    def run(blocks: Iterable[nn.Module], x_BSM: Tensor) -> Tensor:
        for block in blocks:
            x_BSM = checkpointed(functools.partial(keep_all, (block,)), x_BSM, contexts=contexts)
        return x_BSM

    return run


def block_runner(workload: Workload) -> BlockRunner:
    """The runner that the workload's `checkpointing` names."""
    spans = workload.spans
    return _runner_of(spans[0]) if len(spans) == 1 and not spans[0].on_host else one_after_another(spans)


def one_after_another(spans: Sequence[Span]) -> BlockRunner:
    """A runner of a whole model's blocks, each span as it keeps for backward."""
    copies = HostCopies(KEPT_OPERATORS["selective"])

    def run(blocks: Iterable[nn.Module], x_BSM: Tensor) -> Tensor:
        offloaded: list[tuple[KeptByBlock, Tensor]] = []
        for span, groups in grouped(tuple(blocks), spans):
            for group in groups:
                kept = copies.block() if span.on_host else None
                x_BSM = (_runner_of(span) if kept is None else keep_outputs(kept.contexts))(group, x_BSM)
                copies.ran(kept)
                if kept is not None:
                    offloaded.append((kept, x_BSM))
        # What a block keeps returns when backward reaches the next block that offloads; the last one's, at the end.
        outputs = [output for _, output in offloaded[1:]] + [x_BSM]
        for (kept, _), output in reversed(list(zip(offloaded, outputs, strict=False))):
            when_gradient_is_there(output, kept.fetch)
        return x_BSM

    return run


def _runner_of(span: Span) -> BlockRunner:
    if span.checkpointing == "none":
        return keep_all
    contexts = OUTPUTS_KEPT.get(span.checkpointing)
    return keep_group_inputs(span.group) if contexts is None else keep_outputs(contexts)


def checkpointed(
    function: Callable[..., Any], *args: Any, contexts: Callable[[], Contexts] | None = None, random: bool = False,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """What the function returns. It keeps its arguments for backward, which runs it again.

    contexts: the contexts of both runs, which may keep more. random: whether the function draws random numbers, as
    dropout does. Then the state of the generators is kept, so that the second run draws the same.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if not torch.compiler.is_compiling():
        options["context_fn"] = lambda: _named((contexts or noop_context_fn)())
    elif contexts is not None:
        options["context_fn"] = contexts  # torch.compile takes these two and no others; it emits no ranges either
    return checkpoint(function, *args, **options, **kwargs)


def _keeping(operators: list[Any]) -> Callable[[], Contexts]:
    def contexts() -> Contexts:
        return create_selective_checkpoint_contexts(operators)

    return contexts


OUTPUTS_KEPT = {name: _keeping(operators) for name, operators in KEPT_OPERATORS.items()}
"""By checkpointing of KEEPING, contexts that keep the outputs of its KEPT_OPERATORS."""

OUTPUTS_KEPT_OF_ANY = {
    **OUTPUTS_KEPT,
    "selective": _keeping([*KEPT_OPERATORS["selective"], *_operators(*_OTHER_PRODUCTS)]),
}
"""By checkpointing of KEEPING, contexts for a model of a user's own, whose products may be convolutions or experts'."""


class KeptCalls(TorchDispatchMode):
    """Counts the calls of operators whose outputs a checkpointing of KEEPING keeps."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self._operators = KEPT_OPERATORS[checkpointing]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in self._operators
        return func(*args, **(kwargs or {}))


def _named(contexts: Contexts) -> Contexts:
    forward, again = contexts
    return forward, _Recomputation(again)


class _Recomputation:
    """The range of what runs again. It is made in forward and entered in backward, for emitters that watch then."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self._inner = inner
        self._range: AbstractContextManager[object] = contextlib.nullcontext()

    def __enter__(self) -> None:
        self._range = detail_range(RECOMPUTATION)
        self._range.__enter__()
        self._inner.__enter__()

    def __exit__(self, *raised: Any) -> None:
        # PyTorch raises an exception of its own here, as soon as it has the last tensor that backward needs.
        self._inner.__exit__(*raised)
        self._range.__exit__(*raised)
