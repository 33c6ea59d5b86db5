"""A whole training step of a model with each attention: which sizes, and which attentions."""

from stepscope.questions.compared_cells import Sizes

ON_GPU = Sizes(models=("tiny",), dtypes=("bf16",), seq_len=1024, batch_size=4)
ON_CPU = Sizes(models=("tiny",), dtypes=("fp32",), seq_len=64, batch_size=1)


def usual_attentions(device_type: str) -> tuple[str, ...]:
    """The attentions to compare on a `cpu`, or on anything else."""
    return ("reference", "sdpa") if device_type == "cpu" else ("reference", "sdpa-cudnn", "flash")
