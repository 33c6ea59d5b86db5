"""The datasheet figures of known devices."""

import msgspec

from stepscope.core.environment import Environment
from stepscope.core.precisions import PRECISIONS, Dtype
from stepscope.core.units import GIB


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Datasheet figures of one device: dense rates (no sparsity), FLOP/s by matrix-product dtype."""

    name: str
    memory_bytes: int | None = None
    """What PyTorch states as the device's memory, which is less than its label."""
    peak_flops_per_s: dict[str, float]
    peak_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    """What the links to the other devices of its host carry in one direction, all together."""
    source: str

    def peak_for(self, dtype: Dtype) -> float | None:
        """Peak FLOP/s of the matrix products that run under `dtype`."""
        return self.peak_flops_per_s.get(PRECISIONS[dtype].multiplies)


_STATED_BYTES = {
    "NVIDIA H200": 150109880320,  # results/h200
    "NVIDIA H100 80GB HBM3": 85017493504,  # results/h100-x2
    "Tesla T4": int(14.56 * GIB),  # the least in out-of-memory messages of users, as for _STATED_SHARE
    # No stored run says whether the 288 GB of these are GiB: counted in powers of ten, the lower figure.
    "NVIDIA GB300": 288 * 10**9,
    "NVIDIA B300 SXM6 AC": 288 * 10**9,
}
"""Memory of devices as PyTorch stated it, and of those whose label may count in powers of ten."""
_STATED_SHARE = 0.98
"""Share of the labelled GiB that PyTorch states, the rest being the driver's: 0.990 on an H100, 0.991 on an H200
(stored runs), and 0.980 to 0.987 in messages that users of an A30 and of RTX 4090s posted. The least of them."""
_CORRECTED = {"NVIDIA L4", "NVIDIA L40", "NVIDIA L40S", "NVIDIA A10", "NVIDIA A10G", "NVIDIA A40"}
"""Servers' cards with GDDR6, which keep a sixteenth of their memory for error correction, as delivered."""


def _memory_bytes(name: str, gb: int) -> int:
    """Bytes that PyTorch can be expected to state for a device whose label says so many GB, which are GiB."""
    left = 15 / 16 if name in _CORRECTED else 1.0
    return _STATED_BYTES.get(name, int(gb * GIB * left * _STATED_SHARE))


def _device(name: str, gb: int, tb_per_s: float, source: str, /, **teraflops: float) -> tuple[str, DeviceSpec]:
    return name, DeviceSpec(
        name=name,
        memory_bytes=_memory_bytes(name, gb),
        peak_flops_per_s={dtype: rate * 1e12 for dtype, rate in teraflops.items()},
        peak_bytes_per_s=tb_per_s * 1e12,
        link_bytes_per_s=next((gb_per_s * 1e9 for start, gb_per_s in _LINKS.items() if name.startswith(start)), None),
        source=source,
    )


_LINKS = {
    "NVIDIA GB300": 900, "NVIDIA B300": 900, "NVIDIA GB200": 900, "NVIDIA B200": 900, "NVIDIA GH200": 450,
    "NVIDIA H200 NVL": 450, "NVIDIA H200": 450, "NVIDIA H100 80GB": 450, "NVIDIA H800": 200, "NVIDIA H20": 450,
    "NVIDIA A100-SXM4": 300, "NVIDIA A800-SXM4": 200, "Tesla V100-SXM2": 150,
    "AMD Instinct MI355X": 537.6, "AMD Instinct MI350X": 537.6, "AMD Instinct MI325X": 448, "AMD Instinct MI300X": 448,
}  # fmt: skip
"""GB/s of NVLink or Infinity Fabric in one direction, half of what the datasheets count in both. Cards on PCIe, alone
or in bridged pairs, have none here: what connects them depends on the host."""


