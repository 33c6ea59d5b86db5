"""The datasheet figures of known devices. An unknown device has none, and nothing is guessed."""

import msgspec

from stepscope.core.environment import Environment
from stepscope.core.workload import Dtype


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Datasheet figures of one device: dense rates (no sparsity), FLOP/s by matrix-product dtype."""

    name: str
    memory_bytes: int | None = None
    peak_flops_per_s: dict[str, float]
    peak_bytes_per_s: float | None = None
    source: str

    def peak_for(self, dtype: Dtype) -> float | None:
        """Peak FLOP/s of the matrix products that run under `dtype`."""
        return self.peak_flops_per_s.get(product_dtype(dtype))


def product_dtype(dtype: Dtype) -> Dtype:
    """The dtype in which the step's matrix products run."""
    return "bf16" if dtype == "bf16-pure" else dtype


def _nvidia(name: str, gb: int, tb_per_s: float, source: str, /, **teraflops: float) -> tuple[str, DeviceSpec]:
    return name, DeviceSpec(
        name=name,
        memory_bytes=gb * 10**9,
        peak_flops_per_s={dtype: rate * 1e12 for dtype, rate in teraflops.items()},
        peak_bytes_per_s=tb_per_s * 1e12,
        source=source,
    )


_HOPPER = {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9}
_A100 = {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}

DATASHEET: dict[str, DeviceSpec] = dict(
    [
        # The name is the one the driver reports. Sparse figures of the datasheets are halved.
        _nvidia("NVIDIA H200", 141, 4.8, "NVIDIA H200 datasheet (SXM)", **_HOPPER),
        _nvidia("NVIDIA H100 80GB HBM3", 80, 3.35, "NVIDIA H100 datasheet (SXM)", **_HOPPER),
        _nvidia(
            "NVIDIA H100 PCIe", 80, 2.0, "NVIDIA H100 datasheet (PCIe)",
            bf16=756, fp16=756, tf32=378, fp32=51,
        ),
        _nvidia("NVIDIA A100-SXM4-80GB", 80, 2.039, "NVIDIA A100 datasheet (80GB SXM)", **_A100),
        _nvidia("NVIDIA A100-SXM4-40GB", 40, 1.555, "NVIDIA A100 datasheet (40GB SXM)", **_A100),
        _nvidia("NVIDIA A100 80GB PCIe", 80, 1.935, "NVIDIA A100 datasheet (80GB PCIe)", **_A100),
        _nvidia("NVIDIA A100-PCIE-40GB", 40, 1.555, "NVIDIA A100 datasheet (40GB PCIe)", **_A100),
        _nvidia(
            "NVIDIA L40S", 48, 0.864, "NVIDIA L40S datasheet",
            bf16=362.05, fp16=362.05, tf32=183, fp32=91.6,
        ),
        _nvidia("NVIDIA L4", 24, 0.3, "NVIDIA L4 datasheet", bf16=121, fp16=121, tf32=60, fp32=30.3),
        _nvidia("NVIDIA A10", 24, 0.6, "NVIDIA A10 datasheet", bf16=125, fp16=125, tf32=62.5, fp32=31.2),
        _nvidia("Tesla T4", 16, 0.32, "NVIDIA T4 datasheet", fp16=65, fp32=8.1),
        _nvidia("Tesla V100-SXM2-16GB", 16, 0.9, "NVIDIA V100 datasheet (SXM2)", fp16=125, fp32=15.7),
        _nvidia("Tesla V100-SXM2-32GB", 32, 0.9, "NVIDIA V100 datasheet (SXM2)", fp16=125, fp32=15.7),
        _nvidia(
            "NVIDIA GeForce RTX 4090", 24, 1.008, "NVIDIA Ada architecture whitepaper (fp32 accumulate)",
            bf16=165.2, fp16=165.2, tf32=82.6, fp32=82.6,
        ),
        _nvidia(
            "NVIDIA GeForce RTX 3090", 24, 0.936, "NVIDIA Ampere GA102 whitepaper (fp32 accumulate)",
            bf16=71, fp16=71, tf32=35.6, fp32=35.6,
        ),
    ]
)  # fmt: skip


def find_device_spec(device_name: str) -> DeviceSpec | None:
    """The datasheet of the device with exactly this name, or None."""
    return DATASHEET.get(device_name)


def overridden_spec(device_name: str, dtype: Dtype, peak_flops_per_s: float) -> DeviceSpec:
    """The spec a user states by `--peak-flops`, on top of the datasheet if there is one."""
    known = find_device_spec(device_name)
    peaks = dict(known.peak_flops_per_s) if known else {}
    peaks[product_dtype(dtype)] = peak_flops_per_s
    return DeviceSpec(
        name=device_name,
        memory_bytes=known.memory_bytes if known else None,
        peak_flops_per_s=peaks,
        peak_bytes_per_s=known.peak_bytes_per_s if known else None,
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
        return self.matmul.get(product_dtype(dtype))


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """A device with its datasheet figures and its measured ceilings."""

    environment: Environment
    spec: DeviceSpec | None
    ceilings: Ceilings
