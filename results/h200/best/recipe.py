"""The fastest step that the options give today: fused kernels wherever PyTorch has them."""

from stepscope.core.model_config import configure
from stepscope.core.workloads import TextbookWorkload


def sweep() -> list[TextbookWorkload]:
    """bf16 autocast, cuDNN's or flash attention, torch.compile, fused AdamW; CUDA graphs for the launch-bound one."""
    choices = {"seq_len": 512, "dtype": "bf16", "attention": "sdpa", "optimizer": "adamw-fused"}
    return [
        TextbookWorkload(model=configure("small"), compile="default", **choices),
        TextbookWorkload(model=configure("small"), compile="reduce-overhead", **choices),
        TextbookWorkload(model=configure("large"), compile="default", **choices),
        TextbookWorkload(model=configure("2.7B"), compile="default", **choices),
    ]
