"""A decoder-only transformer in textbook PyTorch, to be read as a lesson.

    tokens -> embedding -> L x [ x + attention(norm(x));  x + feed_forward(norm(x)) ] -> norm -> head -> logits

Pre-norm with RMSNorm (Zhang and Sennrich 2019), rotary position embedding (Su et al. 2021), SwiGLU (Shazeer 2020),
an output head of its own and no biases: the shape of the Llama family. Heads of queries may share keys and values
(grouped-query attention, Ainslie et al. 2023), and the head may be the embedding's weight (Press and Wolf 2017).

Shape legend: B batch, S sequence, M d_model, F d_ff, H heads, D head_dim, V vocabulary.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.core.model_config import ModelConfig
from stepscope.training.attention import AttentionFunction
from stepscope.training.attention.written_out import reference
from stepscope.training.parts import REFERENCE_PARTS, Parts

ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-5


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight, computed in fp32: in fp16 the square of 256 already overflows.

    A fused norm also takes the branch that is added to x before, and then gives the sum too.
    """

    def __init__(self, d_model: int, device: torch.device | None = None, parts: Parts = REFERENCE_PARTS) -> None:
        super().__init__()
        self.fused = parts.norm
        self.weight = nn.Parameter(torch.empty(d_model, device=device))

    def forward(self, x_BSM: Tensor, branch_BSM: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if self.fused is not None:
            summed_and_normal = self.fused(x_BSM, branch_BSM, self.weight, NORM_EPSILON)
            return summed_and_normal[1] if branch_BSM is None else summed_and_normal
        x = x_BSM.float()
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + NORM_EPSILON)
        return (x * self.weight).to(x_BSM.dtype)


class RotaryEmbedding(nn.Module):
    """Rotates each pair (x[i], x[i + D/2]) by position * base^(-2i/D), so that q.k depends on distance alone.

    These are halves, as in GPT-NeoX and Hugging Face's Llama. Others rotate neighbours, (x[2i], x[2i + 1]): the paper,
    GPT-J, Meta's Llama, CS336. Speed and memory are the same, weights are not: `to_rotated_halves` brings theirs here.
    """

    cos_SD: Tensor
    sin_SD: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.head_dim, self.max_seq_len = head_dim, max_seq_len
        for name in ("cos_SD", "sin_SD"):
            self.register_buffer(name, torch.empty(max_seq_len, head_dim, device=device), persistent=False)

    def initialise(self) -> None:
        device = self.cos_SD.device
        exponents = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim
        angles = torch.arange(self.max_seq_len, device=device)[:, None] * ROPE_BASE**-exponents
        angles_SD = torch.cat([angles, angles], dim=-1)
        self.cos_SD.copy_(angles_SD.cos())
        self.sin_SD.copy_(angles_SD.sin())

    def forward(self, x_BHSD: Tensor) -> Tensor:
        seq_len = x_BHSD.shape[-2]
        first, second = x_BHSD.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        cos, sin = self.cos_SD[:seq_len].to(x_BHSD.dtype), self.sin_SD[:seq_len].to(x_BHSD.dtype)
        return x_BHSD * cos + turned * sin


def to_rotated_halves(weight_MM: Tensor, heads: int) -> Tensor:
    """A query or key projection's weight, made for rotated neighbours, reordered for the RotaryEmbedding of this file.

    Within each head, output 2i becomes output i, and 2i + 1 becomes i + D/2. With queries and keys in the same order,
    q.k and all that follows is the same; values and output need no change.
    """
    return weight_MM.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def to_rotated_neighbours(weight_MM: Tensor, heads: int) -> Tensor:
    """A query or key projection's weight, made for this file's RotaryEmbedding, reordered for rotated neighbours."""
    return weight_MM.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


