"""Measures the rates that this device really reaches: matrix products by dtype, and a copy."""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch

from stepscope.core.device_spec import Ceiling, Ceilings
from stepscope.core.errors import one_line
from stepscope.core.files import cache_file, read_cached, replace_file
from stepscope.core.formulas import matmul_work
from stepscope.core.precisions import Dtype
from stepscope.core.run import Settings
from stepscope.recording.device import timing_device
from stepscope.recording.environment import cpu_name
from stepscope.recording.precision import matmul_precision, scaled_mm
from stepscope.recording.timer import measure_one

CEILING_DTYPES: tuple[Dtype, ...] = ("fp32", "tf32", "bf16", "fp16")
_TORCH_DTYPE = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
_MATMUL_SIZES = {"cuda": (2048, 4096, 8192), "cpu": (512, 1024, 2048)}
_COPY_BYTES = {"cuda": 2**32, "cpu": 2**28}
_TRIAL = Settings(warmup_floor=3, warmup_cap=10, warmup_seconds=0.3, steps_floor=3, steps_cap=200, seconds=0.2)
"""How every size is tried first."""
_SUSTAINED = {
    "cuda": Settings(warmup_floor=3, warmup_cap=10, warmup_seconds=0.3, steps_floor=5, steps_cap=10_000, seconds=2.0),
    "cpu": Settings(warmup_floor=2, warmup_cap=10, warmup_seconds=0.3, steps_floor=5, steps_cap=1000, seconds=0.5),
}
"""How the best size is measured: as long as a step is, since power and heat lower the rate."""
_Tell = Callable[[str], object]
_IN_SILENCE: _Tell = lambda _: None  # noqa: E731
COPY = "copy"
"""The name of the memory's ceiling beside those of dtypes."""
AGAIN_S = 600.0
"""Seconds for which a ceiling stands, even if something is faster."""
_PATIENCE_S = 0.1
"""Seconds. The first size whose product takes longer is the last that is tried."""


def supported_dtypes(device: torch.device) -> tuple[Dtype, ...]:
    """dtypes whose matrix products this device runs: TF32 on NVIDIA GPUs from Ampere (8.0) on, fp8 from Ada (8.9)."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        return (*CEILING_DTYPES, "fp8")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return CEILING_DTYPES
    if device.type == "cuda":
        return ("fp32", "fp16")
    return ("fp32", "bf16", "fp16")


def measure_ceilings(
    device: torch.device, dtypes: Iterable[Dtype], tell: _Tell = _IN_SILENCE, *, copy: bool = True
) -> Ceilings:
    """Measure each dtype's best square matrix product, and a copy. Random data, medians, sustained."""
    matmul = {dtype: _matmul_ceiling(device, dtype, tell) for dtype in dtypes}
    if copy:
        tell("copy")
    return Ceilings(
        device_name=_device_name(device),
        torch_version=str(torch.__version__),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        matmul=matmul,
        copy=_copy_ceiling(device) if copy else None,
    )


def ceilings_for(
    device: torch.device,
    dtypes: Iterable[Dtype],
    tell: _Tell = _IN_SILENCE,
    *,
    keep: bool = True,
    again: bool = False,
    reached: Mapping[Any, float] | None = None,
) -> Ceilings:
    """The stored ceilings of this device and build, after measuring what is missing, or all of them `again`.

    With `keep`, what is measured is stored. reached: rates that were just seen here, in FLOP/s by dtype and in B/s of
    COPY. A stored ceiling below one of them was measured while the device was busy: it is measured again, but not
    within AGAIN_S, since data in a cache outrun every copy; the higher of the two stays.
    """
    stored = None if again else load_ceilings(device)
    known = {**stored.matmul, **({COPY: stored.copy} if stored.copy else {})} if stored else {}
    below: set[str] = set()
    if stored is not None and reached:
        age = datetime.now(UTC) - datetime.fromisoformat(stored.measured_at)
        if age.total_seconds() > AGAIN_S:
            below = {name for name, one in known.items() if reached.get(name, 0.0) > one.rate}
    missing: list[Dtype] = [dtype for dtype in dtypes if dtype not in known or dtype in below]
    if stored is not None and COPY in known and not missing and COPY not in below:
        return stored
    fresh = measure_ceilings(device, missing, tell, copy=COPY not in known or COPY in below)
    new = {**fresh.matmul, **({COPY: fresh.copy} if fresh.copy else {})}
    best = {**known, **{name: max(one, known.get(name, one), key=lambda each: each.rate) for name, one in new.items()}}
    copy = best.pop(COPY, None)
    fresh = msgspec.structs.replace(fresh, matmul=best, copy=copy)
    if keep:
        replace_file(_store_path(fresh.device_name), msgspec.json.encode(fresh))
    return fresh


