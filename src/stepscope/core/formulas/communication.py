"""What the ranks of a layout send one another in a step, and how long a collective takes on a network.

With T = tokens of a micro-batch on a rank (b S / cp), d = d_model, e = bytes of an element in the compute dtype, and
messages as nccl-tests counts them (of an all-gather, what each rank has in the end):

tensor      a block: 2 all-gathers and 2 reduce-scatters of T d e in forward, the same in backward, and 2 all-gathers
            more, since each rank keeps only its share of what was gathered (Korthikanti et al. 2022, section 4.2.2).
            Embedding: one reduce-scatter; head: one all-gather; backward the other way. Loss: three numbers a token.
context     a block: keys and values are gathered in forward and again in backward, where their gradients are reduced
            and scattered: messages of T cp k/tp e (Grattafiori et al. 2024, section 3.3.2).
expert      a block: tokens go to their experts and back, T/tp A d e each, in forward and in backward
            (Lepikhin et al. 2020, section 3).
pipeline    T/tp d e for each chunk, forward and backward (Narayanan et al. 2021, sections 2.2 and 4.1).
data        by the kind of sharding (Rajbhandari et al. 2020, section 7): gradients once a step, or of each micro-batch;
            parameters once a step, or in each forward and each backward.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec

from stepscope.core.checkpointing import spans_of
from stepscope.core.formulas.planned_model import PlannedModel, largest_stage, local_keys
from stepscope.core.formulas.transformer import block_shapes, shapes_outside_blocks
from stepscope.core.layout import SHARDINGS, Layout
from stepscope.core.model_config import ModelConfig
from stepscope.core.networks import Network
from stepscope.core.samples import least_squares
from stepscope.core.study_results import LatencyAndBandwidth

# Collectives: their kinds, the size of a message, and the bytes that a link carries for it.
#
# The bus factor makes rates of different kinds comparable with a link's peak: n ranks that all-reduce S bytes move at
# least 2 (n - 1) / n S bytes over each link, by the formulas of nccl-tests (doc/PERFORMANCE.md).


@dataclass(frozen=True)
class CollectiveKind:
    """A kind of collective. `spelling` fits its names in process groups, NCCL and fused kernels; the first kind whose
    spelling fits counts. `ends_together`: no rank can be done before the last one has come."""

    name: str
    spelling: str
    example: str
    of_others: int = 0
    """How often a link carries what the other ranks hold, (n - 1) / n of the message; 0 where it carries the message
    once."""
    ends_together: bool = False

    def factor(self, ranks: int) -> float:
        """Bytes on each link for each byte of the message."""
        return self.of_others * (ranks - 1) / ranks if self.of_others else 1.0


_RING = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_PAIR = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
KINDS = (
    CollectiveKind("all-reduce", "all_?reduce", _RING, of_others=2, ends_together=True),
    CollectiveKind("reduce-scatter", "reduce_?scatter", "_reduce_scatter_base", of_others=1, ends_together=True),
    CollectiveKind("all-gather", "all_?gather", "_allgather_base", of_others=1, ends_together=True),
    CollectiveKind("all-to-all", "all_?to_?all", "nccl:all_to_all", of_others=1, ends_together=True),
    CollectiveKind("broadcast", "broadcast", "broadcast"),
    CollectiveKind("barrier", "barrier", "barrier", ends_together=True),
    CollectiveKind("send and receive", "send|recv|receive", _PAIR),
    CollectiveKind("reduce", "reduce", "ncclDevKernel_Reduce_Sum_f32_RING_LL"),
    CollectiveKind("gather", "gather", "gather"),
    CollectiveKind("scatter", "scatter", "scatter"),
)
OTHER = CollectiveKind("other", "", "")


def sent_and_received(
    kind: str, message_bytes: int, ranks: int, *, is_root: bool = False, receives: bool = False
) -> tuple[float, float]:
    """The bytes that have to leave a rank for such a collective, and those that have to reach it.

    They are lower bounds, which ring algorithms meet; what a rank relays for others is not counted. Messages are those
    of nccl-tests. is_root: whether the rank is the one that a broadcast or scatter comes from, or that a reduce or
    gather goes to. receives: whether a point-to-point call is a receive.
    """
    others = ranks - 1
    if kind == "barrier":
        return 0.0, 0.0
    if kind == "send and receive":
        return (0.0, float(message_bytes)) if receives else (float(message_bytes), 0.0)
    if kind in ("broadcast", "reduce"):
        at_root, elsewhere = float(others * message_bytes), float(message_bytes)
    elif kind in ("scatter", "gather"):
        at_root, elsewhere = others / ranks * message_bytes, message_bytes / ranks
    else:
        moved = named_kind(kind).factor(ranks) * message_bytes
        return moved, moved
    if kind in ("broadcast", "scatter"):
        return (at_root, 0.0) if is_root else (0.0, elsewhere)
    return (0.0, at_root) if is_root else (elsewhere, 0.0)


_ITEM_BYTES = {
    "double": 8, "long": 8, "complexfloat": 8, "complexdouble": 16, "float": 4, "int": 4, "half": 2, "bfloat16": 2,
    "short": 2, "byte": 1, "char": 1, "bool": 1,
}  # fmt: skip
"""Bytes of an element by the name that PyTorch gives the type in a trace, in lower case."""


def kind_of(name: str) -> CollectiveKind:
    """The kind of collective that a name means: of a process group's call, or of a kernel."""
    name = name[:400].lower()
    return next((kind for kind in KINDS if re.search(kind.spelling, name)), OTHER)


