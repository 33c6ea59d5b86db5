"""What autocast does with each operator, as it was seen; and casts, as they are counted."""

import pytest
import torch
from torch import nn

from stepscope.questions.autocast import (
    OPERATORS,
    REFUSED,
    TREATMENTS,
    Casts,
    Observed,
    autocast_region,
    observe_cuda_rules,
    observe_operators,
)
from stepscope.recording.as_on_cuda import AsOnCuda

TORCH_RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])


@pytest.fixture(scope="module")
def cuda_rules() -> dict[str, Observed]:
    return observe_cuda_rules(torch.float16)


def test_rules_of_cuda_without_a_gpu(cuda_rules: dict[str, Observed]):
    """As PyTorch documents them (Automatic Mixed Precision, "CUDA Op-Specific Behavior")."""
    by = {
        treatment: {name for name, observed in cuda_rules.items() if observed.treatment == treatment}
        for treatment in TREATMENTS
    }
    assert by["sent down"] == {
        "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "einsum", "conv1d", "conv2d", "conv_transpose2d",
        "scaled_dot_product_attention", "prelu",
    }  # fmt: skip
    assert by["kept up"] >= {
        "layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss", "mse_loss", "l1_loss",
        "exp", "log", "pow", "rsqrt", "reciprocal", "softplus", "sum", "prod", "cumsum",
        "binary_cross_entropy_with_logits",
    }  # fmt: skip
    assert by["promotes"] - {"grid_sample"} == {
        "addcmul", "atan2", "cross", "dot", "tensordot", "scatter_add", "index_put", "bilinear",
    }  # fmt: skip
    # PyTorch 2.13 runs no grid_sample on fake tensors, so its rule cannot be seen without a GPU; 2.11 does.
    seen = cuda_rules["grid_sample"].treatment
    assert seen == "promotes" or (seen is None and TORCH_RELEASE > (2, 11))
    assert by["as its inputs"] >= {"relu", "gelu", "silu", "add", "mul", "mean", "amax", "batch_norm"}
    assert by["refuses"] == {"binary_cross_entropy"}


def test_rules_of_cuda_are_those_that_fake_memory_goes_by(cuda_rules: dict[str, Observed]):
    """Two ways to the same: autocast itself on tensors that hold nothing, and our imitation of it on a CPU."""
    compared = []
    for op in OPERATORS:
        if cuda_rules[op.name].treatment != "kept up" or op.name == "vector_norm":  # no transformer of ours asks for it
            continue
        low = [torch.full(shape, 0.5, dtype=torch.bfloat16) for shape in op.shapes]
        with autocast_region("cpu", torch.bfloat16), AsOnCuda(lambda query: "math"):
            compared.append((op.name, op.run(*low).dtype))
    assert len(compared) > 15
    assert {dtype for _, dtype in compared} == {torch.float32}, compared


@pytest.mark.gpu
def test_rules_seen_on_a_gpu_are_those_seen_without(cuda_rules: dict[str, Observed]):
    there = observe_operators(torch.device("cuda", 0), torch.float16)
    assert {name: there[name].treatment for name, o in cuda_rules.items() if o.treatment} == {
        name: o.treatment for name, o in cuda_rules.items() if o.treatment
    }


def test_treatment_from_dtypes():
    assert Observed(of_fp32="bf16", of_low="bf16").treatment == "sent down"
    assert Observed(of_fp32="fp32", of_low="fp32").treatment == "kept up"
    assert Observed(of_fp32="fp32", of_low="bf16").treatment == "as its inputs"
    assert Observed(of_fp32=REFUSED, of_low=REFUSED).treatment == "refuses"
    assert Observed().treatment is None
    both = {"of_fp32": "fp32", "of_low": "bf16", "of_both": "fp32", "of_both_without": "fp32"}
    assert Observed(**both, casts_of_both=1).treatment == "promotes"
    assert Observed(**both, casts_of_both=0).treatment == "as its inputs"  # PyTorch's own promotion


def test_observing_leaves_autocast_as_it_was():
    before = torch.get_autocast_dtype("cuda")
    observe_cuda_rules(torch.bfloat16)
    assert not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cuda") == before


def test_casts_are_counted_by_parameter():
    weight, other = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    with Casts([("weight", weight)]) as counted:
        for tensor, dtypes in (
            (weight, (torch.bfloat16, torch.float16)),
            (other, (torch.float16, torch.float64, torch.int64, torch.float32)),
        ):
            for dtype in dtypes:
                tensor.to(dtype)
    assert counted.of_named == {"weight": 2}
    assert (counted.others, counted.bytes_of_named) == (2, 16)  # to an integer, or to what it is, is no such cast
