"""How long a step of a layout takes: what each part adds to it by formula, and the step played through.

A micro-batch's turn on a rank is its products, attention and elementwise work, and the communication that nothing
hides: of tensor, context and expert parallelism all of it. m turns and the bubble of (p - 1) / v turns make the
pipeline (`core/formulas/transformer.py`). What data parallelism sends is hidden behind the computation that does not
wait for it (forward and backward of the same micro-batch, or of the last one), and only the rest counts. But a
collective takes multiprocessors: computation beside it goes slower. Then the optimizer steps.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

import msgspec

from stepscope.allocations.prediction.estimate import rate_in_blocks
from stepscope.allocations.prediction.layouts import Moved, RankMemory, bytes_of
from stepscope.core.answer import Slice
from stepscope.core.checkpointing import OFFLOAD, most_that_fit, offload_of, spans_of
from stepscope.core.device_spec import HOST_BYTES_PER_S, DeviceSpec, pcie_generation
from stepscope.core.errors import InputError
from stepscope.core.float_formats import BlockFormat
from stepscope.core.formulas import adamw_work, communication
from stepscope.core.formulas.planned_model import PlannedModel, bubble_turns, largest_stage
from stepscope.core.formulas.transformer import master_bytes, moment_bytes
from stepscope.core.layout import SHARDINGS, Layout
from stepscope.core.networks import Network
from stepscope.core.parts import REFERENCE, scores_of
from stepscope.core.precisions import PRECISIONS
from stepscope.core.workloads import OF_ONE_LAUNCH, TextbookWorkload

# The rates at which a device is assumed to work: shares of its datasheet, and where each share comes from.
#
# A plan stands or falls with them, so an answer always names them. They were measured on an H200 by stepscope, and are
# taken for any device:
#     device.json      products of 4096 x 4096 matrices, and a copy (in results/h200, as all of these)
#     attention        causal attention of 16,384 tokens, 16 heads, forward and backward, and how much less it reaches
#                      with 4,096 (grid-bf16.json), with 1,024 in steps (attention-steps), and at most in a step of
#                      seconds (h200-x2/long-step)
#     kernels          time of the kernels of 18 training steps, op by op, and of the steps: elementwise kernels take
#                      1.5 us and their bytes, products 3.6 us beyond what large ones take for their FLOPs, and the
#                      device pauses 2 us between two kernels
#     h100-x2/traced   fused parts: silu_product, forward and backward, moves 210 MB in 70.2 us of an H100, 89 % of its
#                      memory's rate, as much as a copy
#     best, plain      optimizers, and how long the host takes for a launch where it is the slower one


MATMUL_SHARES = {"bf16": 0.690, "fp16": 0.652, "tf32": 0.695, "fp32": 0.761}
COPY_SHARE = 0.888
ELEMENTWISE_SHARE = 0.522
"""Share of the memory's rate at which elementwise kernels of a step op by op move their bytes; fused ones are taken to
reach a copy's."""
FUSED_ADAMW_SHARE, ADAMW_SHARE = 0.715, 0.78
_PAUSE_S = 2.0e-6
KERNEL_S, PRODUCT_S = 1.5e-6 + _PAUSE_S, 3.6e-6 + _PAUSE_S
"""What an elementwise kernel and a product take however small they are, with the pause before the next."""
LAUNCH_S = 15e-6
"""What the host takes for a kernel of a step op by op."""
UNIT_S = (2.0e-3, 2.4e-3)
"""What the host takes beside that, forward and backward, to gather and let go the parameters of a block that ranks
share out: `fully_shard` runs its hooks in Python. Forward and backward of `large` wait 102 and 127 ms for a host with
37 such units (fsdp2 over four H200, 6 sequences a rank, results/h200-x4/scaling), and 27 and 37 ms for one without
ranks (results/h200/eager-parts)."""
ATTENTION_SHARES = {
    "flash": (0.477, 0.628),
    "sdpa-cudnn": (0.460, 0.595),
    "flex": (0.313, 0.394),
    "sdpa-flash": (0.279, 0.306),
    "sdpa": (0.460, 0.595),
}
"""Shares of the peak that attention of 16,384 tokens reaches in bf16, with a head_dim of 64 and of 128; below 128 the
first is taken. PyTorch's own choice, `sdpa`, is cuDNN's on Hopper (results/h200/best). Another fused one is taken for
it, and one that is written out is made of products."""
ATTENTION_IN_STEPS = 0.52
"""The largest share that attention is taken to reach in a step. By itself, for a moment, it reaches more. A step that
multiplies for seconds without a pause is at its power cap, which held an H200's clock at 1515 of 1980 MHz, and its
attention of 32,768 tokens and head_dim 128 to 514 TFLOP/s (the trace of selective-11 in results/h200-x2/long-step)."""
_LONG = 16_384
ATTENTION_HALVES = {"flash": 1900, "sdpa-cudnn": 1000, "flex": 1200, "sdpa-flash": 2000, "sdpa": 1000}
"""The tokens with which attention reaches half of what it does with very many: each block of queries takes, beside its
keys, as long as half as many keys do, to begin, to end, and for scores above the diagonal."""

