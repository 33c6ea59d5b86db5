"""Parameters and model FLOPs of the transformer in `training/transformer.py`.

With d = d_model, f = d_ff, L = layers, V = vocabulary, B = batch_size, S = seq_len, and heads that share no keys:

parameters   those of `block_shapes` and `shapes_outside_blocks`:
             2 V d  (embedding, untied head)  +  L (4 d^2 + 3 d f + 2 d)  +  d (final norm)

forward      products of activations with weights, 2 FLOPs a weight and token (Kaplan et al. 2020, table 1):
             2 B S (L (4 d^2 + 3 d f) + d V)
             attention scores and output, 2 products of 2 B S S d each: 4 B S^2 d L, full square;
             half of it where causal attention is counted as what is needed (S^2 / 2 of the square).
backward     every product has two in backward (dX and dW, or dQ and dK...): twice the forward.

The embedding is a gather, not a product. Norms, RoPE, softmax, SwiGLU's gate and the optimizer are elementwise
and not counted as model FLOPs (Chowdhery et al. 2022, appendix B, whose MFU this is). Nor is what checkpointing runs
again in backward: that is `recomputed_flops`, and model FLOPs and it together are hardware FLOPs. Accumulation changes
no FLOPs: the micro-batches are the batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from stepscope.core.errors import InputError
from stepscope.core.formulas import CausalConvention, Convention, Work, adamw_work
from stepscope.core.layout import Layout
from stepscope.core.model_config import ModelConfig, whole_number
from stepscope.core.parts import scores_of
from stepscope.core.precisions import PRECISIONS
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER
from stepscope.core.workloads import StepChoices, TextbookWorkload, Workload, by_sizes

Shapes = dict[str, tuple[int, ...]]
"""Shapes of parameters, (out, in), by name."""


def block_shapes(config: ModelConfig) -> Shapes:
    """Shapes of one block's parameters by their names inside it, in the order in which the model has them."""
    d, f, k = config.d_model, config.d_ff, config.key_width
    return {
        "attention_norm.weight": (d,),
        "attention.query.weight": (d, d),
        "attention.key.weight": (k, d),
        "attention.value.weight": (k, d),
        "attention.output.weight": (d, d),
        "feed_forward_norm.weight": (d,),
        "feed_forward.gate.weight": (f, d),
        "feed_forward.up.weight": (f, d),
        "feed_forward.down.weight": (d, f),
    }


def shapes_outside_blocks(config: ModelConfig) -> Shapes:
    """Shapes of the parameters that no block holds: embedding, head and final norm."""
    d, words = config.d_model, config.vocabulary
    head = {} if config.tied else {"head.weight": (words, d)}
    return {"embedding.weight": (words, d), "norm.weight": (d,), **head}


def count_of(shapes: Shapes) -> int:
    """Number of elements of all these parameters."""
    return sum(map(math.prod, shapes.values()))


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters of the transformer."""
    return count_of(shapes_outside_blocks(config)) + config.layers * count_of(block_shapes(config))


def forward_flops(workload: TextbookWorkload, causal: CausalConvention = "half") -> int:
    """Model FLOPs of one forward pass, loss excluded."""
    config = workload.model
    matrices = {name: shape for name, shape in block_shapes(config).items() if len(shape) > 1}
    weights = config.layers * count_of(matrices) + config.d_model * config.vocabulary
    return 2 * workload.tokens * weights + _attention_flops(workload, causal)


def products_per_forward(workload: TextbookWorkload) -> int:
    """Number of matrix products in a forward pass: seven linear maps a layer (query, key, value, output, gate, up,
    down), the two of attention unless it is one fused kernel, and the head.
    """
    return workload.model.layers * _products_per_block(workload) + 1


def recomputed_flops(workload: TextbookWorkload, causal: CausalConvention = "half") -> int:
    """FLOPs of forward's products that a step's checkpointing runs again in backward, counted as model FLOPs are.

    every-K: the forward of all blocks, but for one product in each group. Backward needs the input of the group's last
    product (down), not its output, and PyTorch stops where nothing more is needed. attention: as every-1, but for
    attention itself. selective: 0, since what it runs again is elementwise; none: 0.
    """
    config, attention = workload.model, _attention_flops(workload, causal)
    layers, last = config.layers, 2 * workload.tokens * config.d_model * config.d_ff
    blocks = forward_flops(workload, causal) - 2 * workload.tokens * config.d_model * config.vocabulary
    again = 0
    for span in filter(lambda span: span.multiplies_again, workload.spans):
        of_span = blocks if span.attends_again else blocks - attention
        again += of_span * span.blocks // layers - span.groups * last
    return again


def recomputed_products(workload: TextbookWorkload) -> int:
    """Number of matrix products that checkpointing runs again in one micro-batch's backward (`recomputed_flops`)."""
    each = _products_per_block(workload)
    return sum(span.blocks * each - span.groups for span in workload.spans if span.multiplies_again)