_PCIE = {
    5: (
        "NVIDIA GB", "NVIDIA B", "NVIDIA GH", "NVIDIA H", "NVIDIA GeForce RTX 50", "NVIDIA RTX PRO", "AMD Instinct MI3",
    ),
    3: ("Tesla", "NVIDIA TITAN", "NVIDIA GeForce RTX 20", "NVIDIA GeForce GTX"),
}  # fmt: skip
"""Devices by the generation of PCIe that their datasheets name, but for those of the fourth."""


def pcie_generation(name: str) -> int:
    """The generation of PCIe by which a device of this name is joined to its host, with 16 lanes: that of most is 4."""
    return next((generation for generation, starts in _PCIE.items() if name.startswith(starts)), 4)


def _rates(bf16: float, tf32: float | None = None, fp32: float = 0.0, fp8: float | None = None) -> dict[str, float]:
    """TFLOP/s by dtype, of which fp16 has as many as bf16. A dtype that the device does not multiply is left out."""
    rates = {"bf16": bf16, "fp16": bf16, "tf32": tf32, "fp32": fp32, "fp8": fp8}
    return {dtype: rate for dtype, rate in rates.items() if rate}


_HOPPER = _rates(989.4, 494.7, 66.9, 1978.9)
_HOPPER_NVL = _rates(835.5, 417.5, 60, 1670.5)
_A100 = _rates(312, 156, 19.5)
_V100 = {"fp16": 125, "fp32": 15.7}
_B200, _GB200 = _rates(2250, 1100, 75, 4500), _rates(2500, 1250, 80, 5000)
_MI300 = _rates(1307.4, 653.7, 163.4, 2614.9)
_MI350X, _MI355X = _rates(2306.9, None, 144.2, 4613.7), _rates(2516.6, None, 157.3, 5033.2)
_GA102 = "NVIDIA Ampere GA102 whitepaper (fp32 accumulate)"
_ADA = "NVIDIA Ada architecture whitepaper (fp32 accumulate)"
_RTX_BLACKWELL = "NVIDIA RTX Blackwell architecture whitepaper (fp32 accumulate)"
_HALF_OF_TWO = ", half of it: one of its two dies is a device"