PRODUCTS_BESIDE, OTHERS_BESIDE = 1.71, 1.12
"""How many times as long matrix products, and other kernels, take while a collective runs. NCCL's kernel of 24 blocks
keeps as many multiprocessors of 132 from them, and products whose grid has a block for each need a second round.
Of 1,007 products and 1,865 other kernels of a step of two H100: on the rank that waits in a collective meanwhile,
against the same ones alone on the other rank (results/h100-x2/traced). What a collective moves itself is not in it."""

STEP_SPREAD = 0.009
"""Relative standard deviation of the steps of one GPU: of 2.7B, bf16, compiled, in results/h200/best."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What one device does in a second."""

    peak_flops_per_s: float
    matmul_flops_per_s: float
    blocks_flops_per_s: float | None = None
    """That of linear layers whose operands are in blocks of few bits; None where it is that of all products."""
    attention_flops_per_s: float
    elementwise_bytes_per_s: float
    fused_bytes_per_s: float
    """The rate of fused parts' kernels, which read and write once, as a copy does."""
    optimizer_bytes_per_s: float
    products_beside: float = 1.0
    """How many times as long products take while a collective runs."""
    others_beside: float = 1.0
    """How many times as long all other kernels take while a collective runs."""
    host_bytes_per_s: float = HOST_BYTES_PER_S
    """The rate of copies to the host's memory, and of those back."""
    launch_s: float
    """What the host takes for a kernel; 0 where a compiled step has few of them."""
    assumptions: tuple[str, ...]
    """The assumptions in sentences."""


def attention_share(name: str, head_dim: int, tokens: int) -> float:
    """The share of the peak that fused attention of sequences of so many tokens reaches by itself in bf16."""
    known = name if name in ATTENTION_SHARES else "sdpa"
    half, (narrow, wide) = ATTENTION_HALVES[known], ATTENTION_SHARES[known]
    return (wide if head_dim >= 128 else narrow) * (1 + half / _LONG) / (1 + half / tokens)


def rates_of(
    spec: DeviceSpec, workload: TextbookWorkload, matmul_share: float | None = None, form: BlockFormat | None = None
) -> Rates:
    """The rates of a device for a step's dtype and attention. form: the blocks that operands of linear layers are in.
    Raises InputError where the datasheet lacks them."""
    peak = spec.peak_for(workload.dtype)
    if peak is None or spec.peak_bytes_per_s is None:
        raise InputError(f"{spec.name} multiplies no matrices of {workload.dtype}: choose another --dtype or --device")
    if matmul_share is not None and not 0 < matmul_share <= 1:
        raise InputError(f"--efficiency is {matmul_share:g}: write a share of the peak, above 0 and at most 1")
    product = PRECISIONS[workload.dtype].multiplies
    if matmul_share is None and product not in MATMUL_SHARES:
        raise InputError(f"what products in {product} reach was not measured: say it, as in --efficiency 0.5")
    share = MATMUL_SHARES[product] if matmul_share is None else matmul_share
    whose = "measured on an H200" if matmul_share is None else "as --efficiency says"
    if scores_of(workload.attention) == "whole":
        attention = share
    else:
        by_itself = attention_share(workload.attention, workload.model.head_dim, workload.seq_len)
        attention = min(by_itself, ATTENTION_IN_STEPS)
    of_blocks = None if form is None else rate_in_blocks(form, spec)
    if form is not None and of_blocks is None:
        raise InputError(f"{spec.name} does not multiply blocks of {form.name}: choose another --recipe or --device")
    eager = workload.compile == "eager"
    elementwise = ELEMENTWISE_SHARE if eager else COPY_SHARE
    adamw = FUSED_ADAMW_SHARE if workload.optimizer == "adamw-fused" else ADAMW_SHARE
    rate = spec.peak_bytes_per_s
    fused = [part for part, name in workload.parts.items() if name != REFERENCE]
    assumptions = (
        f"Matrix products run at {share:.1%} of the {peak / 1e12:,.4g} TFLOP/s of {product} that the datasheet of "
        f"{spec.name} names ({whose}), attention ({workload.attention}) at {attention:.1%}.",
        f"Elementwise work moves its bytes at {elementwise:.1%} of {rate / 1e12:g} TB/s, the optimizer at {adamw:.1%} "
        "(measured on an H200).",
        *(
            [
                f"Linear layers multiply operands in {form.name}, at the same share of the {of_blocks / 1e12:,.6g} "
                f"TFLOP/s that the datasheet names: none was measured. MFU is of the rate of {product}."
            ]
            if form is not None and of_blocks is not None
            else ()
        ),
        *((f"Fused parts ({', '.join(fused)}) move theirs as a copy does, at {COPY_SHARE:.1%}.",) if fused else ()),
    )
    return Rates(
        peak_flops_per_s=peak,
        matmul_flops_per_s=peak * share,
        blocks_flops_per_s=of_blocks and of_blocks * share,
        attention_flops_per_s=peak * attention,
        elementwise_bytes_per_s=rate * elementwise,
        fused_bytes_per_s=rate * COPY_SHARE,
        optimizer_bytes_per_s=rate * adamw,
        products_beside=PRODUCTS_BESIDE,
        others_beside=OTHERS_BESIDE,
        host_bytes_per_s=HOST_BYTES_PER_S * 2.0 ** (pcie_generation(spec.name) - 5),
        launch_s=LAUNCH_S if eager else 0.0,
        assumptions=assumptions,
    )