def moment_bytes(workload: StepChoices) -> int:
    """Bytes of an element of each of AdamW's two moments."""
    return 2 if workload.optimizer == "adamw-bf16-state" else PRECISIONS[workload.dtype].moments


def phase_work(workload: TextbookWorkload, causal: CausalConvention = "half") -> dict[str, Work]:
    """Work of each phase that the workload runs: model FLOPs, and the optimizer's bytes."""
    convention = Convention(causal=causal)
    forward = forward_flops(workload, causal)
    phases = {FORWARD: Work(flops=forward, convention=convention)}
    if workload.phase != "forward":
        phases[BACKWARD] = Work(flops=2 * forward, convention=convention)
    if workload.phase == "train":
        precision = PRECISIONS[workload.dtype]
        count = parameter_count(workload.model)
        optimizer = adamw_work(count, precision.weights, moment_bytes(workload), precision.masters)
        # The norm that clips must be known before the first update: every gradient is read once more.
        of_norm = count * precision.weights if workload.clip is not None else 0
        phases[OPTIMIZER] = Work(
            flops=0,
            bytes_read=(optimizer.bytes_read or 0) + of_norm,
            bytes_written=optimizer.bytes_written,
            convention=convention,
        )
    return phases


def known_work(workload: Workload) -> dict[str, Work]:
    """Work of each phase, where it is known before anything runs: that of the textbook's model."""
    return by_sizes(workload, phase_work) or {}


def step_flops(workload: TextbookWorkload, causal: CausalConvention = "half") -> int:
    """Model FLOPs of one whole step."""
    return sum(work.flops for work in phase_work(workload, causal).values())


def _attention_flops(workload: TextbookWorkload, causal: CausalConvention) -> int:
    """FLOPs of the products of queries with keys, and of weights with values, in one forward pass."""
    attention = 4 * workload.batch_size * workload.seq_len**2 * workload.model.d_model * workload.model.layers
    if causal == "half":
        attention //= 2
    return attention


def _products_per_block(workload: TextbookWorkload) -> int:
    return 9 if scores_of(workload.attention) == "whole" else 7


# A model as a plan sees it: the transformer of `core/formulas/transformer.py`, whose feed-forward network may have
# experts.
#
# With experts, each block has E feed-forward networks of width d_ff and a router (E x d); each token goes through A of
# them (Shazeer et al. 2017; Fedus et al. 2021). What tensor parallelism leaves on a rank follows Megatron (Shoeybi et
# al. 2019, section 3): queries, keys, values, gate and up lose columns, output and down rows, embedding and head
# vocabulary; norms stay whole. Where there are fewer heads of keys than ranks, each rank keeps one of them.


_COLUMNS = ("attention.query.weight", "feed_forward.gate.weight", "feed_forward.up.weight")
_ROWS = ("attention.output.weight", "feed_forward.down.weight")
_KEYS = ("attention.key.weight", "attention.value.weight")


