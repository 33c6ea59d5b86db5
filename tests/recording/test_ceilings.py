"""The measured ceilings: the best of the sizes, at the rate that its own time gives. Real products, few of them."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import torch

from stepscope.core.device_spec import Ceiling, Ceilings
from stepscope.core.files import replace_file
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


@pytest.fixture
def _stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stores ceilings, as a busy machine would have left them so many seconds ago."""
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path))
    monkeypatch.setattr(ceilings, "_MATMUL_SIZES", {"cpu": (LARGE,)})

    def store(rate: float, seconds_ago: float) -> None:
        low = Ceiling(rate=rate, operation="when it was busy", median_s=1.0, samples=5)
        name = ceilings.ceilings_for(CPU, [], keep=True).device_name
        at = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat(timespec="seconds")
        kept = Ceilings(device_name=name, torch_version="any", measured_at=at, matmul={"fp32": low}, copy=low)
        replace_file(ceilings._store_path(name), msgspec.json.encode(kept))

    return store


def test_a_ceiling_below_what_was_reached_is_measured_again(_stored: Callable[..., None]):
    _stored(1000.0, ceilings.AGAIN_S + 1)
    assert ceilings.ceilings_for(CPU, ["fp32"], reached={"fp32": 999.0}).matmul["fp32"].rate == 1000.0
    found = ceilings.ceilings_for(CPU, ["fp32"], reached={"fp32": 1001.0, "copy": 999.0})
    assert found.matmul["fp32"].rate > 1e6 and found.copy is not None and found.copy.rate == 1000.0
    again = ceilings.load_ceilings(CPU)
    assert again is not None and again.matmul["fp32"].rate == found.matmul["fp32"].rate


def test_a_young_ceiling_stands_and_the_higher_of_two_stays(_stored: Callable[..., None]):
    _stored(1000.0, 5)
    assert ceilings.ceilings_for(CPU, ["fp32"], reached={"fp32": 1e9}).matmul["fp32"].rate == 1000.0
    _stored(1e30, ceilings.AGAIN_S + 1)
    found = ceilings.ceilings_for(CPU, ["fp32"], reached={"fp32": 1e31, "copy": 1e31})
    assert found.matmul["fp32"].rate == 1e30 and found.copy is not None and found.copy.rate == 1e30
