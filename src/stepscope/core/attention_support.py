"""What each implementation of attention runs on. Known without torch: a prediction refuses what a run would."""

import msgspec

from stepscope.core.errors import InputError, choose
from stepscope.core.workload import ATTENTIONS, Attention, Dtype

_ALL: tuple[Dtype, ...] = ("fp32", "tf32", "bf16", "fp16", "bf16-pure")
_HALF: tuple[Dtype, ...] = ("bf16", "fp16", "bf16-pure")


class AttentionSupport(msgspec.Struct, frozen=True, kw_only=True):
    """Where an implementation runs."""

    device_types: tuple[str, ...] = ("cpu", "cuda")
    cuda_dtypes: tuple[Dtype, ...] = _ALL
    max_head_dim: int | None = None

    def fault(self, device_type: str, dtype: Dtype, head_dim: int) -> str | None:
        """Why it does not run so, to follow its name; None where it does."""
        if device_type not in self.device_types:
            return f"does not run on {device_type}"
        if device_type == "cuda" and dtype not in self.cuda_dtypes:
            return f"does not run in {dtype} (it takes {', '.join(self.cuda_dtypes)})"
        if self.max_head_dim is not None and head_dim > self.max_head_dim:
            return f"takes head_dim up to {self.max_head_dim}, not {head_dim}"
        return None


SUPPORT: dict[Attention, AttentionSupport] = {
    "reference": AttentionSupport(),
    "sdpa": AttentionSupport(),
    "sdpa-math": AttentionSupport(),
    "sdpa-efficient": AttentionSupport(device_types=("cuda",)),
    "sdpa-flash": AttentionSupport(cuda_dtypes=_HALF, max_head_dim=256),
    "sdpa-cudnn": AttentionSupport(device_types=("cuda",), cuda_dtypes=_HALF, max_head_dim=256),
}


def check_attention(name: Attention, *, device_type: str, dtype: Dtype, head_dim: int) -> None:
    """Raise an InputError that says what the implementation lacks, and which ones would work."""
    choose(name, ATTENTIONS, "attention")
    fault = SUPPORT[name].fault(device_type, dtype, head_dim)
    if fault is not None:
        others = [n for n, other in SUPPORT.items() if other.fault(device_type, dtype, head_dim) is None]
        raise InputError(f"attention {name} {fault}: choose one of {', '.join(others)}")
