"""Each dtype of a workload, with the dtypes that its parameters and its matrix products have."""

import pytest
import torch

BY_DTYPE = pytest.mark.parametrize(
    ("dtype", "parameters", "products"),
    [
        ("fp32", torch.float32, ("float32",)),
        ("bf16", torch.float32, ("bfloat16",)),
        ("fp16", torch.float32, ("float16",)),
        ("bf16-pure", torch.bfloat16, ("bfloat16",)),
    ],
)