class CausalSelfAttention(nn.Module):
    """Multi-head attention of every position to itself and those before it, all of them or those in a window."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryEmbedding,
        attention: AttentionFunction,
        device: torch.device | None = None,
        parts: Parts = REFERENCE_PARTS,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.window = config.window
        self.rotary = rotary
        # Only attentions that have a softcap or sinks take the argument.
        of_scores: dict[str, Any] = {} if config.softcap is None else {"softcap": config.softcap}
        self.attention: AttentionFunction = partial(attention, **of_scores) if of_scores else attention
        self.sinks = nn.Parameter(torch.empty(config.heads, device=device)) if config.sinks else None
        self.fused_rotary, self.joint = parts.rope, parts.projections
        self.query = nn.Linear(config.d_model, config.d_model, bias=False, device=device)
        self.key = nn.Linear(config.d_model, config.key_width, bias=False, device=device)
        self.value = nn.Linear(config.d_model, config.key_width, bias=False, device=device)
        self.output = nn.Linear(config.d_model, config.d_model, bias=False, device=device)

    def forward(self, x_BSM: Tensor) -> Tensor:
        if self.joint is not None:
            weights = (self.query.weight, self.key.weight, self.value.weight)
            q_BHSD, k_BHSD, v_BHSD = map(self._split_heads, self.joint(x_BSM, weights))
            q_BHSD, k_BHSD = self._rotated(q_BHSD, k_BHSD)
        elif self.fused_rotary is None:
            # Each is turned before the next is made: its own heads are then not kept beside the others.
            q_BHSD = self.rotary(self._split_heads(self.query(x_BSM)))
            k_BHSD = self.rotary(self._split_heads(self.key(x_BSM)))
            v_BHSD = self._split_heads(self.value(x_BSM))
        else:
            q_BHSD, k_BHSD = self._rotated(self._split_heads(self.query(x_BSM)), self._split_heads(self.key(x_BSM)))
            v_BHSD = self._split_heads(self.value(x_BSM))
        sinks: dict[str, Any] = {} if self.sinks is None else {"sinks": self.sinks.float()}
        out_BHSD = self.attention(q_BHSD, k_BHSD, v_BHSD, causal=True, window=self.window, **sinks)
        return self.output(out_BHSD.transpose(1, 2).flatten(-2))

    def _rotated(self, q_BHSD: Tensor, k_BHSD: Tensor) -> tuple[Tensor, Tensor]:
        if self.fused_rotary is None:
            return self.rotary(q_BHSD), self.rotary(k_BHSD)
        return self.fused_rotary(q_BHSD, k_BHSD, self.rotary.cos_SD, self.rotary.sin_SD)

    def _split_heads(self, x_BSM: Tensor) -> Tensor:
        return x_BSM.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """The feed-forward of a block: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None, parts: Parts = REFERENCE_PARTS) -> None:
        super().__init__()
        self.fused, self.joint = parts.mlp, parts.projections
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=False, device=device)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=False, device=device)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False, device=device)

    def forward(self, x_BSM: Tensor) -> Tensor:
        if self.joint is not None:
            gate, up = self.joint(x_BSM, (self.gate.weight, self.up.weight))
            return self.down(F.silu(gate) * up if self.fused is None else self.fused(gate, up))
        if self.fused is not None:
            return self.down(self.fused(self.gate(x_BSM), self.up(x_BSM)))
        return self.down(F.silu(self.gate(x_BSM)) * self.up(x_BSM))


