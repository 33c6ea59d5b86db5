"""Builds and loads the launcher in C++ (native.cpp), once for a version of PyTorch, of Triton and of its source.

PyTorch's own tools build it with the system's C++ compiler, in a process of their own, into the directory of caches; no
CUDA compiler is needed. Where it cannot be had, Python launches our kernels, which a line and the run say.
`STEPSCOPE_NATIVE=0` does without it; `STEPSCOPE_NATIVE=1` tries again where the compiler refused it before.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
import triton

from stepscope.core.environment import NATIVE_LAUNCHER
from stepscope.core.errors import InputError, one_line, printable, warn
from stepscope.core.files import cache_directory, replace_file
from stepscope.kernels.launching import interpreted
from stepscope.recording.environment import launched_from_python

SOURCE = Path(__file__).with_name("native.cpp")
NAME = "stepscope_launcher"
DRIVER = (
    "cuLaunchKernelEx",
    "cuTensorMapReplaceAddress",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
)
"""The functions of the driver that it calls."""
_KNOWN = ("3.6.", "3.7.")
"""The releases of Triton whose kernels take parameters as native.py says."""
_REMEDY = "install g++ and ninja"
_PATIENCE_S = 300.0
"""How long a build may take: fifteen times what it usually does."""
_OFF, _AGAIN = ("0", "no", "off", "false"), ("1", "yes", "on", "true")
_REFUSED = re.compile(r"^(?!ninja).*\berror: (?!.*(?:No space left|File too large|Disk quota|Killed|Interrupted))")
"""What a compiler says of source that it does not take, and will not take the next time either."""
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
    here = torch.__version__, triton.__version__, sys.implementation.cache_tag, platform.machine(), platform.libc_ver()
    digest = hashlib.sha256(repr(here).encode() + SOURCE.read_bytes()).hexdigest()[:12]
    return caches / f"launcher-{digest}" / f"{NAME}.so" if caches else None


def build() -> Path:
    """Build the launcher, where it is not there yet: some twenty seconds, in which others that want it wait. Raises
    InputError, one line, where that fails."""
    path = library()
    if path is None:
        raise InputError("there is no place for the launcher in C++: name one in STEPSCOPE_CACHE")
    if _is_whole(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                warn("another process builds the launcher in C++: waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)  # it ends with the process that has it, however that ends
            if not _is_whole(path):
                _build_there(path)
    except OSError as error:
        raise InputError(
            f"the launcher in C++ cannot be kept in {printable(str(path.parent))} ({error.strerror or error}): name "
            "another place in STEPSCOPE_CACHE"
        ) from error
    return path


def _is_whole(path: Path) -> bool:
    """Whether the library is there as it was built: half of one would end the process that loads it."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == path.with_suffix(".sha256").read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _build_there(path: Path) -> None:
    failed = path.with_suffix(".failed")
    if _asked() not in _AGAIN and (before := _said_in(failed)):
        raise InputError(printable(before))
    command, here = _compiler()
    for old in path.parent.glob("tmp*"):  # of builds whose process was killed, as we hold the lock
        shutil.rmtree(old, ignore_errors=True)
    warn("building the launcher in C++, once")
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        output = _run([*command, place], here)
        built = Path(place) / path.name
        if not output and built.is_file():
            digest = hashlib.sha256(built.read_bytes()).hexdigest()
            built.replace(path)
            replace_file(path.with_suffix(".sha256"), digest.encode())
            return
    telling = ("error: ", "No space left", "File too large", "not found", "Killed")
    wrong = next(
        (line for line in output if any(words in line for words in telling)), output[-1] if output else "no library"
    )
    why = f"the launcher in C++ cannot be built ({printable(wrong.strip())[:300]})"
    if not _REFUSED.search(wrong):
        raise InputError(f"{why}: the next process tries again; STEPSCOPE_NATIVE=0 does without")
    why += f": {_REMEDY}, then set STEPSCOPE_NATIVE=1, which tries again"
    replace_file(failed, why.encode())
    raise InputError(why)


def _said_in(failed: Path) -> str:
    try:
        return failed.read_text(errors="replace").strip()
    except OSError:  # nobody failed, or it cannot be read: the compiler will say
        return ""


def _compiler() -> tuple[list[str], dict[str, str]]:
    """What builds the launcher in the directory that is its last argument, and in which environment. Raises InputError
    where a program for it is missing."""
    if not sys.executable:
        raise InputError("the launcher in C++ cannot be built: this Python does not say where its program is")
    here = os.environ | {  # an environment's own programs, which its Python may run without
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONSAFEPATH": "1",
    }
    here.pop("MAKEFLAGS", None)  # of a make that runs us, whose job server ninja would look for
    if not here.get("CXX", "").strip():
        here["CXX"] = "c++"
    for program in (here["CXX"].split()[0], "ninja"):
        if shutil.which(program, path=here["PATH"]) is None:
            raise InputError(f"the launcher in C++ cannot be built ({printable(program)} is not found): {_REMEDY}")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    return [sys.executable, "-c", _BUILD, NAME, str(SOURCE), str(headers)], here


def _run(command: list[str], here: dict[str, str]) -> list[str]:
    """What the command said where it failed, in lines; none where it did not."""
    with subprocess.Popen(
        command,
        env=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, _ = process.communicate(timeout=_PATIENCE_S)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its compiler, too
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                return [f"it took more than {_PATIENCE_S:.0f} s"]
            raise
    return (out.strip().splitlines() or [f"it ended with {process.returncode}"]) if process.returncode else []


def _asked() -> str:
    return os.environ.get(NATIVE_LAUNCHER, "").strip().lower()


@functools.cache
def extension() -> ModuleType | None:
    """The launcher with the driver's functions, built now if it must be; None in Triton's interpreter, which launches
    nothing, and where Python launches."""
    if interpreted():
        return None
    if _asked() not in ("", *_OFF, *_AGAIN):
        warn(f"{NATIVE_LAUNCHER} is {printable(os.environ[NATIVE_LAUNCHER])!r}: write 0 or 1; it counts as 1")
    if _asked() in _OFF or not triton.__version__.startswith(_KNOWN):
        launched_from_python()
        return None
    try:
        path = build()
        module = _loaded(path)
        driver = ctypes.CDLL("libcuda.so.1")
        functions = [getattr(driver, name) for name in DRIVER]
    except (InputError, OSError, AttributeError) as error:
        warn(f"kernels are launched from Python: {one_line(error)}")
        launched_from_python()
        return None
    module.set_driver([ctypes.cast(function, ctypes.c_void_p).value for function in functions])
    torch.autograd.graph.Node.register(module.Node)
    return module


def _loaded(path: Path) -> ModuleType:
    try:
        spec = importlib.util.spec_from_file_location(NAME, path)
        assert spec is not None and spec.loader is not None  # a file that ends in .so is a module
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise InputError(f"{one_line(error)}: remove {printable(str(path))}, and it is built again") from error
    return module
