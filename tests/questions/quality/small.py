"""A training small enough to be repeated: its size, its text, and what comes of it."""

from typing import Any

import torch

from stepscope.core.model_config import ModelConfig
from stepscope.questions.quality_training import (
    BLOCK_VARIANTS,
    VARIANTS,
    BundledText,
    Trained,
    TrainingSize,
    train,
)

CPU = torch.device("cpu")
SMALL = TrainingSize(
    model=ModelConfig(name="small", d_model=16, d_ff=32, layers=1, heads=2, vocabulary=256),
    batch_size=2, seq_len=16, steps=20, learning_rate=1e-2,
)  # fmt: skip
WORDS = BundledText(train=b"the quick brown fox jumps over the lazy dog. " * 40, held_out=b"a lazy dog, a fox. " * 20)


def trained(name: str, size: TrainingSize = SMALL, **options: Any) -> Trained:
    return train((VARIANTS | BLOCK_VARIANTS)[name], size, WORDS, device=CPU, seed=0, **options)