# Checkpointing `offload-K`: how long its copies take, and how many blocks may offload before the step waits for them.
#
# Blocks that offload lie evenly between the others, and their copies have the time of all blocks: to the host that of
# forward, back that of backward, which is twice as long. As long as forward hides the former, each block that offloads
# spares memory and costs next to nothing.


_HIDDEN = 0.95
"""The share of forward that copies may take. With 22 and 23 of 34 blocks of 8B they take 0.95 and 0.99 of the blocks'
planned forward, and the step waits for nothing; with 28 it waits (results/h200-x2/long-step-offload)."""


def said_of(rates: Rates) -> str:
    """What readers of a plan are told of `offload-K`."""
    return (
        "offload-K: all blocks keep what their products and attention return, K of them in the host's memory, to which "
        f"a GPU is taken to copy {rates.host_bytes_per_s / 1e9:.3g} GB a second and from it (by what H200 do over PCIe "
        "5.0). Where --checkpointing settles no K, it is the largest whose copies forward hides, or as many as are "
        "needed to fit."
    )


def copies_s(layout: Layout, memory: RankMemory, rates: Rates) -> float:
    """Seconds in which a micro-batch's copies pass one way, in the mean of all blocks."""
    blocks = offload_of(layout.checkpointing)
    return blocks / memory.model.config.layers * memory.offloaded(layout) / rates.host_bytes_per_s if blocks else 0.0


PARTS: tuple[str, ...] = (
    "matrix products", "attention", "run again", "elementwise", "launches", "tensor parallel", "context parallel",
    "expert parallel", "pipeline sends", "pipeline bubble", "data parallel", "slower beside collectives",
    "copies for collectives", "waiting for copies to the host", "optimizer",
)  # fmt: skip
"""What a step's time is made of, in the order of tables."""

_ATTENTION_BACKWARD = 2.5
"""FLOPs of fused attention's backward over its forward's: it makes the scores once more (Dao 2023, section 4.1)."""
_SEVERAL_PASSES = 20 / 7
"""What AdamW tensor by tensor moves over what its fused kernel does. Its eight operations read and write 20 numbers a
parameter (torch/optim/adamw.py, `_multi_tensor_adamw`); fused they read four and write three."""


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Seconds of one block for one micro-batch, by part, forward and backward."""

    forward: dict[str, float]
    backward: dict[str, float]

    @property
    def forward_s(self) -> float:
        return sum(self.forward.values())

    @property
    def backward_s(self) -> float:
        return sum(self.backward.values())

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a step of a layout, and what it is made of."""

    step_s: float
    parts: dict[str, float]
    """Seconds by PARTS; they add up to the step."""
    forward_s: float
    """One chunk's forward on a middle rank, exposed communication with it."""
    backward_s: float
    send_s: float
    """One send to the next stage."""
    last_forward_s: float
    """What the last rank adds to a forward: head and loss, less the blocks that it has fewer."""
    last_backward_s: float
    data_s: float
    """Data parallelism beyond what each micro-batch hides, at the step's end and beginning."""
    optimizer_s: float

    @property
    def bound(self) -> str:
        """The largest part."""
        return max(self.parts, key=self.parts.__getitem__)


