"""The rates this device really reaches: matrix products by dtype, and a copy. The denominator of an honest MFU."""

import os
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch

from stepscope.core.device_spec import Ceiling, Ceilings
from stepscope.core.errors import one_line
from stepscope.core.run import Settings
from stepscope.core.workload import Dtype
from stepscope.measure.device import timing_device
from stepscope.measure.environment import cpu_name
from stepscope.measure.precision import matmul_precision
from stepscope.measure.timer import Phase, StepFailed, measure
from stepscope.work.operations import copy_work, matmul_work

CEILING_DTYPES: tuple[Dtype, ...] = ("fp32", "tf32", "bf16", "fp16")
_TORCH_DTYPE = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MATMUL_SIZES = {"cuda": (2048, 4096, 8192), "cpu": (512, 1024, 2048)}
_COPY_BYTES = {"cuda": 2**32, "cpu": 2**28}
_SETTINGS = Settings(warmup_floor=3, warmup_cap=10, warmup_seconds=0.5, steps_floor=5, steps_cap=30, seconds=0.3)


class _Operation:
    """A single operation as a subject of `measure`."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.phases = (Phase(name="operation", run=run),)

    def prepare(self) -> None:
        pass


def supported_dtypes(device: torch.device) -> tuple[Dtype, ...]:
    """dtypes whose matrix products this device runs. TF32 exists on NVIDIA GPUs from Ampere (8.0) on."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return CEILING_DTYPES
    if device.type == "cuda":
        return ("fp32", "fp16")
    return ("fp32", "bf16", "fp16")


def measure_ceilings(
    device: torch.device, dtypes: Iterable[Dtype], on_progress: Callable[[str], None] | None = None
) -> Ceilings:
    """Measure each dtype's best square matrix product over a few sizes, and a copy. Random data, medians."""
    tell = on_progress or (lambda _: None)
    matmul: dict[str, Ceiling] = {}
    for dtype in dtypes:
        found = []
        for n in _MATMUL_SIZES[device.type]:
            tell(f"matrix product {n} x {n} x {n}, {dtype}")
            found.append(_matmul_ceiling(device, dtype, n))
            if found[-1].median_s > 1.0:
                break  # larger sizes would take long and say nothing new
        matmul[dtype] = max(found, key=lambda ceiling: ceiling.rate)
    tell("copy")
    return Ceilings(
        device_name=_device_name(device),
        torch_version=str(torch.__version__),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        matmul=matmul,
        copy=_copy_ceiling(device),
    )


def ceilings_for(
    device: torch.device, dtypes: Iterable[Dtype], on_progress: Callable[[str], None] | None = None
) -> Ceilings:
    """The stored ceilings of this device and build, after measuring (and storing) the dtypes still missing."""
    stored = load_ceilings(device)
    missing: list[Dtype] = [dtype for dtype in dtypes if stored is None or dtype not in stored.matmul]
    if stored is not None and not missing:
        return stored
    fresh = measure_ceilings(device, missing, on_progress)
    if stored is not None:
        fresh = msgspec.structs.replace(fresh, matmul={**stored.matmul, **fresh.matmul}, copy=stored.copy)
    store_ceilings(fresh)
    return fresh


def load_ceilings(device: torch.device) -> Ceilings | None:
    """What was stored for this device under this build of PyTorch, if anything readable was."""
    try:
        return msgspec.json.decode(_store_path(_device_name(device)).read_bytes(), type=Ceilings)
    except (OSError, msgspec.DecodeError):
        return None  # nothing stored, or by another version: it is measured again


def store_ceilings(ceilings: Ceilings) -> Path | None:
    """Keep the ceilings for later runs; None where there is no place to keep them."""
    path = _store_path(ceilings.device_name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(msgspec.json.encode(ceilings))
        temporary.replace(path)
    except OSError:
        return None
    return path


def _matmul_ceiling(device: torch.device, dtype: Dtype, n: int) -> Ceiling:
    torch_dtype = _TORCH_DTYPE[dtype]
    a, b = (torch.randn(n, n, device=device, dtype=torch_dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=torch_dtype)
    with matmul_precision(dtype):
        median_s, samples = _time(device, lambda: torch.mm(a, b, out=out))
    flops = matmul_work(n, n, n, a.element_size()).flops
    return Ceiling(rate=flops / median_s, operation=f"{n} x {n} x {n} {dtype}", median_s=median_s, samples=samples)


def _copy_ceiling(device: torch.device) -> Ceiling | None:
    count = _COPY_BYTES[device.type]
    try:
        source = torch.randint(256, (count,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
    except torch.OutOfMemoryError:
        return None
    median_s, samples = _time(device, lambda: target.copy_(source))
    moved = copy_work(count).bytes_moved or 0
    return Ceiling(rate=moved / median_s, operation=f"copy of {count // 2**20} MiB", median_s=median_s, samples=samples)


def _time(device: torch.device, operation: Callable[[], object]) -> tuple[float, int]:
    try:
        result = measure({"operation": _Operation(operation)}, device=timing_device(device), settings=_SETTINGS)[
            "operation"
        ]
    except StepFailed as failure:
        raise RuntimeError(one_line(failure.__cause__ or failure)) from failure
    if result.interrupted:
        raise KeyboardInterrupt
    samples = result.samples["operation"]
    return samples.median_s or float("nan"), samples.count


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def _store_path(device_name: str) -> Path:
    base = os.environ.get("STEPSCOPE_CACHE") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "stepscope"
    )
    slug = re.sub(r"[^A-Za-z0-9.+-]+", "_", f"{device_name}-torch{torch.__version__}")
    return Path(base) / f"ceilings-{slug}.json"
