"""Builds and loads the launcher in C++ (native.cpp), once for a version of PyTorch, of Triton and of its source.

PyTorch's own tools build it with the system's C++ compiler, in a process of their own, into the directory of caches; no
CUDA compiler is needed. Where it cannot be had, Python launches our kernels, which a warning and the run say.
`STEPSCOPE_NATIVE=0` does without it; `STEPSCOPE_NATIVE=1` tries again where building failed before.
"""

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType

import torch
import triton

from stepscope.core.cache_directory import cache_directory, replace_file
from stepscope.core.environment import NATIVE_LAUNCHER
from stepscope.core.errors import InputError, one_line
from stepscope.core.shown_text import printable, warn
from stepscope.kernels.launching import interpreted
from stepscope.measure.launcher import launched_from_python

SOURCE = Path(__file__).with_name("native.cpp")
NAME = "stepscope_launcher"
DRIVER = (
    "cuLaunchKernelEx", "cuTensorMapReplaceAddress", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent",
)  # fmt: skip
"""The functions of the driver that it calls."""
_KNOWN = ("3.6.", "3.7.")
"""The releases of Triton whose kernels take parameters as launch_parameters.py says."""
_REMEDY = "install g++ and ninja"
_BUILD = """
import sys
from torch.utils import cpp_extension
name, source, headers, place = sys.argv[1:]
cpp_extension.load(
    name, [source], extra_cflags=["-O1", "-std=c++20"], extra_include_paths=[headers], build_directory=place,
    with_cuda=False,
)
"""


def library() -> Path | None:
    """Where the launcher is or would be built; None without a directory of caches."""
    caches = cache_directory()
    said = f"{torch.__version__} {triton.__version__} {sys.implementation.cache_tag}".encode() + SOURCE.read_bytes()
    made = hashlib.sha256(said).hexdigest()[:12]
    return caches / f"launcher-{made}" / f"{NAME}.so" if caches else None


def build() -> Path:
    """Build the launcher, where it is not there yet: some twenty seconds, in which others that want it wait. Raises
    InputError, one line, where that fails."""
    path = library()
    if path is None:
        raise InputError("there is no place for the launcher in C++: name one in STEPSCOPE_CACHE")
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # it ends with the process, however that ends
            if not path.exists():
                _build_there(path)
    except OSError as error:
        raise InputError(
            f"the launcher in C++ cannot be kept in {printable(str(path.parent))} ({error.strerror or error}): name "
            "another place in STEPSCOPE_CACHE"
        ) from error
    return path


def _build_there(path: Path) -> None:
    failed = path.with_suffix(".failed")
    if failed.exists() and os.environ.get(NATIVE_LAUNCHER) != "1":
        raise InputError(printable(failed.read_text(errors="replace")))
    here = os.environ | {  # an environment's own programs, which its Python may run without
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}", "PYTHONSAFEPATH": "1",
    }  # fmt: skip
    compiler = os.environ.get("CXX") or "c++"
    for program in (compiler, "ninja"):
        if shutil.which(program, path=here["PATH"]) is None:
            raise InputError(f"the launcher in C++ cannot be built ({printable(program)} is not found): {_REMEDY}")
    warn("building the launcher in C++, once")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        done = subprocess.run(
            [sys.executable, "-c", _BUILD, NAME, SOURCE, headers, place], env=here, capture_output=True, text=True,
            errors="replace", check=False,
        )  # fmt: skip
        if not done.returncode:
            (Path(place) / path.name).replace(path)
            return
    lines = (done.stderr + done.stdout).strip().splitlines() or [f"it ended with {done.returncode}"]
    wrong = next((line for line in lines if "error:" in line or "not found" in line), lines[-1])
    said = (
        f"the launcher in C++ cannot be built ({printable(wrong.strip())[:300]}): {_REMEDY}, then set "
        "STEPSCOPE_NATIVE=1, which tries again"
    )
    replace_file(failed, said.encode())
    raise InputError(said)


@functools.cache
def extension() -> ModuleType | None:
    """The launcher with the driver's functions, built now if it must be; None in Triton's interpreter, which launches
    nothing, and where Python launches."""
    if interpreted():
        return None
    if os.environ.get(NATIVE_LAUNCHER) == "0" or not triton.__version__.startswith(_KNOWN):
        launched_from_python()
        return None
    try:
        path = build()
        spec = importlib.util.spec_from_file_location(NAME, path)
        assert spec is not None and spec.loader is not None  # a file that ends in .so is a module
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        driver = ctypes.CDLL("libcuda.so.1")
        functions = [getattr(driver, name) for name in DRIVER]
    except (InputError, ImportError, OSError, AttributeError) as error:
        warnings.warn(f"kernels are launched from Python: {one_line(error)}", stacklevel=2)
        launched_from_python()
        return None
    module.set_driver([ctypes.cast(function, ctypes.c_void_p).value for function in functions])
    return module
