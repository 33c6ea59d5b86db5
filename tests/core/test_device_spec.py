"""The datasheet: its figures are of one kind, and a device is found by the name that a driver or a trace gives."""

import json
import re
from pathlib import Path

import pytest

from stepscope.core.device_spec import (
    DATASHEET,
    REPORTED_MIB,
    DeviceSpec,
    device_named,
    find_device_spec,
    is_unified,
    lacks,
)
from stepscope.core.errors import InputError
from stepscope.core.units import MIB

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("spec", DATASHEET.values(), ids=lambda spec: spec.name)
def test_figures_are_dense_and_in_the_order_of_their_widths(spec: DeviceSpec):
    """A sparse figure among dense ones would be twice what the others lead to."""
    rates = spec.peak_flops_per_s
    assert spec.source and spec.memory_bytes
    if not rates:  # of laptops, whose rates depend on their power limit, of Apple's chips, and without tensor cores
        assert "Laptop" in spec.name or is_unified(spec) or "P100" in spec.name
        return
    assert spec.peak_bytes_per_s
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
        ("NVIDIA GeForce RTX 3080", "NVIDIA GeForce RTX 3080"), ("GeForce RTX 3060 Ti", "NVIDIA GeForce RTX 3060 Ti"),
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
        ("NVIDIA GeForce RTX 2080 Ti", {"bf16", "tf32", "fp8"}), ("NVIDIA GeForce RTX 4060 Laptop GPU", set[str]()),
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
    ("name", "mib"),
    # The least that PyTorch stated in logs and out-of-memory messages of users.
    [
        ("NVIDIA GeForce RTX 5090", 32120), ("NVIDIA GeForce RTX 5080", 15840),
        ("NVIDIA GeForce RTX 5060 Ti 16GB", 15841),
        ("NVIDIA GeForce RTX 4090", 24207), ("NVIDIA GeForce RTX 4070 Ti SUPER", 15934),
        ("NVIDIA GeForce RTX 4060 Ti 8GB", 7806), ("NVIDIA GeForce RTX 4060 Laptop GPU", 7806),
        ("NVIDIA GeForce RTX 3090 Ti", 24114), ("NVIDIA GeForce RTX 3060 12GB", 11910), ("NVIDIA L4", 22563),
        ("NVIDIA L40S", 45495), ("NVIDIA RTX 6000 Ada Generation", 48497), ("NVIDIA A30", 24094), ("Tesla T4", 14909),
        ("NVIDIA A100-SXM4-80GB", 81039), ("NVIDIA A100-SXM4-40GB", 40514), ("AMD Radeon RX 7900 XTX", 24560),
    ],
)  # fmt: skip
def test_a_device_has_no_more_memory_than_users_saw(name: str, mib: int):
    memory = DATASHEET[name].memory_bytes
    assert memory is not None and 0.975 * mib * MIB < memory <= mib * MIB


def test_every_card_of_the_table_is_found_by_its_name_and_by_its_short_one():
    """Without maker and family, in small letters: the card itself, or several of one name, which are named."""
    for name in DATASHEET:
        assert device_named(name).name == name
        short = re.sub(r"^(NVIDIA|AMD|Apple|Tesla) (GeForce |Instinct |Radeon )?(RTX |RX )?", "", name).lower()
        try:
            assert device_named(short).name == name
        except InputError as refused:
            assert "several devices" in str(refused) and name in str(refused), short


def test_an_apple_chip_of_several_rates_has_the_rate_of_its_memory():
    rates = {name: spec.peak_bytes_per_s for name, spec in DATASHEET.items() if "M4 Max" in name}
    assert rates["Apple M4 Max 36GB"] == 410e9
    assert rates["Apple M4 Max 128GB"] == 546e9
    plain = find_device_spec("Apple M4 Max")
    assert plain is not None and plain.peak_bytes_per_s is None, "the chip's name does not tell"


