"""Setting the precision of fp32 matrix products, and checking by experiment what was set."""

import contextlib
from collections.abc import Iterator

import torch

from stepscope.core.workload import Dtype

PROBE_SIZE = 512


@contextlib.contextmanager
def matmul_precision(dtype: Dtype) -> Iterator[None]:
    """Inside, fp32 products are true fp32, or TF32 for dtype `tf32`; the process's setting comes back after."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def probe_relative_error(device: torch.device) -> float:
    """||AB - ref|| / ||ref|| of one fp32 product on `device` as things are set now, against float64.

    True fp32 lands near 2e-7, TF32 (10 mantissa bits) near 3e-4: three decades apart, so the verdict is sure.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(PROBE_SIZE, PROBE_SIZE, generator=generator).to(device) for _ in range(2))
    reference = a.double().cpu() @ b.double().cpu()
    error = (a @ b).double().cpu() - reference
    return float(error.norm() / reference.norm())