class Block(nn.Module):
    """Attention and feed-forward, each on a normalised copy, each added back to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryEmbedding,
        attention: AttentionFunction,
        device: torch.device | None = None,
        parts: Parts = REFERENCE_PARTS,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, device, parts)
        self.attention = CausalSelfAttention(config, rotary, attention, device, parts)
        self.feed_forward_norm = RMSNorm(config.d_model, device, parts)
        self.feed_forward = SwiGLU(config, device, parts)

    def projections(self) -> tuple[tuple[Tensor, ...], ...]:
        """The weights of projections that have one input, input by input."""
        attention, feed_forward = self.attention, self.feed_forward
        return (
            (attention.query.weight, attention.key.weight, attention.value.weight),
            (feed_forward.gate.weight, feed_forward.up.weight),
        )

    def forward(self, x_BSM: Tensor) -> Tensor:
        if self.feed_forward_norm.fused is not None:
            x_BSM, normal_BSM = self.feed_forward_norm(x_BSM, self.attention(self.attention_norm(x_BSM)))
            return x_BSM + self.feed_forward(normal_BSM)
        x_BSM = x_BSM + self.attention(self.attention_norm(x_BSM))
        return x_BSM + self.feed_forward(self.feed_forward_norm(x_BSM))


class BlockRunner(Protocol):
    """Runs blocks one after another, (B, S, M) to (B, S, M), and decides what they keep for backward."""

    def __call__(self, blocks: Iterable[nn.Module], x_BSM: Tensor) -> Tensor: ...


def keep_all(blocks: Iterable[nn.Module], x_BSM: Tensor) -> Tensor:
    """Run the blocks; autograd keeps whatever backward needs."""
    for block in blocks:
        x_BSM = block(x_BSM)
    return x_BSM


class Transformer(nn.Module):
    """Token ids (B, S) to logits (B, S, V).

    Made on `device` ("meta" makes shapes without memory); `initialise` fills parameters and buffers. `run_blocks`
    decides what the blocks keep for backward. `parts` compute the same as the code of this file, in fewer passes.
    """

    def __init__(
        self, config: ModelConfig, *, max_seq_len: int, attention: AttentionFunction = reference,
        run_blocks: BlockRunner = keep_all, device: torch.device | str | None = None,
        parts: Parts = REFERENCE_PARTS,
    ) -> None:  # fmt: skip
        super().__init__()
        device = torch.device(device) if device is not None else None
        self.config, self.run_blocks, self.fused_loss = config, run_blocks, parts.loss
        self.embedding = nn.Embedding(config.vocabulary, config.d_model, device=device)
        self.rotary = RotaryEmbedding(config.head_dim, max_seq_len, device)
        self.blocks = nn.ModuleList(Block(config, self.rotary, attention, device, parts) for _ in range(config.layers))
        self.norm = RMSNorm(config.d_model, device, parts)
        # A tied head's own weight is replaced below, so it needs no memory.
        of_head = torch.device("meta") if config.tied else device
        self.head = nn.Linear(config.d_model, config.vocabulary, bias=False, device=of_head)
        if config.tied:
            self.head.weight = self.embedding.weight

    def projections(self) -> list[tuple[Tensor, ...]]:
        """The weights of projections that have one input, of every block."""
        return [weights for block in self.blocks if isinstance(block, Block) for weights in block.projections()]

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """The logits; with targets, the mean loss of `fused_loss`, which makes no logits of the whole batch."""
        # The embedding's output gets no name: a name would keep it alive beside the blocks where no graph needs it.
        x_BSM = self.run_blocks(self.blocks, self.embedding(tokens_BS))
        if targets_BS is None:
            return self.head(self.norm(x_BSM))
        assert self.fused_loss is not None
        return self.fused_loss(self.norm(x_BSM), self.head.weight, targets_BS)

    @torch.no_grad()
    def initialise(self) -> None:
        """Normal weights with variance 2 / (fan_in + fan_out), cut at 3 deviations (Glorot and Bengio 2010).

        A tied head comes after the embedding, and the weight has the deviation of a head.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                deviation = (2 / (module.in_features + module.out_features)) ** 0.5
                nn.init.trunc_normal_(module.weight, std=deviation, a=-3 * deviation, b=3 * deviation)
            elif isinstance(module, nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=1.0, a=-3.0, b=3.0)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, CausalSelfAttention) and module.sinks is not None:
                nn.init.zeros_(module.sinks)
            elif isinstance(module, RotaryEmbedding):
                module.initialise()
