"""The datasheet: its figures are of one kind, and a device is found by the name that a driver or a trace gives."""

import json
from pathlib import Path

import pytest

from stepscope.core.device_spec import DATASHEET, DeviceSpec, find_device_spec, lacks
from stepscope.core.units import GIB

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("spec", DATASHEET.values(), ids=lambda spec: spec.name)
def test_figures_are_dense_and_in_the_order_of_their_widths(spec: DeviceSpec):
    """A sparse figure among dense ones would be twice what the others lead to."""
    rates = spec.peak_flops_per_s
    assert spec.source and spec.peak_bytes_per_s and spec.memory_bytes
    assert rates["fp16"] > rates["fp32"]
    assert rates.get("bf16", rates["fp16"]) == rates["fp16"]
    if "tf32" in rates:
        assert rates["fp16"] / rates["tf32"] == pytest.approx(2, rel=0.03)
    if "fp8" in rates:
        assert rates["fp8"] / rates["fp16"] == pytest.approx(2, rel=0.03)
    assert 30e9 < rates["fp16"] / spec.peak_bytes_per_s * 1e9 < 500e9  # FLOP a byte


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", "NVIDIA H200"), ("A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
        ("AMD Instinct MI300X VF", "AMD Instinct MI300X"), ("NVIDIA B200", "NVIDIA B200"),
    ],
)  # fmt: skip
def test_a_device_is_found_by_the_names_it_is_given(name: str, found: str):
    spec = find_device_spec(name)
    assert spec is not None and spec.name == found


@pytest.mark.parametrize("name", ["NVIDIA A100-PG509-200", "ARTEMIS", "", "AMD Radeon Graphics"])
def test_an_unknown_device_has_no_figures(name: str):
    assert find_device_spec(name) is None
    assert not lacks(name, "bf16")


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("Tesla V100-SXM2-32GB", {"bf16", "tf32", "fp8"}), ("Tesla T4", {"bf16", "tf32", "fp8"}),
        ("NVIDIA A100-SXM4-80GB", {"fp8"}), ("NVIDIA H100 80GB HBM3", set[str]()),
        ("AMD Instinct MI250X", {"tf32", "fp8"}), ("AMD Instinct MI300X", set[str]()),
    ],
)  # fmt: skip
def test_what_a_chip_lacks(name: str, missing: set[str]):
    assert {dtype for dtype in ("bf16", "fp16", "tf32", "fp8") if lacks(name, dtype)} == missing


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_the_memory_of_a_device_is_what_a_stored_run_on_it_states(name: str):
    folder = {"NVIDIA H200": "h200-x2", "NVIDIA H100 80GB HBM3": "h100-x2"}[name]
    for path in (RESULTS / folder / "parallel").glob("*/run.json"):
        environment = json.loads(path.read_text())["environment"]
        assert (environment["device_name"], environment["memory_bytes"]) == (name, DATASHEET[name].memory_bytes)


@pytest.mark.parametrize(
    ("name", "gib"),
    # Out-of-memory messages of users: an RTX 4090 of 23.64 to 23.68 GiB, and an A30 of 23.53.
    [("NVIDIA GeForce RTX 4090", 23.64), ("NVIDIA A30", 23.53)],
)
def test_a_label_counts_gib_and_the_driver_keeps_a_little(name: str, gib: float):
    memory = DATASHEET[name].memory_bytes
    assert memory is not None and 0.99 * gib * GIB < memory <= gib * GIB
