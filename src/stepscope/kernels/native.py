"""Builds and teaches the launcher in C++ (native.cpp), by which eager calls of our operations go round Python.

What it learns are the launches of a call that Python ran. Flash attention keeps recordings of its own
(flash/recorded_launches.py); for any other operation a call is watched: what it allocates, what it launches, and that
it calls nothing else (`forward`, `backward`).
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib
import importlib.util
import itertools
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.core.environment import NATIVE_LAUNCHER
from stepscope.core.errors import InputError, one_line, printable, warn
from stepscope.core.files import cache_directory, replace_file
from stepscope.core.interrupts import awaited
from stepscope.kernels.launching import ALIGNMENT_BYTES, interpreted, launches_watched
from stepscope.kernels.operators import HERE
from stepscope.kernels.operators import watched as is_watched
from stepscope.recording.environment import launched_from_python

# Builds and loads the launcher in C++ (native.cpp), once for a version of PyTorch, of Triton and of its source.
#
# PyTorch's own tools build it with the system's C++ compiler, in a process of their own, into the directory of caches;
# no CUDA compiler is needed. Where it cannot be had, Python launches our kernels, which a line and the run say.
# `STEPSCOPE_NATIVE=0` does without it; `STEPSCOPE_NATIVE=1` tries again where the compiler refused it before.


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
flags = ["-O1", "-std=c++20", "-DAT_PER_OPERATOR_HEADERS"]  # else each file of PyTorch's reads all operators
cpp_extension.load(
    name, [source], extra_cflags=flags, extra_include_paths=[headers], build_directory=place, with_cuda=False
)
"""


def library_path() -> Path | None:
    """Where the launcher is or would be built; None without a directory of caches."""
    caches = cache_directory()
    here = torch.__version__, triton.__version__, sys.implementation.cache_tag, platform.machine(), platform.libc_ver()
    digest = hashlib.sha256(repr(here).encode() + SOURCE.read_bytes()).hexdigest()[:12]
    return caches / f"launcher-{digest}" / f"{NAME}.so" if caches else None


def build() -> Path:
    """Build the launcher, where it is not there yet: some twenty seconds, in which others that want it wait. Raises
    InputError, one line, where that fails."""
    path = library_path()
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
    before = ""
    with contextlib.suppress(OSError):  # nobody failed, or it cannot be read: the compiler will say
        before = failed.read_text(errors="replace").strip()
    if _setting() not in _AGAIN and before:
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
            out, _ = awaited(functools.partial(process.communicate, timeout=_PATIENCE_S))
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its compiler, too
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return [f"it took more than {_PATIENCE_S:.0f} s"]
            raise
    return (out.strip().splitlines() or [f"it ended with {process.returncode}"]) if process.returncode else []


def _setting() -> str:
    return os.environ.get(NATIVE_LAUNCHER, "").strip().lower()


@functools.cache
def extension() -> ModuleType | None:
    """The launcher with the driver's functions, built now if it must be; None in Triton's interpreter, which launches
    nothing, and where Python launches."""
    if interpreted():
        return None
    if _setting() not in ("", *_OFF, *_AGAIN):
        warn(f"{NATIVE_LAUNCHER} is {printable(os.environ[NATIVE_LAUNCHER])!r}: write 0 or 1; it counts as 1")
    if _setting() in _OFF or not triton.__version__.startswith(_KNOWN):
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


# ---- the parameters of a compiled kernel as it reads them, with numbers of tensors in place of their addresses
#
# They are the arguments that are no constants, in their order, a descriptor as its tensor map, its shape (i32) and its
# strides (i64); then two addresses of scratch memory, which our kernels do not use.