@pytest.mark.parametrize(
    ("name", "mib"),
    # What llama.cpp printed as recommendedMaxWorkingSetSize.
    [("Apple M1 16GB", 10922), ("Apple M2 24GB", 16384), ("Apple M3 Max 128GB", 98304)],
)
def test_what_metal_takes_of_a_macs_memory(name: str, mib: int):
    assert (DATASHEET[name].memory_bytes or 0) // MIB == mib


def test_what_nvidia_smi_reports_is_near_the_label():
    for name, mib in REPORTED_MIB.items():
        labels = re.findall(r"(\d+)GB", name)
        assert not labels or "480GB" in name or 0.99 * int(labels[0]) * 1024 < mib <= int(labels[0]) * 1024, name


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("rtx4060-ti 16 gb", "NVIDIA GeForce RTX 4060 Ti 16GB"), ("4060 laptop", "NVIDIA GeForce RTX 4060 Laptop GPU"),
        ("4060", "NVIDIA GeForce RTX 4060"), ("m1 16gb", "Apple M1 16GB"), ("L4", "NVIDIA L4"), ("t4", "Tesla T4"),
        ("H100 SXM", "NVIDIA H100 80GB HBM3"), ("RTX 3080 Laptop GPU 16GB", "NVIDIA GeForce RTX 3080 Laptop GPU 16GB"),
        ("4090 laptop", "NVIDIA GeForce RTX 4090 Laptop GPU"), ("a10", "NVIDIA A10"), ("a10g", "NVIDIA A10G"),
        ("l40s", "NVIDIA L40S"), ("mi300x", "AMD Instinct MI300X"), ("b200", "NVIDIA B200"), ("gb200", "NVIDIA GB200"),
        ("2080 Ti", "NVIDIA GeForce RTX 2080 Ti"), ("rtx5090", "NVIDIA GeForce RTX 5090"), ("h200", "NVIDIA H200"),
        ("3090", "NVIDIA GeForce RTX 3090"), ("rtx 6000 ada", "NVIDIA RTX 6000 Ada Generation"),
        ("m5 max 64 GB", "Apple M5 Max 64GB"), ("RTX-A6000", "NVIDIA RTX A6000"), ("gh200", "NVIDIA GH200 480GB"),
    ],
)  # fmt: skip
def test_devices_are_named_as_people_name_them(name: str, found: str):
    assert device_named(name).name == found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "3080",
            "matches several devices: choose one of NVIDIA GeForce RTX 3080 10GB, NVIDIA GeForce RTX 3080 12GB; or",
        ),
        ("m1", "choose one of Apple M1 8GB, Apple M1 16GB; or say --memory"),
        ("m4 max", "choose one of Apple M4 Max 36GB, Apple M4 Max 48GB, Apple M4 Max 64GB, Apple M4 Max 128GB; or"),
        ("rtx 3060", "choose one of NVIDIA GeForce RTX 3060 12GB, NVIDIA GeForce RTX 3060 8GB; or"),
        ("4060 ti", "choose one of NVIDIA GeForce RTX 4060 Ti 16GB, NVIDIA GeForce RTX 4060 Ti 8GB; or"),
        ("rtx pro 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition, NVIDIA RTX PRO 6000 Blackwell Max-Q"),
        ("a100", "choose one of NVIDIA A100-SXM4-80GB, NVIDIA A100-SXM4-40GB, NVIDIA A100 80GB PCIe, NVIDIA"),
        ("1080 ti", "in no datasheet that stepscope has: choose one of NVIDIA GeForce RTX"),
        ("RTX 4075", "in no datasheet that stepscope has: choose one of NVIDIA GeForce RTX 4070"),
        ("GTX-9999", "choose one of H100, A100-SXM4-80GB, L4, T4, RTX 4090, M4 16GB, MI300X; or say --memory"),
        ("NVIDIA", "more; or say --memory"),
    ],
)
def test_another_name_is_answered_by_those_that_it_may_mean(name: str, words: str):
    with pytest.raises(InputError) as refused:
        device_named(name, otherwise="; or say --memory")
    assert words in str(refused.value) and len(str(refused.value)) < 400