class _DataSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that data parallelism sends: in each forward and backward, and once a step."""

    pieces: int
    forward: float
    backward: float
    gathered: float
    reduced: float
    after: float
    """What is sent when backward has ended."""
    copies: communication.Copies
    """In seconds."""


class _Added(NamedTuple):
    """Seconds that data parallelism adds: what nothing hides, what computation loses beside it, and copies."""

    exposed: float = 0.0
    slower: float = 0.0
    copied: float = 0.0


_ADDED_TO = ("data parallel", "slower beside collectives", "copies for collectives")
"""The parts of a step that the figures of _Added belong to."""


class Clock:
    """Tells the time of any layout of one step; remembers what layouts have in common."""

    def __init__(self, workload: TextbookWorkload, memory: RankMemory, rates: Rates, network: Network) -> None:
        self.workload, self.memory, self.rates, self.network = workload, memory, rates, network
        self.model: PlannedModel = memory.model
        self._blocks: dict[tuple[object, ...], BlockTimes] = {}
        self._ends: dict[tuple[object, ...], BlockTimes] = {}
        self._seconds: dict[communication.Transfer, float] = {}
        self._sent: dict[tuple[object, ...], _DataSeconds] = {}
        self._sends: dict[tuple[object, ...], float] = {}

    def forward_s(self, layout: Layout) -> float:
        """Seconds of a block's forward, for one micro-batch."""
        return self._block(layout).forward_s

    def offloading(self, layout: Layout, fits: Callable[[Layout], bool]) -> Layout | None:
        """The layout with as many blocks that offload as forward hides, or as are needed to fit. None where it does not
        fit with all of them."""
        layers = self.model.config.layers

        def of(blocks: int) -> Layout:
            return msgspec.structs.replace(layout, checkpointing=f"{OFFLOAD}-{blocks}")

        if not fits(of(layers)):
            return None
        forward_s = self.forward_s(msgspec.structs.replace(layout, checkpointing="selective"))
        all_copies_s = copies_s(of(layers), self.memory, self.rates)
        hidden = max(1, min(layers, int(layers * _HIDDEN * forward_s / all_copies_s)))
        if fits(of(hidden)):
            return of(hidden)
        return of(most_that_fit(hidden, layers, lambda blocks: not fits(of(blocks))) + 1)

    def least_s(self, layout: Layout) -> float:
        """Seconds that a step takes at least: quickly."""
        blocks = self.model.config.layers / layout.pipeline
        return (layout.micro_batches + bubble_turns(layout)) * blocks * self._block(layout).seconds

    def step(self, layout: Layout) -> StepTime:
        """The time of a step."""
        block, ends = self._block(layout), self._end(layout)
        p, m = layout.pipeline, layout.micro_batches
        chunk = largest_stage(self.model.config.layers, layout.stages)
        count = chunk * layout.chunks
        fewer = 1 if chunk * layout.stages > self.model.config.layers else 0
        # The last rank has the head, and where blocks do not divide evenly, a block less.
        longest = max(count * block.seconds, (count - (fewer if p > 1 else 0)) * block.seconds + ends.seconds)
        at_last = longest > count * block.seconds
        parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        blocks = count - (fewer if at_last and p > 1 else 0)
        for times, factor in ((block, blocks), (ends, 1 if at_last else 0)):
            for part, seconds in (*times.forward.items(), *times.backward.items()):
                parts[part] += m * factor * seconds
        turn = self.model.config.layers / p * block.seconds + ends.seconds / p
        parts["pipeline bubble"] += bubble_turns(layout) * turn
        send = self._send(layout)
        if p > 1:
            parts["pipeline sends"] = 2 * (p - 1) * send + self._waits_s(layout, send, chunk * block.forward_s)
        each, once = self._data(layout, block, count)
        for part, of_each, of_once in zip(_ADDED_TO, each, once, strict=True):
            parts[part] = m * of_each + of_once
        optimizer = self._optimizer_s(layout)
        parts["optimizer"] = optimizer
        share = sum(each) / 2 / layout.chunks
        return StepTime(
            step_s=sum(parts.values()),
            parts=parts,
            forward_s=chunk * block.forward_s + share,
            backward_s=chunk * block.backward_s + share,
            send_s=send,
            last_forward_s=ends.forward_s - (fewer * block.forward_s if p > 1 else 0),
            last_backward_s=ends.backward_s - (fewer * block.backward_s if p > 1 else 0),
            data_s=sum(once),
            optimizer_s=optimizer,
        )

    def _waits_s(self, layout: Layout, send: float, forward: float) -> float:
        """What sends cost between fill and drain. 1F1B waits for each answer from below, (p - 1) / p of a send there
        and back; with chunks, another chunk's work hides a send as long as that takes longer."""
        p, m = layout.pipeline, layout.micro_batches
        if m <= 1:
            return 0.0
        if layout.chunks == 1:
            return 2 * send * (p - 1) / p * max(0, m - p)
        return 2 * m * layout.chunks * max(0.0, send - forward)

    def _block(self, layout: Layout) -> BlockTimes:
        """A block's times; the mean of all blocks, where they keep unlike for backward."""
        key = (*self._key(layout), layout.expert, _hooks_s(layout))
        if key not in self._blocks:
            layers, copies = self.model.config.layers, copies_s(layout, self.memory, self.rates)
            forward: dict[str, float] = {}
            backward: dict[str, float] = {}
            for span in spans_of(layout.checkpointing, layers):
                alike = self._times_of_block(msgspec.structs.replace(layout, checkpointing=span.alone))
                for mean, parts in ((forward, alike.forward), (backward, alike.backward)):
                    for part, seconds in parts.items():
                        mean[part] = mean.get(part, 0.0) + span.blocks / layers * seconds
            for parts in (forward, backward):
                parts["waiting for copies to the host"] = max(0.0, copies - sum(parts.values()))
            self._blocks[key] = BlockTimes(forward=forward, backward=backward)
        return self._blocks[key]

    def _key(self, layout: Layout) -> tuple[object, ...]:
        dtype = SHARDINGS[layout.sharding].in_compute_dtype
        return layout.tensor, layout.context, layout.micro_batch, layout.checkpointing, dtype

    def _times_of_block(self, layout: Layout) -> BlockTimes:
        """The times of a block in a layout whose blocks keep alike."""
        config, rates, length = self.model.config, self.rates, self.workload.seq_len
        tokens = layout.micro_batch * length / layout.context
        linear, of_scores, _ = self.model.flops_per_token(length)
        multiplies = rates.blocks_flops_per_s or rates.matmul_flops_per_s
        products = tokens * linear / layout.tensor / multiplies
        scores = tokens * of_scores / layout.tensor
        fused = scores_of(self.workload.attention) != "whole"
        attention = scores * (1 if fused else 2) / rates.attention_flops_per_s
        forward = {"matrix products": products, "attention": attention}
        backward = {
            "matrix products": 2 * products,
            "attention": attention * (_ATTENTION_BACKWARD if fused else 2),
        }
        (span,) = spans_of(layout.checkpointing, 1)
        if span.multiplies_again:
            last = tokens * 2 * self.model.active * config.d_model * config.d_ff / layout.tensor
            again = products + attention if span.attends_again else products
            backward["run again"] = again - last / multiplies / span.group
        count = 7 if fused else 9
        forward["matrix products"] += count * PRODUCT_S
        backward["matrix products"] += 2 * count * PRODUCT_S
        if "run again" in backward:
            backward["run again"] += count * PRODUCT_S
        one, two = (self.memory.moved(layout, first=False, last=False, blocks=blocks) for blocks in (1, 2))
        sizes = bytes_of(self.workload, layout.sharding)
        transfers = {
            "tensor parallel": list(communication.tensor_transfers(self.model, layout, length, sizes, 1)),
            "context parallel": list(communication.context_transfers(self.model, layout, length, sizes, 1)),
            "expert parallel": list(communication.expert_transfers(self.model, layout, length, sizes, 1)),
        }
        moved = Moved(*map(sub, two, one))
        return self._with_rest(forward, backward, moved, products=count, transfers=transfers, hooks=_hooks_s(layout))

    def _end(self, layout: Layout) -> BlockTimes:
        """Embedding, head and loss."""
        key = self._key(layout)
        if key not in self._ends:
            length = self.workload.seq_len
            tokens = layout.micro_batch * length / layout.context
            *_, of_head = self.model.flops_per_token(length)
            head = tokens * of_head / layout.tensor / self.rates.matmul_flops_per_s
            forward, backward = {"matrix products": head}, {"matrix products": 2 * head}
            without, with_ends = (self.memory.moved(layout, first=ends, last=ends, blocks=1) for ends in (False, True))
            sizes = bytes_of(self.workload, layout.sharding)
            transfers = {"tensor parallel": list(communication.end_transfers(self.model, layout, length, sizes))}
            moved = Moved(*map(sub, with_ends, without))
            self._ends[key] = self._with_rest(forward, backward, moved, products=1, transfers=transfers)
        return self._ends[key]

    def _with_rest(
        self,
        forward: dict[str, float],
        backward: dict[str, float],
        moved: Moved,
        *,
        products: int,
        transfers: dict[str, list[communication.Transfer]],
        hooks: tuple[float, float] = (0.0, 0.0),
    ) -> BlockTimes:
        """These times and all others: elementwise kernels, what the device waits for their launches and for a host that
        runs hooks, and transfers that nothing hides, by part."""
        rates = self.rates
        phases: tuple[tuple[communication.When, dict[str, float], float, float, float, int, float], ...] = (
            ("forward", forward, moved.forward, moved.fused_forward, moved.kernels_forward, 1, hooks[0]),
            ("backward", backward, moved.backward, moved.fused_backward, moved.kernels_backward, 2, hooks[1]),
        )
        for when, times, count, fused, kernels, passes, hooked in phases:
            others = max(0, count - fused) / rates.elementwise_bytes_per_s
            times["elementwise"] = others + max(0, fused) / rates.fused_bytes_per_s + max(0, kernels) * KERNEL_S
            of_host = (kernels + passes * products) * rates.launch_s + (hooked if rates.launch_s else 0.0)
            waits = of_host - sum(times.values())
            if waits > 0:
                times["launches"] = waits
            for part, sent in transfers.items():
                if seconds := self._sum(sent, when, overlaps=False):
                    times[part] = seconds
        return BlockTimes(forward=forward, backward=backward)

    def _sum(self, transfers: list[communication.Transfer], when: communication.When, *, overlaps: bool) -> float:
        return sum(
            transfer.times * self.seconds(transfer)
            for transfer in transfers
            if transfer.when == when and transfer.overlaps == overlaps
        )

    def seconds(self, transfer: communication.Transfer) -> float:
        """Seconds of one such collective."""
        if transfer not in self._seconds:
            self._seconds[transfer] = communication.transfer_s(self.network, transfer)
        return self._seconds[transfer]

    def _send(self, layout: Layout) -> float:
        if layout.pipeline == 1:
            return 0.0
        key = (*self._key(layout), layout.data)
        if key not in self._sends:
            sizes = bytes_of(self.workload, layout.sharding)
            sends = communication.pipeline_transfers(self.model, layout, self.workload.seq_len, sizes)
            self._sends[key] = next((self.seconds(one) for one in sends), 0.0)
        return self._sends[key]

    def _data(self, layout: Layout, block: BlockTimes, count: int) -> tuple[_Added, _Added]:
        """What data parallelism adds to each micro-batch of so many blocks, and to the step once."""
        key = (
            layout.data, layout.tensor, layout.context, layout.pipeline, layout.chunks, layout.expert, layout.sharding,
            layout.shard,
        )  # fmt: skip
        if key not in self._sent:
            self._sent[key] = self._data_seconds(layout)
        sent, copies = self._sent[key], self._sent[key].copies
        forward = _Hiding(count * block.forward_s + copies.forward, self._beside(block.forward), sent.pieces)
        backward = _Hiding(count * block.backward_s + copies.backward, self._beside(block.backward), sent.pieces)
        copied = _Added(copied=copies.forward + copies.backward)
        each = (_added(sent.forward, forward), _added(sent.backward, backward), copied)
        # Whole parameters are gathered block by block, before the block's first forward.
        sharded = SHARDINGS[layout.sharding].parameters
        gathered = _added(sent.gathered, forward) if sharded else _Added(exposed=sent.gathered)
        once = (gathered, _added(sent.reduced, backward), _Added(exposed=sent.after, copied=copies.step))
        return _Added(*map(sum, zip(*each, strict=True))), _Added(*map(sum, zip(*once, strict=True)))

    def _beside(self, parts: dict[str, float]) -> float:
        """How many times as long these parts take together while a collective runs."""
        whole, (of_products, of_others) = sum(parts.values()), beside(self.rates, self.network)
        products = parts["matrix products"] + parts.get("run again", 0.0)
        return (products * of_products + (whole - products) * of_others) / whole if whole else 1.0

    def _data_seconds(self, layout: Layout) -> "_DataSeconds":
        sizes, rate = bytes_of(self.workload, layout.sharding), self.rates.fused_bytes_per_s
        transfers = list(communication.data_transfers(self.model, layout, sizes))
        gathers = [one for one in transfers if one.what == "parameters"]
        reduces = [one for one in transfers if one.what == "gradients"]
        copies = communication.data_copies(self.model, layout, sizes)
        return _DataSeconds(
            pieces=max((one.times for one in transfers), default=1),
            forward=self._sum(transfers, "forward", overlaps=True),
            backward=self._sum(transfers, "backward", overlaps=True),
            gathered=self._sum(gathers, "step", overlaps=True),
            reduced=self._sum(reduces, "step", overlaps=True),
            after=self._sum(reduces, "step", overlaps=False),
            copies=communication.Copies(
                forward=copies.forward / rate, backward=copies.backward / rate, step=copies.step / rate
            ),
        )

    def _optimizer_s(self, layout: Layout) -> float:
        """AdamW over the parameters that the rank updates."""
        if self.workload.phase != "train":
            return 0.0
        sizes = bytes_of(self.workload, layout.sharding)
        blocks = largest_stage(self.model.config.layers, layout.stages) * layout.chunks
        held = blocks * self.model.local_block(layout.tensor) + self.model.outside_blocks // layout.tensor // min(
            2, layout.pipeline
        )
        experts = blocks * self.model.local_experts(layout.tensor, layout.expert)
        if SHARDINGS[layout.sharding].moments:
            held, experts = held // layout.shard, experts // max(1, layout.shard // layout.expert)
        work = adamw_work(held + experts, sizes.parameters, moment_bytes(self.workload), master_bytes(self.workload))
        passes = 1 if self.workload.optimizer in ("adamw-fused", *OF_ONE_LAUNCH) else _SEVERAL_PASSES
        return passes * ((work.bytes_read or 0) + (work.bytes_written or 0)) / self.rates.optimizer_bytes_per_s