def local_keys(config: ModelConfig, tensor: int) -> int:
    """Width of the keys that a rank of tensor parallelism keeps: of one head at least."""
    return max(1, config.key_heads // tensor) * config.head_dim


@lru_cache(maxsize=256)
def local_shapes(config: ModelConfig, tensor: int) -> Shapes:
    """Shapes of a block's dense parameters on a rank of tensor parallelism, one feed-forward network among them."""
    shapes: Shapes = {}
    for name, shape in block_shapes(config).items():
        if name in _COLUMNS:
            shapes[name] = (shape[0] // tensor, shape[1])
        elif name in _KEYS:
            shapes[name] = (local_keys(config, tensor), shape[1])
        elif name in _ROWS:
            shapes[name] = (shape[0], shape[1] // tensor)
        else:
            shapes[name] = shape
    return shapes


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A transformer, and the experts of its feed-forward networks."""

    config: ModelConfig
    experts: int = 1
    active: int = 1
    """Experts that each token goes through."""

    router: int = field(init=False, compare=False)
    """Parameters of a block's router."""
    expert: int = field(init=False, compare=False)
    """Parameters of one feed-forward network."""
    block: int = field(init=False, compare=False)
    """Parameters of a block with all its experts."""
    outside_blocks: int = field(init=False, compare=False)
    parameters: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        whole_number(self.experts, "--experts", 1, 2**16)
        whole_number(self.active, "--active-experts", 1, 2**16)
        if self.active > self.experts:
            raise InputError(f"--active-experts {self.active} are more than --experts {self.experts}")
        config, expert = self.config, 3 * self.config.d_model * self.config.d_ff
        router = self.experts * config.d_model if self.experts > 1 else 0
        block = count_of(block_shapes(config)) + (self.experts - 1) * expert + router
        outside = count_of(shapes_outside_blocks(config))
        counts = {"router": router, "expert": expert, "block": block, "outside_blocks": outside}
        for name, count in {**counts, "parameters": outside + config.layers * block}.items():
            object.__setattr__(self, name, count)  # the class is frozen

    def local_block(self, tensor: int) -> int:
        """Dense parameters of a block on a rank: without experts all of them, with experts no feed-forward network."""
        dense = count_of(local_shapes(self.config, tensor))
        return dense if self.experts == 1 else dense - self.expert // tensor + self.router

    def local_experts(self, tensor: int, expert: int) -> int:
        """Parameters of a block's experts on a rank."""
        return 0 if self.experts == 1 else self.experts // expert * self.expert // tensor

    def matrix_flops_per_token(self) -> int:
        """FLOPs of a block's linear maps in forward, for one token: 2 a weight that it meets (Kaplan et al. 2020)."""
        matrices = {name: shape for name, shape in block_shapes(self.config).items() if len(shape) > 1}
        return 2 * (count_of(matrices) + (self.active - 1) * self.expert + self.router)

    def attention_flops_per_token(self, seq_len: int) -> int:
        """FLOPs of a block's scores and output in forward, for one token, half of the square: 2 S d."""
        return 2 * seq_len * self.config.d_model

    def head_flops_per_token(self) -> int:
        return 2 * self.config.d_model * self.config.vocabulary

    def step_flops(self, tokens: int, seq_len: int) -> int:
        """Model FLOPs of a training step: forward, and twice as many in backward."""
        block = self.matrix_flops_per_token() + self.attention_flops_per_token(seq_len)
        return 3 * tokens * (self.config.layers * block + self.head_flops_per_token())


def largest_stage(layers: int, stages: int) -> int:
    """Blocks of the largest of so many stages."""
    return math.ceil(layers / stages)


# Pipeline schedules by formula: the bubble, and how many micro-batches a rank holds at once.
#
# 1F1B: a rank idles (p - 1) of m + p - 1 turns (Narayanan et al. 2021, section 2.2). Interleaved, with v chunks a rank,
# a turn is 1/v as long, and so is the idle time: (p - 1) / (v m) of the time that is worked (section 2.2, figure 4).


def bubble_turns(layout: Layout) -> float:
    """Idle time of a rank, in turns of one micro-batch's forward and backward through all its chunks."""
    return (layout.pipeline - 1) / layout.chunks


def chunks_in_flight(layout: Layout, rank: int) -> int:
    """Chunks whose activations a pipeline rank holds at once, at most.

    1F1B: the stages from this one to the last (Narayanan et al. 2021, figure 4). Interleaved: 2 (p - rank - 1) more
    than the (v - 1) p + 1 of the last rank (Megatron's warm-up, `forward_backward_pipelining_with_interleaving`;
    Korthikanti et al. 2022, section 4.2.3, for the first rank).
    """
    p, v = layout.pipeline, layout.chunks
    most = layout.micro_batches * v
    if v == 1:
        return min(most, p - rank)
    return min(most, 2 * (p - rank - 1) + (v - 1) * p + 1)


# How AdamW in one launch lays moments side by side, for the optimizer and for the prediction of memory.


MOST_NUMBERS = 32 * 2**20
"""Numbers of a block, 128 MiB in fp32. One block for all would be a request that, near the limit, finds no room."""
_ALIGNED = 128
"""Each moment begins at a multiple of so many numbers: of 512 bytes, as an allocation of its own would."""


def aligned_numbers(numbers: int) -> int:
    """The numbers that a tensor of so many takes in a block."""
    return -(-numbers // _ALIGNED) * _ALIGNED


def moment_blocks(sizes: Sequence[int]) -> list[list[int]]:
    """The blocks for tensors of these sizes: in each the places of its tensors, one after the other. A tensor that is
    larger than a block has one alone."""
    blocks: list[list[int]] = []
    left = 0
    for place, size in enumerate(sizes):
        if not blocks or size > left:
            blocks.append([])
            left = MOST_NUMBERS
        blocks[-1].append(place)
        left -= size
    return blocks
