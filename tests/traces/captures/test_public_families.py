"""Families on captures that others published: what is left without one, and communication that is seen as such."""

import polars as pl
import pytest

from stepscope.traces.captures.attribution import Attribution, attribute
from stepscope.traces.captures.checks import accelerator_unread, products_by_unit
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.occupation import device_names, overlap, used_devices
from stepscope.traces.captures.summary import TraceSummary
from stepscope.traces.roofline import roofline
from tests.public import public_capture

CAPTURES = (
    "hta_a100_nccl_training.json.gz", "hta_mi250_training.json.gz", "hta_mtia_inference.json.gz",
    "hta_sampled_rank-0.json.gz", "hta_sampled_rank-1.json.gz", "hta_v100_ddp_training.json.gz",
    "nsys_ai_h100_2gpu_1s.sqlite.gz",
    "tracelens_b200_inference.json.gz", "tracelens_experts.json.gz", "tracelens_h100_qwen.json.gz",
    "tracelens_mi300_ddp_resnet18.json.gz", "tracelens_mi300_sglang_qwen3.json.gz", "tracelens_normalization.json.gz",
    "tracelens_torch_compile.json.gz", "tracelens_vllm_graph_execution.json.gz",
)  # fmt: skip


def _shares(attribution: Attribution) -> dict[str, float]:
    kernels = attribution.kernels
    totals = kernels.group_by(pl.col("family").cast(pl.String)).agg(pl.col("duration_ns").sum())
    return {family: busy_ns / kernels["duration_ns"].sum() for family, busy_ns in totals.iter_rows()}


@pytest.mark.parametrize("name", CAPTURES)
def test_hardly_any_kernel_time_is_without_a_family(name: str):
    assert _shares(attribute(read_trace(public_capture(name)))).get("other", 0.0) <= 0.05


def test_an_all_reduce_through_multicast_memory_is_communication():
    """73 all-reduces of 2.12 ms, hardly hidden: as reductions they would be computation that hides an all-gather."""
    attribution = attribute(read_trace(public_capture("tracelens_b200_inference.json.gz")))
    (found,) = overlap(attribution)
    kernels = attribution.kernels.filter(pl.col("name").cast(pl.String).str.contains("multimem_all_reduce"))
    assert kernels.height == 73
    assert found.communication_ns >= int(kernels["duration_ns"].sum()) > 2_000_000
    assert found.exposed_ns > 0.9 * found.communication_ns


def test_a_residual_network_is_made_of_convolutions():
    shares = _shares(attribute(read_trace(public_capture("tracelens_mi300_ddp_resnet18.json.gz"))))
    assert shares["convolution"] > 0.25
    # Layouts that are changed for them are copies: channels-last data would not need them.
    assert 0.1 < shares["copy/cast"] < 0.2


def test_the_flops_of_a_residual_network_are_those_of_its_paper():
    """1.8 billion multiply-adds a picture (He et al. 2015, table 1), three times over in training but for the first
    layer's input; 512 pictures a step, five steps."""
    found = roofline(attribute(read_trace(public_capture("tracelens_mi300_ddp_resnet18.json.gz"))))
    (family,) = [each for each in found.families if each.family == "convolution"]
    assert family.coverage == 1
    first = 2 * 512 * 112 * 112 * 64 * 3 * 7 * 7
    assert family.flops / 5 == pytest.approx(3 * 2 * 1.8e9 * 512 - first, rel=0.02)


@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("hta_v100_ddp_training.json.gz", {0: "Tesla V100-SXM2-32GB"}),  # of eight that are listed
        ("tracelens_mi300_ddp_resnet18.json.gz", {2: "AMD Instinct MI300X"}),
        ("tracelens_mi300_sglang_qwen3.json.gz", {9: "AMD Instinct MI300X"}),  # listed as device 0 alone
        ("tracelens_vllm_graph_execution.json.gz", {2: ""}),
        ("hta_mtia_inference.json.gz", {}),
    ],
)
def test_the_devices_that_ran_something_are_named(name: str, used: dict[int, str]):
    assert used_devices(attribute(read_trace(public_capture(name)))) == used


def test_the_peaks_are_those_of_the_device_that_ran():
    attribution = attribute(read_trace(public_capture("tracelens_b200_inference.json.gz")))
    assert device_names(attribution) == ("NVIDIA B200",)
    assert roofline(attribution).peaks.flops_per_s["bf16"].rate == 2.25e15


def test_volta_is_told_of_no_arithmetic_that_it_lacks():
    attribution = attribute(read_trace(public_capture("hta_v100_ddp_training.json.gz")))
    found = products_by_unit(TraceSummary(attribution=attribution, run=None))
    assert found is not None and found.kind == "products-on-cuda-cores"
    assert found.remedy.startswith("fp16 autocast with a GradScaler: Tesla V100")


def test_an_accelerator_that_is_no_gpu_is_said_to_be_one():
    attribution = attribute(read_trace(public_capture("hta_mtia_inference.json.gz")))
    found = accelerator_unread(TraceSummary(attribution=attribution, run=None))
    assert found is not None and "MTIA: ARTEMIS (17)" in found.sentence
    assert found.evidence == {"mtia_ccp_events": 1313, "mtia_runtime": 823}