def _hooks_s(layout: Layout) -> tuple[float, float]:
    """What the hooks of a block take the host, forward and backward: those of fully_shard, which shards gradients."""
    return UNIT_S if SHARDINGS[layout.sharding].gradients and layout.shard > 1 else (0.0, 0.0)


def beside(rates: Rates, network: Network) -> tuple[float, float]:
    """How many times as long products, and other kernels, take while a collective runs."""
    if network.beside is None:
        return rates.products_beside, rates.others_beside
    return network.beside, min(network.beside, rates.others_beside)


class _Hiding(NamedTuple):
    """Computation behind which communication hides."""

    seconds: float
    beside: float
    """How many times as long it takes while a collective runs."""
    pieces: int
    """In how many pieces the communication goes: the first or the last has nothing to hide behind."""


def _added(sent: float, behind: _Hiding) -> _Added:
    """What so many seconds of communication add to the computation behind which they hide.

    While communication goes on for C seconds, computation gets C / f done, f being how much slower it is then: it loses
    C (1 - 1 / f). Where it ends before, it has lost f - 1 times its own seconds, and the rest of C is bare.
    """
    if not sent:
        return _Added()
    first = sent / behind.pieces
    at_once, hiding = sent - first, behind.seconds * (behind.pieces - 1) / behind.pieces
    hidden = min(at_once, behind.beside * hiding)
    return _Added(exposed=first + at_once - hidden, slower=hidden * (1 - 1 / behind.beside))