def load_ceilings(device: torch.device) -> Ceilings | None:
    """The stored ceilings of this device under this build of PyTorch; None where there is nothing readable."""
    stored = read_cached(_store_path(_device_name(device)), Ceilings)
    if stored is None:
        return None
    entries = [*stored.matmul.values(), *([stored.copy] if stored.copy else [])]
    return stored if all(0 < entry.rate < float("inf") for entry in entries) else None


def _matmul_ceiling(device: torch.device, dtype: Dtype, tell: _Tell) -> Ceiling:
    """The ceiling of matrix products: every size is tried, and the best is measured for longer."""
    rates: dict[int, float] = {}
    for n in _MATMUL_SIZES[device.type]:
        tell(f"matrix product {n} x {n} x {n}, {dtype}")
        trial_s, _ = _time_matmul(device, dtype, n, _TRIAL)
        rates[n] = matmul_work(n, n, n, 1).flops / trial_s
        if trial_s > _PATIENCE_S:
            break
    best = max(rates, key=lambda n: rates[n])
    tell(f"matrix product {best} x {best} x {best}, {dtype}, sustained")
    median_s, samples = _time_matmul(device, dtype, best, _SUSTAINED[device.type])
    element = torch.empty(0, dtype=_TORCH_DTYPE[dtype]).element_size()
    work = matmul_work(best, best, best, element)
    l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) if device.type == "cuda" else 0
    cached = (work.bytes_moved or 0) < l2_bytes
    return Ceiling(
        rate=work.flops / median_s,
        operation=f"{best} x {best} x {best} {dtype}{', operands in L2' if cached else ''}",
        median_s=median_s,
        samples=samples,
    )


def _time_matmul(device: torch.device, dtype: Dtype, n: int, settings: Settings) -> tuple[float, int]:
    torch_dtype = _TORCH_DTYPE[dtype]
    if dtype == "fp8":
        one = torch.ones((), device=device)
        a, b = (torch.randn(n, n, device=device).to(torch_dtype) for _ in range(2))
        return _time(device, lambda: scaled_mm(a, b.t(), one, one, fast=True), settings)
    a, b = (torch.randn(n, n, device=device, dtype=torch_dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=torch_dtype)
    with matmul_precision(dtype):
        return _time(device, lambda: torch.mm(a, b, out=out), settings)


def _copy_ceiling(device: torch.device) -> Ceiling | None:
    count = _COPY_BYTES[device.type]
    try:
        source = torch.randint(256, (count,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
    except torch.OutOfMemoryError:
        return None
    median_s, samples = _time(device, lambda: target.copy_(source), _SUSTAINED[device.type])
    moved = 2 * count  # every byte is read once and written once
    return Ceiling(rate=moved / median_s, operation=f"copy of {count // 2**20} MiB", median_s=median_s, samples=samples)


def _time(device: torch.device, operation: Callable[[], object], settings: Settings) -> tuple[float, int]:
    from stepscope.recording.leads import LedCall  # noqa: PLC0415  (where no ceiling is stored)

    try:
        samples = measure_one(LedCall(operation), device=timing_device(device), settings=settings)["call"]
    except Exception as error:
        raise RuntimeError(one_line(error)) from error
    return samples.median_s or float("nan"), samples.count


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def _store_path(device_name: str) -> Path | None:
    return cache_file("ceilings", device_name, f"torch{torch.__version__}")