def named_kind(name: str) -> CollectiveKind:
    """The kind of that name."""
    return next((kind for kind in KINDS if kind.name == name), OTHER)


_MOST_BYTES = 2**62
"""No message has more: such a number of elements is damaged."""


def message_bytes(elements: int | None, dtype: str | None) -> int | None:
    """The size of a message of so many elements, or None where either is unknown or cannot be."""
    size = _ITEM_BYTES.get((dtype or "").lower(), 1 if (dtype or "").lower().startswith("float8") else None)
    return elements * size if elements is not None and size and 0 <= elements * size <= _MOST_BYTES else None


def bus_bandwidth(kind: str, message_bytes: int, ranks: int, seconds: float) -> float:
    """Bytes that each link carries in a second (nccl-tests, doc/PERFORMANCE.md, `busbw`). Of all-gather and
    reduce-scatter the message is the whole, of which each rank has a part before or after; of all-to-all it is what one
    rank sends."""
    return message_bytes / seconds * named_kind(kind).factor(ranks)


When = Literal["forward", "backward", "step"]
Dimension = Literal["tensor", "context", "expert", "pipeline", "data"]


class Group(NamedTuple):
    """Ranks that communicate: how many, and how far apart their numbers are."""

    ranks: int
    stride: int


class Transfer(NamedTuple):
    """A collective that a rank takes part in: so many times in each micro-batch's forward or backward, or in a step."""

    dimension: Dimension
    what: str
    kind: str
    message_bytes: int
    times: int
    group: Group
    when: When
    overlaps: bool = False
    """Whether it runs beside computation that does not need it."""

    @property
    def link_bytes(self) -> float:
        """Bytes that a rank's link carries for all of them."""
        return self.times * self.message_bytes * named_kind(self.kind).factor(self.group.ranks)


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of an element: of stored parameters, of gradients, of what products take, of the residual stream."""

    parameters: int
    gradients: int
    compute: int
    residual: int


def tensor_transfers(
    model: PlannedModel, layout: Layout, seq_len: int, sizes: Bytes, blocks: int
) -> Iterator[Transfer]:
    """What tensor parallelism with sequence parallelism sends for these blocks."""
    if layout.tensor == 1:
        return
    group = Group(layout.tensor, 1)
    message = _tokens(layout, seq_len) * model.config.d_model * sizes.compute
    backward = blocks + _multiply_again(layout, blocks)
    for kind in ("all-gather", "reduce-scatter"):
        yield Transfer("tensor", "activations", kind, message, 2 * blocks, group, "forward")
        yield Transfer("tensor", "activations", kind, message, 2 * backward, group, "backward")
    yield Transfer("tensor", "kept shares", "all-gather", message, 2 * blocks, group, "backward", overlaps=True)


def end_transfers(model: PlannedModel, layout: Layout, seq_len: int, sizes: Bytes) -> Iterator[Transfer]:
    """What embedding, head and loss send, vocabulary shared out over tensor-parallel ranks."""
    if layout.tensor == 1:
        return
    group, tokens = Group(layout.tensor, 1), _tokens(layout, seq_len)
    message = tokens * model.config.d_model * sizes.compute
    for what, first, second in (
        ("embedding", "reduce-scatter", "all-gather"),
        ("head", "all-gather", "reduce-scatter"),
    ):
        yield Transfer("tensor", what, first, message, 1, group, "forward")
        yield Transfer("tensor", what, second, message, 1, group, "backward")
    yield Transfer("tensor", "loss", "all-reduce", tokens * 4, 3, group, "forward")


def context_transfers(
    model: PlannedModel, layout: Layout, seq_len: int, sizes: Bytes, blocks: int
) -> Iterator[Transfer]:
    """What context parallelism sends for these blocks: keys and values, each in a collective of its own."""
    if layout.context == 1:
        return
    group = Group(layout.context, layout.tensor)
    message = layout.micro_batch * seq_len * local_keys(model.config, layout.tensor) * sizes.compute
    # Attention that is kept does not run again, and asks for keys and values once, in its backward.
    backward = blocks + sum(span.blocks for span in spans_of(layout.checkpointing, blocks) if span.attends_again)
    yield Transfer("context", "keys and values", "all-gather", message, 2 * blocks, group, "forward")
    yield Transfer("context", "keys and values", "all-gather", message, 2 * backward, group, "backward")
    yield Transfer("context", "their gradients", "reduce-scatter", message, 2 * blocks, group, "backward")


def expert_transfers(
    model: PlannedModel, layout: Layout, seq_len: int, sizes: Bytes, blocks: int
) -> Iterator[Transfer]:
    """What expert parallelism sends for these blocks: tokens to their experts, and back."""
    if layout.expert == 1:
        return
    group = Group(layout.expert, layout.tensor)
    message = _tokens(layout, seq_len) // layout.tensor * model.active * model.config.d_model * sizes.compute
    backward = blocks + _multiply_again(layout, blocks)
    yield Transfer("expert", "tokens", "all-to-all", message, 2 * blocks, group, "forward")
    yield Transfer("expert", "tokens", "all-to-all", message, 2 * backward, group, "backward")


def pipeline_transfers(model: PlannedModel, layout: Layout, seq_len: int, sizes: Bytes) -> Iterator[Transfer]:
    """What a rank sends to the next stage of each of its chunks, and its gradient back."""
    if layout.pipeline == 1:
        return
    group = Group(2, layout.tensor * layout.context * layout.data)
    message = _tokens(layout, seq_len) // layout.tensor * model.config.d_model * sizes.residual
    for when in ("forward", "backward"):
        what = "activations" if when == "forward" else "their gradients"
        yield Transfer("pipeline", what, "send and receive", message, layout.chunks, group, when)


def data_transfers(model: PlannedModel, layout: Layout, sizes: Bytes) -> Iterator[Transfer]:
    """What data parallelism sends, block by block, as one rank of the largest stage with embedding and head does."""
    blocks = largest_stage(model.config.layers, layout.stages) * layout.chunks
    tensor, width = layout.tensor, layout.data * layout.context
    outside = model.outside_blocks // tensor
    if layout.pipeline > 1 and not model.config.tied:
        outside //= 2  # embedding and head are on different ranks
    everywhere = _Holders(layout.shard, layout.replicas, tensor)
    block = model.local_block(tensor)
    if SHARDINGS[layout.sharding].one_message:
        yield from _of_parameters(layout, sizes, blocks * block + outside, 1, everywhere)
    else:
        yield from _of_parameters(layout, sizes, block, blocks, everywhere, tensors=len(block_shapes(model.config)))
        tensors = len(shapes_outside_blocks(model.config))
        yield from _of_parameters(layout, sizes, outside, 1, everywhere, tensors=tensors)
    experts = model.local_experts(tensor, layout.expert)
    if experts:
        holders = width // layout.expert
        shard = min(layout.shard, holders)
        of_experts = _Holders(shard, holders // shard, tensor * layout.expert)
        yield from _of_parameters(layout, sizes, experts, blocks, of_experts)


class _Holders(NamedTuple):
    """Ranks that hold the same parameters: those of a shard group, the groups, and how far apart the ranks are."""

    shard: int
    replicas: int
    stride: int


def _of_parameters(
    layout: Layout, sizes: Bytes, each: int, count: int, holders: _Holders, *, tensors: int = 1
) -> Iterator[Transfer]:
    """What so many pieces of `each` parameters send. tensors: those that a piece is made of."""
    sharding, (shard, replicas, stride) = SHARDINGS[layout.sharding], holders
    gradients = each * sizes.gradients
    if not sharding.shares:
        group = Group(shard * replicas, stride)
        if group.ranks > 1:
            messages = tensors if sharding.each_tensor else 1
            each, times, beside = gradients // messages, count * messages, not sharding.after
            yield Transfer("data", "gradients", "all-reduce", each, times, group, "step", overlaps=beside)
        return
    group = Group(shard, stride)
    if shard > 1:
        copies = each * (sizes.compute if sharding.in_compute_dtype else sizes.parameters)
        reduced: When = "backward" if sharding.gradients else "step"
        # Who keeps whole parameters keeps whole gradients, and PyTorch reduces them for all (ZeroRedundancyOptimizer).
        kind = "reduce-scatter" if sharding.parameters else "all-reduce"
        yield Transfer("data", "gradients", kind, gradients, count, group, reduced, overlaps=True)
        gathered: tuple[When, ...] = ("forward", "backward") if sharding.gathers == "each pass" else ("step",)
        gather, messages = ("broadcast", tensors) if sharding.each_tensor else ("all-gather", 1)
        for when in gathered:
            yield Transfer(
                "data", "parameters", gather, copies // messages, count * messages, group, when, overlaps=True
            )
    if replicas > 1:
        across = Group(replicas, stride * shard)
        yield Transfer("data", "gradients", "all-reduce", -(-gradients // shard), count, across, "step", overlaps=True)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Bytes that a rank reads and writes on its own device to send and receive what data parallelism shares out."""

    forward: float = 0.0
    """Bytes in the forward of each micro-batch."""
    backward: float = 0.0
    """Bytes in the backward of each micro-batch."""
    step: float = 0.0
    """Bytes once a step."""