_MAP_BYTES = 128
"""The bytes of a tensor map, and their alignment. Triton's object has it behind its head, at the first such place."""
_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A tensor of a pass by its number, and bytes from its start."""

    tensor: int
    offset: int = 0


@dataclass(frozen=True)
class Described:
    """A descriptor of a tensor of a pass: its class, and the fields that do not change."""

    tensor: int
    kind: type[Any]
    same: dict[str, Any]


def launch_of(compiled: Any, grid: tuple[int, ...], arguments: Sequence[object]) -> dict[str, Any] | None:
    """A launch as native.cpp reads it; None where its parameters are of a kind that is not known.

    arguments: as the kernel was called with them by place, with a Place for each tensor and a Described for each
    descriptor. What was given by name is a constant.
    """
    run, (warps, ctas, shared) = compiled.run, compiled.packed_metadata[:3]
    scratch = run.global_scratch_size or run.profile_scratch_size
    if ctas != 1 or scratch or run.launch_cooperative_grid or run.launch_pdl:
        return None
    parameters = _Parameters()
    of_descriptors = iter(compiled.metadata.tensordesc_meta or ())
    kinds = list(compiled.src.signature.values())
    if any(kind != "constexpr" for kind in kinds[len(arguments) :]):
        return None
    for kind, argument in zip(kinds, arguments, strict=False):
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            metadata = next(of_descriptors, None)
            if metadata is None or not isinstance(argument, Described):
                return None
            parameters.descriptor(argument, metadata)
        elif kind.startswith("*"):
            if argument is not None and not isinstance(argument, Place):
                return None
            parameters.address(argument)
        elif kind in _FORMATS:
            parameters.number(_FORMATS[kind], argument)
        else:
            return None
    for _ in range(2):
        parameters.address(None)
    return {
        "function": compiled.function,
        "grid": (*grid, 1, 1)[:3],
        "threads": 32 * warps,
        "shared": shared,
        "bytes": bytes(parameters.bytes),
        "places": parameters.places,
        "addresses": parameters.addresses,
        "descriptors": parameters.descriptors,
    }


class _Parameters:
    """The parameters of a kernel side by side, each at a multiple of its size."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.places: list[int] = []
        self.addresses: list[tuple[int, int, int]] = []
        self.descriptors: list[tuple[int, int, int]] = []

    def _add(self, value: bytes) -> int:
        self.bytes += bytes(-len(self.bytes) % len(value))
        self.places.append(len(self.bytes))
        self.bytes += value
        return self.places[-1]

    def number(self, form: str, value: Any) -> None:
        """A number in the form of `struct`."""
        self._add(struct.pack(form, value))

    def address(self, place: Place | None) -> None:
        """The address of a tensor; None for no tensor."""
        at = self._add(bytes(8))
        if place is not None:
            self.addresses.append((at, place.tensor, place.offset))

    def descriptor(self, of: Described, metadata: object) -> None:
        """A tensor map, and the shape and the strides that follow it."""
        # Its address is replaced at each call, so any that is aligned will do.
        base = torch.empty(32, dtype=torch.uint8)
        described = object.__new__(of.kind)
        described.__dict__.update(of.same, base=base[-base.data_ptr() % 16 :])
        packed = importlib.import_module("triton.backends.nvidia.driver").make_tensordesc_arg(described, metadata)[0]
        self.descriptors.append((self._add(ctypes.string_at(id(packed) + _MAP_BYTES, _MAP_BYTES)), of.tensor, 0))
        for size in of.same["shape"]:
            self.number("i", size)
        for stride in of.same["strides"]:
            self.number("q", stride)


Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Sizes, strides, dtype."""

# ---- operations

_numbers = itertools.count()
_tries: Counter[bytes] = Counter()
_MOST_TRIES = 8
"""How often a call is watched that could not be learnt: a first one may have run out of memory, been given one tensor
twice, or an expanded gradient."""


@dataclass(frozen=True, eq=False)
class Operation:
    """What calls of one kind are: a name for its nodes, and its number in their keys."""

    name: str
    """As autograd's nodes are named: FlashAttentionBackward0."""
    number: int = field(default_factory=_numbers.__next__)

    def key(self, inputs: Sequence[Tensor], options: Sequence[int]) -> bytes:
        """What the launches of a call depend on."""
        library = extension()
        assert library is not None  # nobody asks without it
        return library.key(self.number, inputs, options)

    def call(self, inputs: Sequence[Tensor], options: Sequence[int]) -> list[Tensor] | None:
        """The outputs of a call whose launches are known; None of any other."""
        library = extension()
        if library is None or launches_watched():
            return None
        device = inputs[0].device
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        return library.call(self.number, inputs, options, stream)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass that ran: what it made, launched, and gave (None for a result that it does not give)."""

    made: list[Layout]
    launches: list[dict[str, Any]]
    results: list[tuple[int, int, Layout] | None]


@dataclass(frozen=True, kw_only=True)
class Forward:
    """A forward pass that ran: its key, its inputs and what it saved."""

    operation: Operation
    key: bytes
    inputs: list[Layout]
    ran: Pass
    saved: list[int]


def teach(
    forward: Forward,
    by_python: Callable[..., Sequence[Tensor | None]],
    *,
    backward: Pass | None = None,
    gradients: Sequence[Layout] = (),
    any_order: bool = False,
) -> None:
    """Teach the launcher a call, of forward alone or of both passes.

    by_python: makes the gradients, of the outputs' gradients and the saved tensors, where the launches do not hold.
    any_order: whether backward adds its sums up in any order: they do not hold where PyTorch must be deterministic.
    """
    library = extension()
    if library is not None:
        full = library.learn(
            forward.key,
            {
                "name": forward.operation.name,
                "any_order": any_order,
                "inputs": forward.inputs,
                "forward": {**vars(forward.ran)},
                "saved": forward.saved,
                "by_python": by_python,
                "backward": None if backward is None else {**vars(backward)},
                "gradients": list(gradients),
            },
        )
        if full:  # it has forgotten all others, which may be taught again
            _tries.clear()


def forget() -> None:
    """Forget all that was learnt, as when other configurations are chosen."""
    _tries.clear()
    library = extension()
    if library is not None:
        library.forget()


def layout_of(tensor: Tensor) -> Layout:
    """How a tensor lies."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def may_learn(key: bytes) -> bool:
    """Whether this call is worth another try."""
    _tries[key] += 1
    return _tries[key] <= _MOST_TRIES


