"""Figures derived from a run, by hand."""

import msgspec
import pytest

from stepscope.core.device_spec import DeviceSpec
from stepscope.core.formulas.transformer import phase_work
from stepscope.runs import metrics
from tests.conftest import make_run, workload


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_tokens_per_second_are_those_of_the_whole_step(accumulation: int):
    """Micro-batches divide a step's tokens, they do not make them fewer."""
    run = make_run(workload(batch_size=8, seq_len=32, accumulation=accumulation), step=[0.5] * 5)
    assert metrics.tokens_per_s(run) == 8 * 32 / 0.5


@pytest.mark.parametrize("accumulation", [1, 4])
def test_flops_per_second_are_those_of_the_whole_step(accumulation: int):
    of = workload(batch_size=8, accumulation=accumulation)
    run = make_run(of, step=[0.5] * 5)
    whole = phase_work(workload(batch_size=8))
    assert metrics.model_flops(run) == sum(work.flops for work in whole.values())
    assert metrics.model_flops_per_s(run) == sum(work.flops for work in whole.values()) / 0.5


@pytest.mark.parametrize(("dtype", "peak"), [("fp32", 1e12), ("bf16", 8e12)])
def test_utilisation_is_against_the_peak_of_the_dtype_that_ran(dtype: str, peak: float):
    run = make_run(workload(dtype=dtype), step=[0.5] * 5)
    spec = DeviceSpec(name="a device", source="by hand", peak_flops_per_s={"fp32": 1e12, "bf16": 8e12})
    run = msgspec.structs.replace(run, device_spec=spec)
    assert metrics.mfu_datasheet(run) == (metrics.model_flops(run) or 0) / 0.5 / peak