def data_copies(model: PlannedModel, layout: Layout, sizes: Bytes) -> Copies:
    """What PyTorch copies around data parallelism's collectives.

    DDP copies each gradient into its bucket, and back where it is no view of it (torch/csrc/distributed/c10d/
    reducer.cpp, `mark_variable_ready_dense` and `finalize_bucket_dense`). `fully_shard` copies a rank's shards to their
    place in a buffer, what was gathered out of it into parameters, and gradients into the buffer that is reduced
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    """
    sharding = SHARDINGS[layout.sharding]
    if layout.data * layout.context == 1:
        return Copies()
    blocks = largest_stage(model.config.layers, layout.stages) * layout.chunks
    each = model.local_block(layout.tensor) + model.local_experts(layout.tensor, layout.expert)
    held = blocks * each + model.outside_blocks // layout.tensor
    if not sharding.gradients:
        return Copies(step=sharding.copied * held * sizes.gradients)
    gathered = sizes.compute if sharding.in_compute_dtype else sizes.parameters
    whole = held * (2 * gathered + (sizes.parameters + gathered) / layout.shard)
    gradient_bytes = gathered  # gradients have the dtype of what backward used
    reduced = held * (gradient_bytes + sizes.gradients)
    if sharding.gathers == "each pass":
        return Copies(forward=whole, backward=whole + reduced)
    return Copies(backward=reduced, step=whole)