DATASHEET: dict[str, DeviceSpec] = dict(
    [
        # The name is the one the driver reports. Rates are at the boost clock. Sparse figures are halved.
        _device("NVIDIA GB300", 288, 8.0, "NVIDIA GB300 NVL72 datasheet, for each of 72 GPUs", **_GB200),
        _device("NVIDIA B300 SXM6 AC", 288, 8.0, "NVIDIA HGX B300 datasheet, for each of 8 GPUs", **_B200),
        _device("NVIDIA GB200", 186, 8.0, "NVIDIA Blackwell datasheet (GB200 NVL72)", **_GB200),
        _device("NVIDIA B200", 180, 7.7, "NVIDIA Blackwell datasheet (HGX B200)", **_B200),
        _device("NVIDIA GH200 480GB", 96, 4.0, "NVIDIA GH200 datasheet (96GB HBM3)", **_HOPPER),
        _device("NVIDIA GH200 144G HBM3e", 144, 4.9, "NVIDIA GH200 datasheet (144GB HBM3e)", **_HOPPER),
        _device("NVIDIA H200", 141, 4.8, "NVIDIA H200 datasheet (SXM)", **_HOPPER),
        _device("NVIDIA H200 NVL", 141, 4.8, "NVIDIA H200 datasheet (NVL)", **_HOPPER_NVL),
        _device("NVIDIA H100 80GB HBM3", 80, 3.35, "NVIDIA H100 datasheet (SXM)", **_HOPPER),
        _device("NVIDIA H100 NVL", 94, 3.9, "NVIDIA H100 datasheet (NVL)", **_HOPPER_NVL),
        _device("NVIDIA H100 PCIe", 80, 2.0, "NVIDIA H100 datasheet (PCIe)", **_rates(756, 378, 51, 1513)),
        _device("NVIDIA H800", 80, 3.35, "NVIDIA H800 datasheet (SXM)", **_HOPPER),
        _device("NVIDIA H20", 96, 4.0, "NVIDIA H20 datasheet", **_rates(148, 74, 44, 296)),
        _device("NVIDIA A100-SXM4-80GB", 80, 2.039, "NVIDIA A100 datasheet (80GB SXM)", **_A100),
        _device("NVIDIA A100-SXM4-40GB", 40, 1.555, "NVIDIA A100 datasheet (40GB SXM)", **_A100),
        _device("NVIDIA A100 80GB PCIe", 80, 1.935, "NVIDIA A100 datasheet (80GB PCIe)", **_A100),
        _device("NVIDIA A100-PCIE-40GB", 40, 1.555, "NVIDIA A100 datasheet (40GB PCIe)", **_A100),
        _device("NVIDIA A800-SXM4-80GB", 80, 2.039, "NVIDIA A800 datasheet (80GB SXM)", **_A100),
        _device("NVIDIA A40", 48, 0.696, "NVIDIA A40 datasheet", **_rates(149.7, 74.8, 37.4)),
        _device("NVIDIA A30", 24, 0.933, "NVIDIA A30 datasheet", **_rates(165, 82, 10.3)),
        _device("NVIDIA A10", 24, 0.6, "NVIDIA A10 datasheet", **_rates(125, 62.5, 31.2)),
        _device("NVIDIA A10G", 24, 0.6, "NVIDIA A10G datasheet", **_rates(70, 35, 35)),
        _device("NVIDIA L40S", 48, 0.864, "NVIDIA L40S datasheet", **_rates(362.05, 183, 91.6, 733)),
        _device("NVIDIA L40", 48, 0.864, "NVIDIA L40 datasheet", **_rates(181.05, 90.5, 90.5, 362)),
        _device("NVIDIA L4", 24, 0.3, "NVIDIA L4 datasheet", **_rates(121, 60, 30.3, 242.5)),
        _device("NVIDIA RTX A6000", 48, 0.768, "NVIDIA Ampere GA102 whitepaper", **_rates(154.8, 77.4, 38.7)),
        _device(
            "NVIDIA RTX 6000 Ada Generation", 48, 0.96, "NVIDIA RTX 6000 Ada datasheet",
            **_rates(364.2, 182.1, 91.1, 728.5),
        ),
        _device("Tesla T4", 16, 0.32, "NVIDIA T4 datasheet", fp16=65, fp32=8.1),
        _device("Tesla V100-SXM2-16GB", 16, 0.9, "NVIDIA V100 datasheet (SXM2)", **_V100),
        _device("Tesla V100-SXM2-32GB", 32, 0.9, "NVIDIA V100 datasheet (SXM2)", **_V100),
        _device("Tesla V100-PCIE-16GB", 16, 0.9, "NVIDIA V100 datasheet (PCIe)", fp16=112, fp32=14),
        _device("Tesla V100-PCIE-32GB", 32, 0.9, "NVIDIA V100 datasheet (PCIe)", fp16=112, fp32=14),
        _device("Tesla V100S-PCIE-32GB", 32, 1.134, "NVIDIA V100 datasheet (V100S)", fp16=130, fp32=16.4),
        _device("NVIDIA GeForce RTX 5090", 32, 1.792, _RTX_BLACKWELL, **_rates(209.5, 104.8, 104.8, 419)),
        _device("NVIDIA GeForce RTX 5080", 16, 0.96, _RTX_BLACKWELL, **_rates(112.6, 56.3, 56.3, 225.1)),
        _device("NVIDIA GeForce RTX 5070 Ti", 16, 0.896, _RTX_BLACKWELL, **_rates(87.9, 43.9, 43.9, 175.8)),
        _device("NVIDIA GeForce RTX 5070", 12, 0.672, _RTX_BLACKWELL, **_rates(61.7, 30.9, 30.9, 123.5)),
        _device("NVIDIA GeForce RTX 4090", 24, 1.008, _ADA, **_rates(165.2, 82.6, 82.6, 330.3)),
        _device("NVIDIA GeForce RTX 4080", 16, 0.717, _ADA, **_rates(97.5, 48.7, 48.7, 194.9)),
        _device("NVIDIA GeForce RTX 4070 Ti", 12, 0.504, _ADA, **_rates(80.2, 40.1, 40.1, 160.4)),
        _device("NVIDIA GeForce RTX 3090 Ti", 24, 1.008, _GA102, **_rates(80, 40, 40)),
        _device("NVIDIA GeForce RTX 3090", 24, 0.936, _GA102, **_rates(71, 35.6, 35.6)),
        _device("NVIDIA GeForce RTX 3080", 10, 0.76, _GA102, **_rates(59.5, 29.8, 29.8)),
        _device("NVIDIA GeForce RTX 3070", 8, 0.448, _GA102, **_rates(40.6, 20.3, 20.3)),
        # AMD's fp32 is that of its matrix cores, which take fp32 as it is.
        _device("AMD Instinct MI355X", 288, 8.0, "AMD Instinct MI355X datasheet", **_MI355X),
        _device("AMD Instinct MI350X", 288, 8.0, "AMD Instinct MI350X datasheet", **_MI350X),
        _device("AMD Instinct MI325X", 256, 6.0, "AMD Instinct MI325X datasheet", **_MI300),
        _device("AMD Instinct MI300X", 192, 5.3, "AMD Instinct MI300X datasheet", **_MI300),
        _device(
            "AMD Instinct MI250X", 64, 1.638, f"AMD Instinct MI250X datasheet{_HALF_OF_TWO}",
            **_rates(191.5, None, 47.85),
        ),
        _device(
            "AMD Instinct MI250", 64, 1.638, f"AMD Instinct MI250 datasheet{_HALF_OF_TWO}",
            **_rates(181.05, None, 45.25),
        ),
        _device("AMD Instinct MI210", 64, 1.638, "AMD Instinct MI210 datasheet", **_rates(181, None, 45.3)),
    ]
)  # fmt: skip


