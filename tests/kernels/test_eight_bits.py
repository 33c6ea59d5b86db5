"""Casts to 8 bits: the bits of PyTorch's operators, in both layouts, in Triton's interpreter and on a GPU.

The interpreter cannot round to 8 bits, so there PyTorch rounds the kernel's quotients (kernels/eight_bits.py); that a
GPU rounds by its own instruction is read from what the kernel is compiled to.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from stepscope.core.errors import InputError
from stepscope.kernels.eight_bits import DTYPES, SMALLEST, cast_layouts, scale_of

E4M3, E5M2 = DTYPES
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="not interpreted")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """By PyTorch's operators: x in 8 bits, and its scale."""
    end = torch.finfo(dtype).max
    scale = (x.abs().amax().float() * (1 / end)).clamp(min=SMALLEST)
    return x.float().div(scale).clamp(-end, end).to(dtype), scale


def same(made: Tensor, expected: Tensor) -> bool:
    """Whether they have the same bits, but for the signs of what is no number."""
    none = expected.float().isnan()
    alike = made.contiguous().view(torch.uint8) == expected.contiguous().view(torch.uint8)
    return made.shape == expected.shape and bool((alike | (none & made.float().isnan())).all())


def check(x: Tensor, dtype: torch.dtype) -> None:
    scale = scale_of(x, torch.finfo(dtype).max)
    along, across = cast_layouts(x, scale, dtype, across=True)
    expected, expected_scale = reference(x, dtype)
    assert torch.equal(scale, expected_scale) or (scale.isnan() and expected_scale.isnan())
    assert along.is_contiguous() and across.is_contiguous() and along.dtype == across.dtype == dtype
    assert same(along, expected) and same(across, expected.t())


def poisoned(x: Tensor) -> Tensor:
    """x in memory that is infinite around it; and memory of a result's size is filled and let go."""
    around = torch.full((x.numel() + 64,), math.inf, dtype=x.dtype, device=x.device)
    inside = around[32 : 32 + x.numel()].view(x.shape)
    inside.copy_(x)
    spoiled = [torch.full_like(x, math.nan, dtype=wide) for wide in (torch.float32, *DTYPES) for _ in range(2)]
    del spoiled
    return inside


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 16), (1, 1), (3, 200), (129, 65), (257, 48), (80, 4112)])
def test_both_layouts_have_the_bits_of_pytorch_s_cast(shape: tuple[int, int], dtype: torch.dtype, device: str):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, torch.bfloat16)
    check(poisoned(x), dtype)


@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(0, 99), st.integers(-120, 120), st.sampled_from(DTYPES)
)  # fmt: skip
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="not interpreted")
def test_whatever_the_shape_and_the_magnitude(rows: int, columns: int, seed: int, power: int, dtype: torch.dtype):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    check((x * 2.0**power).to(torch.bfloat16), dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_bf16(dtype: torch.dtype, device: str):
    """Beside one of each magnitude, so that all of an 8-bit format's numbers, ties and least ones come up."""
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16).reshape(256, 256)
    numbers = torch.where(numbers.isfinite(), numbers, 0)
    for largest in (2.0**-10, 1.0, 448.0, 3e38):
        check(numbers.clamp(-largest, largest).to(device), dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_by_hand(device: str):
    x = torch.tensor([[1.0, -2.0, 0.0], [448.0, 0.0001, 17.0]], dtype=torch.bfloat16, device=device)
    scale = scale_of(x, 448.0)
    along, across = cast_layouts(x, scale, E4M3, across=True)
    assert float(scale) == 1
    assert along.float().tolist() == [[1, -2, 0], [448, 0, 16]], "17 is a tie between 16 and 18: to the even one"
    assert across.float().tolist() == [[1, 448], [-2, 0], [0, 16]]
    only = cast_layouts(x, scale, E4M3, along=False, across=True)
    assert only[0].shape == (0,) and same(only[1], across)
    assert same(cast_layouts(x, scale, E4M3)[0], along)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [0.0, math.inf, -math.inf, math.nan])
def test_zeros_and_what_is_not_finite(broken: float, dtype: torch.dtype, device: str):
    x = torch.zeros(33, 17, dtype=torch.bfloat16, device=device)
    x[5, 3] = broken
    check(x, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_a_transposed_input_and_a_second_call(device: str):
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16).t()
    check(x, E5M2)
    scale = scale_of(x, 448.0)
    assert torch.equal(scale, scale_of(x, 448.0))
    once, twice = (cast_layouts(x, scale, E4M3, across=True) for _ in range(2))
    assert all(same(a, b) for a, b in zip(once, twice, strict=True))


def test_what_it_does_not_take_is_refused_in_one_line():
    with pytest.raises(InputError, match="a cast to 8 bits takes bf16, not float32"):
        scale_of(torch.ones(2, 2), 448.0)
    with pytest.raises(InputError, match="takes bf16 "):
        cast_layouts(torch.ones(2, 2, 2, dtype=torch.bfloat16), torch.ones(()), E4M3)


def test_a_gpu_divides_and_rounds_as_ieee_754_has_it():
    """Two numbers by one instruction that rounds to even; reads and writes of 16 bytes, in both layouts."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    script = Path(__file__).with_name("compile_eight_bits.py")
    output = subprocess.run(
        [sys.executable, str(script)], check=True, env=environment, timeout=300, capture_output=True, text=True
    )
    made = json.loads(output.stdout)
    for dtype, rounds in (("fp8e4nv", "cvt.rn.satfinite.e4m3x2.f32"), ("fp8e5", "cvt.rn.satfinite.e5m2x2.f32")):
        assert made[dtype][rounds] == 16 and made[dtype]["div.rn.f32"] == 32
        assert made[dtype]["ld.global.v4.b32"] == 4 and made[dtype]["st.global.v4.b32"] == 4