def transfers_of(model: PlannedModel, layout: Layout, seq_len: int, sizes: Bytes) -> list[Transfer]:
    """Everything that a rank of the largest stage sends, embedding and head with it."""
    blocks = largest_stage(model.config.layers, layout.stages) * layout.chunks
    return [
        *tensor_transfers(model, layout, seq_len, sizes, blocks),
        *end_transfers(model, layout, seq_len, sizes),
        *context_transfers(model, layout, seq_len, sizes, blocks),
        *expert_transfers(model, layout, seq_len, sizes, blocks),
        *pipeline_transfers(model, layout, seq_len, sizes),
        *data_transfers(model, layout, sizes),
    ]


@lru_cache(maxsize=65536)
def bus_bytes_per_s(network: Network, group: Group) -> float:
    """The rate at which a ring through this group moves bytes over each link.

    Within a node it is that of the fast links. Between nodes each member has its own link out of the node, so that as
    many of them work at once as the group has members there, up to the rate inside.
    """
    near = min(group.ranks, max(1, network.node // group.stride))
    if near == group.ranks:
        return network.inside_bytes_per_s * network.share
    return min(network.inside_bytes_per_s, near * network.between_bytes_per_s) * network.share


@lru_cache(maxsize=65536)
def latency_s(network: Network, kind: str, group: Group) -> float:
    """What a collective takes however short its message: NCCL's own model of a ring (src/graph/tuning.cc).

    An all-reduce over several nodes goes up and down a tree of them instead, as NCCL does with short messages.
    """
    near = min(group.ranks, max(1, network.node // group.stride))
    nodes = -(-group.ranks // near)
    inside, between = network.inside_latency_s, network.between_latency_s
    if kind in ("send and receive", "all-to-all"):
        return network.call_s + (inside if nodes == 1 else between)
    if kind == "all-reduce":
        return network.call_s + 2 * ((near - 1) * inside + (nodes - 1).bit_length() * between)
    return network.call_s + nodes * (near - 1) * inside + (nodes - 1) * between


def transfer_s(network: Network, transfer: Transfer) -> float:
    """Seconds of one such collective: latency, and its bytes at the bus's rate (alpha and beta of Hockney 1994).

    Within a node they are the measured ones, where there are any. Those of other numbers of ranks have the same rate of
    the bus, and differ in latency by as much as NCCL's model does.
    """
    factor = named_kind(transfer.kind).factor(transfer.group.ranks)
    fit = network.fit_for(transfer.kind, transfer.group.ranks) if network.measured else None
    if fit is not None and transfer.group.stride * (transfer.group.ranks - 1) < network.node:
        hops_s = 0.0
        if fit.ranks != transfer.group.ranks:
            hops_s = latency_s(network, transfer.kind, transfer.group)
            hops_s -= latency_s(network, transfer.kind, Group(fit.ranks, 1))
        measured_factor = named_kind(transfer.kind).factor(fit.ranks)
        moves_s = transfer.message_bytes / fit.bytes_per_s * factor / measured_factor if fit.bytes_per_s else 0.0
        return max(0.0, fit.latency_s + hops_s) + moves_s
    moved = transfer.message_bytes * factor / bus_bytes_per_s(network, transfer.group)
    return latency_s(network, transfer.kind, transfer.group) + moved


def _tokens(layout: Layout, seq_len: int) -> int:
    """Tokens of a micro-batch for which a rank is in charge, before tensor parallelism shares them out."""
    return layout.micro_batch * seq_len // layout.context


def _multiply_again(layout: Layout, blocks: int) -> int:
    """Of so many blocks those whose matrix products backward runs again, as checkpointing asks for."""
    return sum(span.blocks for span in spans_of(layout.checkpointing, blocks) if span.multiplies_again)


# One feed-forward layer on several GPUs, in closed form.
#
# W1 and W2 are D x F, W3 is F x D (D = d_model, F = d_ff). B tokens meet them, e bytes are an element, a GPU computes C
# FLOP a second and sends W bytes a second. A product of (B, D) and (D, F) is 2 B D F FLOPs: three of them in forward,
# six in backward. A layer is bound by communication where sending takes longer than computing beside it (Austin et al.
# 2025, How to Scale Your Model, chapter 5; rings: Patarasuk and Yuan 2009; tensor parallelism: Shoeybi et al. 2019,
# section 3).


class LayerPass(NamedTuple):
    """What one GPU does in the forward or backward of a feed-forward layer, and how many GPUs can share that."""

    layout: str
    when: str
    flops: float
    data_bytes: float
    """Bytes that it sends of weights and their gradients, among GPUs that share the batch."""
    tensor_bytes: float
    """Bytes that it sends of activations, among GPUs that share each matrix."""
    most: float
    """GPUs until communication bounds it, where both kinds are sent at once, and at the best ratio; may be infinite."""
    most_in_turn: float
    """GPUs until communication bounds it, where activations are sent after weights and not beside them."""


@dataclass(frozen=True, kw_only=True)
class SharedLayer:
    """A feed-forward layer with gate, and the rates of the GPUs that share it."""

    d_model: int
    d_ff: int
    tokens: int
    element_bytes: int
    flops_per_s: float
    bytes_per_s: float

    def passes(self, ranks: int, tensor: int) -> list[LayerPass]:
        """Forward and backward by DP, FSDP and TP over so many ranks, and by FSDP with TP over `tensor` of them.

        DP all-reduces the gradients of weights. FSDP gathers weights in each pass, and reduces and scatters gradients.
        TP has columns of W1 and W2 and rows of W3 on each GPU, and all-reduces the output, in backward the gradient of
        the input. FSDP with TP does both with what the other leaves of a matrix and of a batch.
        """
        layouts = (("DP", ranks, 1, 0), ("FSDP", ranks, 1, 1), ("TP", 1, ranks, 0),
                   ("FSDP with TP", ranks // tensor, tensor, 1))  # fmt: skip
        return [
            self.one_pass(name, when, data, of_tensor, collectives)
            for name, data, of_tensor, forward in layouts
            for when, collectives in (("forward", forward), ("backward", 2))
        ]

    def one_pass(self, name: str, when: str, data: float, tensor: float, collectives: int) -> LayerPass:
        """One pass over data x tensor GPUs, which need not be whole numbers: bounds are not.

        collectives: how many it has of weights or their gradients. Each sends (data - 1) / data of their bytes.
        """
        width, size, computes = self.d_model, self.element_bytes, 1 if when == "forward" else 2
        flops = computes * 6 * self.tokens * width * self.d_ff / (data * tensor)
        weights, activations = 3 * width * self.d_ff * size / tensor, self.tokens * width * size / data
        sends_per_flop = self.bytes_per_s / (size * self.flops_per_s)
        of_data = computes * 2 * self.tokens * sends_per_flop / collectives if collectives else math.inf
        of_tensor = computes * 3 * self.d_ff * sends_per_flop
        most = {"DP": 1 + of_data, "FSDP": 1 + of_data, "TP": 1 + of_tensor}
        return LayerPass(
            name, when, flops, collectives * (data - 1) / data * weights, 2 * (tensor - 1) / tensor * activations,
            most.get(name, (1 + of_data) * (1 + of_tensor)), most.get(name, _most_in_turn(of_data, of_tensor)),
        )  # fmt: skip


def _most_in_turn(of_data: float, of_tensor: float) -> float:
    """The largest product of 1 + x and 1 + y with x / of_data + y / of_tensor = 1. x and y are GPUs beyond the first on
    each axis; the two terms are the shares of the time of computing that each kind is sent for."""
    x = min(of_data, max(0.0, of_data * (1 + of_tensor) / (2 * of_tensor) - 0.5))
    return (1 + x) * (1 + of_tensor * (1 - x / of_data))


def layer_bytes(config: ModelConfig, layout: Layout, seq_len: int, sizes: Bytes, forward: bool) -> float:
    """Bytes that a rank sends of one feed-forward layer in forward or backward, by what is said above of blocks.

    A layer twice as wide sends as much more of weights; of a block's activations, attention sends half.
    """
    once, twice = (
        PlannedModel(config=msgspec.structs.replace(config, layers=1, d_ff=times * config.d_ff)) for times in (1, 2)
    )
    less, more = (
        sum(one.link_bytes for one in data_transfers(model, layout, sizes) if (one.when == "forward") == forward)
        for model in (once, twice)
    )
    when = "forward" if forward else "backward"
    of_tensor = tensor_transfers(once, layout, seq_len, sizes, 1)
    return more - less + sum(one.link_bytes for one in of_tensor if one.when == when and not one.overlaps) / 2


def ring_all_reduces_s(message_bytes: float, ranks: int, bytes_per_s: float) -> tuple[float, float]:
    """Seconds of two rings that all-reduce: reduce-scatter, then all-gather, 2 (N - 1) / N S / W; and each rank passing
    on whole what it received and adding it up, (N - 1) S / W, which sends N / 2 times as much."""
    once = message_bytes / bytes_per_s
    return named_kind("all-reduce").factor(ranks) * once, (ranks - 1) * once


# Latency and bandwidth of a link, fitted to times over sizes: t(S) = alpha + S / beta (Hockney 1994).
#
# Sizes span six orders of magnitude, so errors count relative to the time: the sum of ((alpha + S / beta) / t - 1)^2 is
# smallest. It is linear in alpha and 1 / beta, so two equations solve it.


def fit_latency_and_bandwidth(times: Sequence[tuple[float, float]]) -> LatencyAndBandwidth | None:
    """The line through pairs of bytes and seconds; None of less than two sizes. Neither parameter is below zero."""
    known = [(size, seconds) for size, seconds in times if seconds > 0]
    if len({size for size, _ in known}) < 2:
        return None
    # One row a size: alpha (1 / t) + slope (S / t) = 1.
    rows = [(1 / seconds, size / seconds) for size, seconds in known]
    alpha, slope = least_squares([(row, 1.0) for row in rows])
    errors = [alpha * by_alpha + slope * by_slope - 1 for by_alpha, by_slope in rows]
    return LatencyAndBandwidth(
        latency_s=alpha,
        bytes_per_s=1 / slope if slope else None,
        count=len(rows),
        residual=math.sqrt(math.fsum(error * error for error in errors) / len(rows)),
    )
