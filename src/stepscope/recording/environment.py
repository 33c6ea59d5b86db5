"""Reads the machine and its software: everything beside the workload that a figure depends on."""

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

import stepscope
from stepscope.core.errors import InputError

if TYPE_CHECKING:
    from stepscope.core.environment import Environment, RankPlace


def read_environment(
    device: torch.device, memory_limit_bytes: int | None = None, *, user_code: Path | None = None
) -> "Environment":
    """The parts of the environment that do not change during a run. user_code: the folder of a user's code that is
    measured; its commit is noted."""
    from stepscope.core.environment import Environment  # noqa: PLC0415  (to name a device takes no records)

    commit, dirty = _git_state()
    # New files count nothing: measuring itself leaves some.
    own_commit, own_dirty = _checkout(user_code, "--untracked-files=no") if user_code else (None, None)
    processor, memory = cpu_name(), None
    with contextlib.suppress(ValueError, OSError, AttributeError):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    host = Environment(
        device_type="cpu",
        device_name=processor,
        memory_bytes=memory,
        cpu_name=processor,
        cpu_cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        system=f"{platform.system()} {platform.machine()}",
        versions=_versions(),
        git_commit=commit,
        git_dirty=dirty,
        own_commit=own_commit,
        own_dirty=own_dirty,
    )
    if device.type != "cuda":
        return host
    from stepscope.recording.nvml import driver_version  # noqa: PLC0415  (of a GPU alone)

    properties = torch.cuda.get_device_properties(device)
    return msgspec.structs.replace(
        host,
        device_type="cuda",
        device_name=properties.name,
        device_index=device.index,
        memory_bytes=properties.total_memory,
        memory_limit_bytes=memory_limit_bytes,
        multiprocessors=properties.multi_processor_count,
        l2_bytes=getattr(properties, "L2_cache_size", None),
        compute_capability=f"{properties.major}.{properties.minor}",
        driver=driver_version(),
        allocator=os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or None,
    )


def _versions() -> dict[str, str]:
    versions = {
        "stepscope": stepscope.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
        if cudnn := torch.backends.cudnn.version():
            versions["cudnn"] = str(cudnn)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a CPU build comes without Triton
        versions["triton"] = importlib.metadata.version("triton")
    return versions


def _git_state() -> tuple[str | None, bool | None]:
    """Commit of the checkout this package runs from, and whether it was changed since.

    Where the tree was copied without its history, STEPSCOPE_COMMIT may state it (`abc123` or `abc123-dirty`).
    """
    stated = os.environ.get("STEPSCOPE_COMMIT")
    if stated:
        return stated.removesuffix("-dirty"), stated.endswith("-dirty")
    package = Path(stepscope.__file__).parent
    # A package installed into a project's environment lies inside that project's checkout, whose commit is not ours.
    if _git(package, "ls-files", "--error-unmatch", str(package / "__init__.py")) is None:
        return None, None
    return _checkout(package, "--", ".")


def _checkout(folder: Path, *which: str) -> tuple[str | None, bool | None]:
    """Commit of the checkout that a folder lies in, and whether it was changed since. which: files, as git status takes
    them."""
    commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", *which)
    return commit, None if commit is None or changes is None else bool(changes)


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints in this folder; None where it fails, or is not there."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def cpu_name() -> str:
    """The processor's name, as precise as the system tells it."""
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def resolve_device(name: str, place: "RankPlace | None" = None) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device that is there; raises InputError that says what is there.

    place: of a rank among several, which has a GPU of its own.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    if place is not None and name.startswith("cuda:"):
        raise InputError(f"--device {name} is one GPU, and each of {place.ranks} ranks has its own: say cuda or auto")
    match = re.fullmatch(r"auto|cuda(?::(\d+))?", name)
    if not match:
        raise InputError(f"unknown device {name!r}: write auto, cpu, cuda or cuda:N")
    if count == 0:
        built = "" if torch.backends.cuda.is_built() else "; this PyTorch is built without CUDA"
        raise InputError(f"no GPU for --device {name}: PyTorch sees none on this machine{built}")
    index = torch.cuda.current_device() if name == "auto" else int(match[1] or 0)
    if place is not None:
        # The GPU with the rank's number on its host.
        index = place.local_rank
        if max(index + 1, place.local_ranks) > count:
            raise InputError(
                f"{place.local_ranks} ranks need a GPU each, and this machine has {count}: ask for --ranks {count}, or "
                "for --device cpu"
            )
    elif index >= count:
        last = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise InputError(f"no GPU for --device {name}: this machine has {count} ({last})")
    return torch.device("cuda", index)


_from_python: list[bool] = []


def launched_from_python() -> None:
    """Note that this process launches our kernels from Python, and not C++ (kernels/native.py)."""
    _from_python.append(True)


def launcher() -> dict[str, str]:
    """What a run says of it beside its versions: nothing where kernels are launched from C++, or none of ours are."""
    return {"launcher": "Python"} if _from_python else {}