# Pipeline schedules as the work of each rank, in order.
#
# 1F1B and its interleaved form as Narayanan et al. 2021 draw them (figures 3 and 4) and Megatron runs them: some
# forwards to warm up, then a forward and a backward in turn, then the backwards that are left.


class Work(NamedTuple):
    """A forward or a backward of a micro-batch through one chunk of a rank."""

    forward: bool
    micro_batch: int
    chunk: int


def schedule(layout: Layout, rank: int) -> list[Work]:
    """The work of a pipeline rank in its order."""
    p, m, v = layout.pipeline, layout.micro_batches, layout.chunks
    every = m * v
    warm_up = min(every, p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * p)

    def work(number: int, forward: bool) -> Work:
        """The so-manieth forward or backward of any rank: p micro-batches through a chunk, then through the next."""
        chunk = number % (p * v) // p
        return Work(forward, number // (p * v) * p + number % p, chunk if forward else v - 1 - chunk)

    forwards, backwards = ([work(number, forward) for number in range(every)] for forward in (True, False))
    passes = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        passes += [forward, backward]
    return passes + backwards[every - warm_up :]


# A step played through, piece by piece: each pipeline rank works off its schedule, and waits for what it needs.
#
# The formulas add up what a step must take; the simulation lets ranks wait for one another. A piece of work begins when
# its rank is free and its input is there; a send takes its link for its time, beside computation. A slow rank
# slows whoever waits for it: within a tensor and context group everybody at once, along the pipeline by
# what is late, over data-parallel replicas at the end of the step.

MOST_REPLICAS = 16
"""Data-parallel replicas that are played; of more, the slowest of these many stands for them."""
MOST_WORK = 400_000
"""Pieces of work that are played at most."""
LANES, SLICES = 16, 4_000
"""Ranks and pieces of work that are drawn: of more ranks some, of more pieces the first."""
_SEED = 20_210_409


class Simulated(NamedTuple):
    """What a played step took, and when each rank of the first replica worked.

    The pipeline takes until the last backward of the slowest replica has ended; the ranks of the first replica wait for
    `idle_share` of it.
    """

    step_s: float
    pipeline_s: float
    idle_share: float
    replicas: int
    slices: tuple[Slice, ...] = ()


def simulate(layout: Layout, time: StepTime, spread: float = 0.0, seed: int = _SEED) -> Simulated | None:
    """Play a step. None where it has too many pieces of work. spread: how far the speed of ranks differs, as the
    relative standard deviation of one rank's step."""
    pieces = 2 * layout.micro_batches * layout.stages
    if pieces > MOST_WORK:
        return None
    draws, together = random.Random(seed), layout.tensor * layout.context
    played: list[_Replica] = []
    for _ in range(min(layout.data, MOST_REPLICAS, max(1, MOST_WORK // pieces)) if spread else 1):
        # Each pipeline rank is as slow as the slowest of the ranks that share its matrices and sequence.
        slow = [
            max(max(0.5, draws.gauss(1.0, spread)) for _ in range(together)) if spread else 1.0
            for _ in range(layout.pipeline)
        ]
        played.append(_Replica(layout, time, slow))
        played[-1].play()
    longest = max(replica.end_s for replica in played)
    first = played[0]
    return Simulated(
        step_s=longest + time.data_s + time.optimizer_s,
        pipeline_s=longest,
        idle_share=1 - sum(first.busy_s) / (layout.pipeline * first.end_s),
        replicas=len(played),
        slices=_slices(layout, first, time),
    )


class _Replica:
    """One data-parallel replica: the ranks of a pipeline."""

    def __init__(self, layout: Layout, time: StepTime, slownesses: list[float]) -> None:
        self._layout, self._time, self._slow = layout, time, slownesses
        self._waiting = [deque(schedule(layout, rank)) for rank in range(layout.pipeline)]
        self._free = [0.0] * layout.pipeline
        self._link_free: dict[tuple[int, bool], float] = {}
        self._there: dict[tuple[bool, int, int], float] = {}
        """When the input of a micro-batch's forward or backward is there, by stage."""
        self.busy_s = [0.0] * layout.pipeline
        self.done: list[tuple[int, Work, float, float]] = []

    @property
    def end_s(self) -> float:
        return max(self._free)

    def play(self) -> None:
        """Let each rank work until nobody can go on."""
        turn = deque(range(self._layout.pipeline))
        stuck = 0
        while turn and stuck <= len(turn):
            rank = turn.popleft()
            went_on = False
            while self._waiting[rank] and self._work(rank, self._waiting[rank][0]):
                self._waiting[rank].popleft()
                went_on = True
            stuck = 0 if went_on else stuck + 1
            if self._waiting[rank]:
                turn.append(rank)
        assert not turn, "the schedule waits for itself"

    def _work(self, rank: int, work: Work) -> bool:
        """Do a piece of work if its input is there; returns whether it was."""
        p, last = self._layout.pipeline, self._layout.stages - 1
        stage = work.chunk * p + rank
        begins = 0.0
        if not (work.forward and stage == 0):
            key = (work.forward, work.micro_batch, stage)
            if key not in self._there:
                return False
            begins = self._there[key]
        begins = max(begins, self._free[rank])
        time = self._time
        seconds = time.forward_s if work.forward else time.backward_s
        if stage == last:
            seconds += time.last_forward_s if work.forward else time.last_backward_s
        seconds *= self._slow[rank]
        ends = begins + seconds
        self._free[rank] = ends
        self.busy_s[rank] += seconds
        self.done.append((rank, work, begins, ends))
        if work.forward:
            if stage == last:
                self._there[False, work.micro_batch, stage] = ends
            else:
                self._there[True, work.micro_batch, stage + 1] = self._sent(rank, True, ends)
        elif stage > 0:
            self._there[False, work.micro_batch, stage - 1] = self._sent(rank, False, ends)
        return True

    def _sent(self, rank: int, forward: bool, ready: float) -> float:
        """When what is ready now has arrived at the next stage, or the one before."""
        if self._layout.pipeline == 1:
            return ready
        begins = max(ready, self._link_free.get((rank, forward), 0.0))
        self._link_free[rank, forward] = begins + self._time.send_s
        return begins + self._time.send_s


def _slices(layout: Layout, replica: _Replica, time: StepTime) -> tuple[Slice, ...]:
    """When each rank worked, in milliseconds, as far as it can be drawn."""
    ranks = sorted({round(i * (layout.pipeline - 1) / max(1, LANES - 1)) for i in range(LANES)})
    lanes = {rank: f"pipeline rank {rank}" for rank in ranks if rank < layout.pipeline}
    done = sorted((one for one in replica.done if one[0] in lanes), key=lambda one: one[2])
    by_rank: dict[int, list[Slice]] = {rank: [] for rank in lanes}
    for rank, work, begins, ends in done[:SLICES]:
        kind = "forward" if work.forward else "backward"
        chunk = f", chunk {work.chunk}" if layout.chunks > 1 else ""
        name = f"{kind} of micro-batch {work.micro_batch}{chunk}"
        by_rank[rank].append(Slice(lanes[rank], begins * 1e3, ends * 1e3, kind, name))
    slices = [one for of_rank in by_rank.values() for one in of_rank]
    if len(done) > SLICES:
        return tuple(slices)
    end, reduced = replica.end_s * 1e3, (replica.end_s + time.data_s) * 1e3
    for lane in lanes.values():
        if time.data_s:
            slices.append(Slice(lane, end, reduced, "data parallel", "what is left"))
        if time.optimizer_s:
            begins = replica.end_s + time.data_s
            slices.append(Slice(lane, reduced, (begins + time.optimizer_s) * 1e3, "optimizer"))
    return tuple(slices)
