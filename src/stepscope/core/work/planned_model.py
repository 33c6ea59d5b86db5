"""A model as a plan sees it: the transformer of `core/work/transformer.py`, whose feed-forward network may have
experts.

With experts, each block has E feed-forward networks of width d_ff and a router (E x d); each token goes through A of
them (Shazeer et al. 2017; Fedus et al. 2021). What tensor parallelism leaves on a rank follows Megatron (Shoeybi et al.
2019, section 3): queries, keys, values, gate and up lose columns, output and down rows, embedding and head vocabulary;
norms stay whole. Where there are fewer heads of keys than ranks, each rank keeps one of them.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from stepscope.core.errors import InputError
from stepscope.core.model_config import ModelConfig, whole_number
from stepscope.core.work.transformer import Shapes, block_shapes, count_of, shapes_outside_blocks

_COLUMNS = ("attention.query.weight", "feed_forward.gate.weight", "feed_forward.up.weight")
_ROWS = ("attention.output.weight", "feed_forward.down.weight")
_KEYS = ("attention.key.weight", "attention.value.weight")


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A transformer, and the experts of its feed-forward networks."""

    config: ModelConfig
    experts: int = 1
    active: int = 1
    """Experts that each token goes through."""

    def __post_init__(self) -> None:
        whole_number(self.experts, "--experts", 1, 2**16)
        whole_number(self.active, "--active-experts", 1, 2**16)
        if self.active > self.experts:
            raise InputError(f"--active-experts {self.active} are more than --experts {self.experts}")

    @cached_property
    def router(self) -> int:
        """Parameters of a block's router."""
        return self.experts * self.config.d_model if self.experts > 1 else 0

    @cached_property
    def expert(self) -> int:
        """Parameters of one feed-forward network."""
        return 3 * self.config.d_model * self.config.d_ff

    @cached_property
    def outside_blocks(self) -> int:
        return count_of(shapes_outside_blocks(self.config))

    @cached_property
    def block(self) -> int:
        """Parameters of a block with all its experts."""
        return count_of(block_shapes(self.config)) + (self.experts - 1) * self.expert + self.router

    @cached_property
    def parameters(self) -> int:
        return self.outside_blocks + self.config.layers * self.block

    def local_keys(self, tensor: int) -> int:
        """Width of the keys that a rank of tensor parallelism keeps: of one head at least."""
        return max(1, self.config.key_heads // tensor) * self.config.head_dim

    @cached_property
    def _shapes_by_tensor(self) -> dict[int, Shapes]:
        return {}

    def local_shapes(self, tensor: int) -> Shapes:
        """Shapes of a block's dense parameters on a rank of tensor parallelism, one feed-forward network among them."""
        known = self._shapes_by_tensor
        if tensor not in known:
            known[tensor] = self._local_shapes(tensor)
        return known[tensor]

    def _local_shapes(self, tensor: int) -> Shapes:
        shapes: Shapes = {}
        for name, shape in block_shapes(self.config).items():
            if name in _COLUMNS:
                shapes[name] = (shape[0] // tensor, shape[1])
            elif name in _KEYS:
                shapes[name] = (self.local_keys(tensor), shape[1])
            elif name in _ROWS:
                shapes[name] = (shape[0], shape[1] // tensor)
            else:
                shapes[name] = shape
        return shapes

    def local_block(self, tensor: int) -> int:
        """Dense parameters of a block on a rank: without experts all of them, with experts no feed-forward network."""
        dense = count_of(self.local_shapes(tensor))
        return dense if self.experts == 1 else dense - self.expert // tensor + self.router

    def local_experts(self, tensor: int, expert: int) -> int:
        """Parameters of a block's experts on a rank."""
        return 0 if self.experts == 1 else self.experts // expert * self.expert // tensor

    def local_vocabulary(self, tensor: int) -> int:
        return -(-self.config.vocabulary // tensor)

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
