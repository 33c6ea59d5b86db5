"""A Workload: everything that makes two measurements the same experiment. The device is not part of it."""

import hashlib
from typing import Literal, get_args

import msgspec

from stepscope.core.errors import InputError, choose
from stepscope.core.model_config import LARGEST, ModelConfig, whole_number

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "bf16-pure"]
"""fp32: true fp32 everywhere. tf32: fp32 storage, products on TF32 Tensor Cores. bf16, fp16: autocast over
fp32 parameters (fp16 with gradient scaling). bf16-pure: parameters, gradients and optimizer state in bf16."""

Phase = Literal["forward", "forward-backward", "train"]
"""forward: inference under no_grad, logits only. forward-backward: loss and gradients. train: and the optimizer."""

Attention = Literal["reference", "sdpa", "sdpa-math", "sdpa-efficient", "sdpa-flash", "sdpa-cudnn"]
"""reference: written out. sdpa: PyTorch chooses the backend (the run names it). sdpa-*: that backend or an error."""

Compile = Literal["eager", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
"""eager, or a mode of torch.compile."""

Optimizer = Literal["adamw-foreach", "adamw-fused", "adamw-loop"]

DTYPES: tuple[str, ...] = get_args(Dtype)
PHASES: tuple[str, ...] = get_args(Phase)
ATTENTIONS: tuple[str, ...] = get_args(Attention)
COMPILES: tuple[str, ...] = get_args(Compile)
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One experiment. Equal Workloads are the same experiment, and only those share a key."""

    model: ModelConfig
    batch_size: int = 4
    seq_len: int = 512
    dtype: Dtype = "fp32"
    phase: Phase = "train"
    attention: Attention = "reference"
    compile: Compile = "eager"
    optimizer: Optimizer | None = "adamw-foreach"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, ModelConfig):
            raise InputError(f"the workload's model is {self.model!r}: give a ModelConfig, as from configure('small')")
        whole_number(self.batch_size, "batch_size", 1, LARGEST)
        whole_number(self.seq_len, "seq_len", 1, LARGEST)
        whole_number(self.seed, "seed", 0, LARGEST)
        whole_number(self.tokens, "batch_size x seq_len", 1, LARGEST)
        choose(self.dtype, DTYPES, "dtype")
        choose(self.phase, PHASES, "phase")
        choose(self.attention, ATTENTIONS, "attention")
        choose(self.compile, COMPILES, "compile mode")
        if self.optimizer is not None or self.phase == "train":
            choose(str(self.optimizer), OPTIMIZERS, "optimizer")
        if self.phase != "train":
            # Without an optimizer step the choice of optimizer changes nothing, so it must not split cells.
            msgspec.structs.force_setattr(self, "optimizer", None)

    @property
    def key(self) -> str:
        """A readable name of the cell, safe in file names, that ends in a digest of every field."""
        parts = [self.model.name, f"b{self.batch_size}", f"s{self.seq_len}", self.dtype, self.phase]
        parts += [self.attention] if self.attention != "reference" else []
        parts += [f"compile-{self.compile}"] if self.compile != "eager" else []
        parts += [self.optimizer] if self.optimizer not in (None, "adamw-foreach") else []
        digest = hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:8]
        return "-".join([*parts, digest])

    @property
    def tokens(self) -> int:
        """Tokens in one step."""
        return self.batch_size * self.seq_len

    def at_most(self, other: "Workload") -> bool:
        """Whether this cell needs no more memory than `other`: no size larger, everything else the same."""
        sizes = (*self.model.sizes.values(), self.batch_size, self.seq_len)
        others = (*other.model.sizes.values(), other.batch_size, other.seq_len)
        return self._sort() == other._sort() and all(a <= b for a, b in zip(sizes, others, strict=True))

    def _sort(self) -> tuple[str | None, ...]:
        return (self.dtype, self.phase, self.attention, self.compile, self.optimizer)