def find_device_spec(device_name: str) -> DeviceSpec | None:
    """The datasheet of the device of this name, or None.

    Older drivers leave the maker out, and a virtual machine adds VF.
    """
    named = device_name.removesuffix(" VF")
    return DATASHEET.get(named) or DATASHEET.get(f"NVIDIA {named}")


def lacks(device_name: str, dtype: str) -> bool:
    """Whether the device is known not to multiply matrices of this dtype: Volta and Turing have neither bf16 nor TF32.

    Of an unknown device nothing is known.
    """
    spec = find_device_spec(device_name)
    return spec is not None and dtype not in spec.peak_flops_per_s


def overridden_spec(device_name: str, dtype: Dtype, peak_flops_per_s: float) -> DeviceSpec:
    """The spec a user states by `--peak-flops`, on top of the datasheet if there is one."""
    known = find_device_spec(device_name) or DeviceSpec(name="", peak_flops_per_s={}, source="")
    return msgspec.structs.replace(
        known,
        name=device_name,
        peak_flops_per_s={**known.peak_flops_per_s, PRECISIONS[dtype].multiplies: peak_flops_per_s},
        source="stated by --peak-flops",
    )


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """The best rate measured on this device for one kind of operation, and the operation that reached it."""

    rate: float
    """FLOP/s for a matrix product, bytes/s (read plus written) for a copy."""
    operation: str
    median_s: float
    samples: int


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Measured ceilings of one device under one build of PyTorch."""

    device_name: str
    torch_version: str
    measured_at: str
    """When the newest of them was measured."""
    matmul: dict[str, Ceiling] = {}
    copy: Ceiling | None = None

    def matmul_for(self, dtype: Dtype) -> Ceiling | None:
        return self.matmul.get(PRECISIONS[dtype].multiplies)


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """A device with its datasheet figures and its measured ceilings."""

    environment: Environment
    spec: DeviceSpec | None
    ceilings: Ceilings