DTYPE_NUMBERS = {dtype: i for i, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16, torch.float16))}
"""The kernels' dtypes as options of a key. A compiler takes what it reads here for what stays."""


def bits(value: float) -> int:
    """A number as an option of a key; a compiler has no use for one, and cannot pack a symbol."""
    return 0 if torch.compiler.is_compiling() else struct.unpack("q", struct.pack("d", value))[0]


# ---- calls that are watched


class _Allocations(TorchDispatchMode):
    """Keeps the tensors that a call makes, and notes whether it calls operators that do more than make or view."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self.other = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"):
            self.tensors.append(out)
        elif not func.is_view and name not in ("view", "_unsafe_view", "_reshape_alias", "promote_types"):
            self.other = name
        return out


class Watched:
    """A call that is watched: its tensors, and its launches."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        """inputs: the tensors that the pass is given, by their numbers."""
        self._inputs = list(inputs)
        self._mode = _Allocations()
        self._launched: list[tuple[Any, tuple[int, ...], tuple[object, ...]]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which the call runs."""
        before = HERE.watcher
        HERE.watcher = lambda *of: self._launched.append(of)
        try:
            with self._mode:
                yield
        finally:
            HERE.watcher = before

    def place_of(self, tensor: Tensor) -> Place | None:
        """The tensor of the pass that this one lies in, and how far from its start; None where there is none, or more
        than one: then nobody knows which of them another call's is."""
        tensors = list(enumerate([*self._inputs, *self._mode.tensors]))
        at = tensor.data_ptr()
        spans = [(number, each.data_ptr(), _extent(each)) for number, each in tensors if each.numel()]
        places = [(number, start) for number, start, _ in spans if at == start]
        places = places or [(number, start) for number, start, size in spans if start < at < start + size]
        return Place(places[0][0], at - places[0][1]) if len(places) == 1 else None

    def ran(self, results: Sequence[Tensor | None]) -> Pass | None:
        """The pass; None where it cannot be launched by what was seen."""
        there = self._inputs[0].device
        if self._mode.other or any(each.device != there for each in self._mode.tensors):
            return None
        if any(each.data_ptr() % ALIGNMENT_BYTES for each in self._inputs if each.numel()):
            return None  # Triton compiles another kernel for an address that is not aligned
        launches = [self._launch(*each) for each in self._launched]
        outputs: list[tuple[int, int, Layout] | None] = []
        for tensor in results:
            place = None if tensor is None else self.place_of(tensor)
            if tensor is not None and place is None:
                return None
            if tensor is None or place is None:
                outputs.append(None)
            else:
                outputs.append((place.tensor, place.offset // tensor.element_size(), layout_of(tensor)))
        if any(each is None for each in launches):
            return None
        return Pass(
            made=[layout_of(each) for each in self._mode.tensors],
            launches=[each for each in launches if each is not None],
            results=outputs,
        )

    def _launch(self, compiled: Any, grid: tuple[int, ...], arguments: tuple[object, ...]) -> dict[str, Any] | None:
        placed: list[object] = []
        for argument in arguments:
            if not isinstance(argument, Tensor):
                placed.append(argument)
            elif not argument.numel():
                placed.append(None)
            elif (place := self.place_of(argument)) is not None:
                placed.append(place)
            else:
                return None
        return launch_of(compiled, grid, placed)


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first number to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


Ran = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""The outputs of a forward pass, and what it saves."""
Gradients = Callable[..., Sequence[Tensor | None]]
"""Makes the gradients of forward's inputs, of those of its outputs and of what it saved."""


def forward(  # noqa: PLR0917  (a call by names takes longer, and there is one in each block)
    ctx: Any,
    operation: Operation,
    inputs: Sequence[Tensor],
    options: Sequence[int],
    run: Callable[[], Ran],
    gradients: Gradients,
) -> tuple[Tensor, ...]:
    """Run forward from Python inside a Function, and save what `backward` needs. Where the launcher is there, watch the
    first such call, and teach it."""
    ctx.gradients = gradients
    # A compiler follows neither the library's loading nor a watched call.
    followed = torch.compiler.is_compiling() or extension() is None or is_watched(*inputs)
    if followed or not may_learn(key := operation.key(inputs, options)):
        outputs, saved = run()
    else:
        watched = Watched(inputs)
        with watched.watching():
            outputs, saved = run()
        ran = watched.ran(outputs)
        places = [watched.place_of(tensor) for tensor in saved]
        if ran is not None and all(place is not None and not place.offset for place in places):
            recorded = Forward(
                operation=operation,
                key=key,
                inputs=[layout_of(tensor) for tensor in inputs],
                ran=ran,
                saved=[place.tensor for place in places if place is not None],
            )
            ctx.gradients = _Learning(recorded, gradients)
            teach(recorded, ctx.gradients)
    ctx.save_for_backward(*saved)
    return outputs


def backward(ctx: Any, gradients: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Run backward from Python inside a Function whose forward ran by `forward`."""
    return ctx.gradients(*gradients, *ctx.saved_tensors)


class _Learning:
    """Makes gradients from Python, and teaches the launcher both passes: anew where what it knows does not hold, as
    for gradients that lie in another way."""

    def __init__(self, recorded: Forward, gradients: Gradients) -> None:
        self._recorded = recorded
        self._gradients = gradients
        self._left = _MOST_TRIES

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor | None]:
        if not self._left or torch.is_grad_enabled() or is_watched(*tensors):
            return self._gradients(*tensors)
        self._left -= 1
        watched = Watched(tensors)
        with watched.watching():
            results = self._gradients(*tensors)
        ran = watched.ran(results)
        if ran is not None:
            layouts = [layout_of(each) for each in tensors[: len(self._recorded.ran.results)]]
            teach(self._recorded, self, backward=ran, gradients=layouts)
        return results
