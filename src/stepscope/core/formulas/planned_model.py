"""A model as a plan sees it: the transformer, whose feed-forward network may have experts.

With experts, each block has E feed-forward networks of width d_ff and a router (E x d); each token goes through A of
them (Shazeer et al. 2017; Fedus et al. 2021). What tensor parallelism leaves on a rank follows Megatron (Shoeybi et
al. 2019, section 3): queries, keys, values, gate and up lose columns, output and down rows, embedding and head
vocabulary; norms stay whole. Where there are fewer heads of keys than ranks, each rank keeps one of them.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache

from stepscope.core.errors import InputError
from stepscope.core.float_formats import BlockFormat
from stepscope.core.formulas.transformer import Shapes, block_shapes, count_of, seen_twice, shapes_outside_blocks
from stepscope.core.layout import Layout
from stepscope.core.model_config import ModelConfig, whole_number

_COLUMNS = ("attention.sinks", "attention.query.weight", "feed_forward.gate.weight", "feed_forward.up.weight")
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
            shapes[name] = (shape[0] // tensor, *shape[1:])
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
    form: BlockFormat | None = None
    """Blocks of few bits that the operands of its blocks' linear layers are in; None for those of the dtype."""

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

    def flops_per_token(self, seq_len: int) -> tuple[int, int, int]:
        """FLOPs in forward for one token. Of a block's linear maps: 2 a weight that it meets (Kaplan et al. 2020). Of
        its scores and their output, half of the square: 2 S d; less with a window (`seen_twice`). Of the head."""
        config = self.config
        matrices = {name: shape for name, shape in block_shapes(config).items() if len(shape) > 1}
        linear = 2 * (count_of(matrices) + (self.active - 1) * self.expert + self.router)
        of_scores = 2 * seen_twice(seq_len, config.window) * config.d_model // seq_len
        return linear, of_scores, 2 * config.d_model * config.vocabulary

    def step_flops(self, tokens: int, seq_len: int) -> int:
        """Model FLOPs of a training step: forward, and twice as many in backward."""
        linear, attention, head = self.flops_per_token(seq_len)
        return 3 * tokens * (self.config.layers * (linear + attention) + head)


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
