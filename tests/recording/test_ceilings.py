"""The measured ceilings: the best of the sizes, at the rate that its own time gives. Real products, few of them."""

import pytest
import torch

from stepscope.core.run import Settings
from stepscope.recording import ceilings

CPU = torch.device("cpu")
SMALL, LARGE = 8, 256
"""A product of 1,024 FLOPs is all overhead: its rate is some hundred times lower than the large one's."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Settings(warmup_floor=2, warmup_cap=3, steps_floor=9, steps_cap=9, seconds=0)
    monkeypatch.setattr(ceilings, "_TRIAL", few)
    monkeypatch.setattr(ceilings, "_SUSTAINED", {"cpu": few})
    monkeypatch.setattr(ceilings, "_COPY_BYTES", {"cpu": 2**20})


@pytest.mark.parametrize("sizes", [(SMALL, LARGE), (LARGE, SMALL)])
def test_the_ceiling_is_that_of_the_quickest_size(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    """Whichever comes first: the denominator of an honest MFU is the best that the device can do."""
    monkeypatch.setattr(ceilings, "_MATMUL_SIZES", {"cpu": sizes})
    told: list[str] = []
    found = ceilings.measure_ceilings(CPU, ["fp32"], told.append, copy=False).matmul["fp32"]
    assert found.operation == "256 x 256 x 256 fp32"
    assert told[-1] == "matrix product 256 x 256 x 256, fp32, sustained"


def test_the_rates_are_work_over_time_by_hand(monkeypatch: pytest.MonkeyPatch):
    """2 n^3 FLOPs for a product of n x n matrices; of a copy, every byte is read once and written once."""
    monkeypatch.setattr(ceilings, "_MATMUL_SIZES", {"cpu": (LARGE,)})
    found = ceilings.measure_ceilings(CPU, ["fp32", "bf16"])
    for ceiling in found.matmul.values():
        assert ceiling.rate * ceiling.median_s == pytest.approx(2 * LARGE**3)
    assert found.copy is not None and found.copy.operation == "copy of 1 MiB"
    assert found.copy.rate * found.copy.median_s == pytest.approx(2 * 2**20)
