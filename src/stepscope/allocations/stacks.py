"""Stacks of a snapshot: each kept once, with the line that tells most and what its frames give away.

PyTorch writes a frame once and refers to it, so that stacks are told apart by the identity of their frames.
"""

import re
from collections.abc import Sequence
from enum import IntFlag
from typing import Any

import msgspec

from stepscope.core.errors import InputError, one_line, printable

NO_STACK = 0
_LONGEST_NAME = 80
AUTOGRAD = "autograd"
"""How the site begins for an allocation whose stack has no Python, since autograd's own thread made it."""


DEEPEST = 2000
"""The most frames of a stack that are read, innermost first; Python stops at a thousand calls by default."""


class Sign(IntFlag):
    """Signs that a frame gives of the allocation above it."""

    PYTHON = 1
    LIBRARY = 2
    """Installed code, or the standard library's."""
    TORCH = 4
    OPTIMIZER = 8
    ZERO_GRAD = 16
    BACKWARD = 32
    AUTOCAST_EXIT = 64
    WORKSPACE = 128
    CALL = 256
    """A module's forward."""
    CLOSURE = 512
    """What an optimizer calls to have the loss computed."""
    STEP = 1024
    """A function named `step`, or as an update is, that nothing tells to be an optimizer's: it may be a trainer's."""
    MODEL = 2048
    """A module's own making, moving or loading."""
    QUANTISED = 4096
    """A library of quantised weights."""


class Frame(msgspec.Struct, frozen=True):
    """A line of code on a stack."""

    name: str
    filename: str = ""
    line: int = 0

    def __str__(self) -> str:
        return printable(f"{self.filename}:{self.line} {self.name}" if self.filename else self.name)


# As plain numbers, since flags of an enum would take most of the time of putting stacks together.
_PYTHON, _LESS_TELLING = int(Sign.PYTHON), (int(Sign.LIBRARY), int(Sign.TORCH), 0)
_OPTIMIZER, _STEP = int(Sign.OPTIMIZER), int(Sign.STEP)
_INNER = int(Sign.CALL | Sign.CLOSURE | Sign.BACKWARD | Sign.MODEL)
_OUTSIDE = ~int(Sign.OPTIMIZER | Sign.STEP)
_INSTALLED = re.compile(r"(?:^|/)(?:(?:site|dist)-packages|lib/python3[^/]*)/|^<frozen")
_TORCH = re.compile(
    r"^torch/|(?:(?:site|dist)-packages|(?:^|/)pytorch)/torch/"
    r"|/torch/(?:nn/modules|nn/functional\.py|optim|autograd|utils|amp|_\w+|functional\.py)(?:/|$|\.py)"
)
_OWN = re.compile(r"(?:^|/)stepscope/(models/)?")
_NATIVE = re.compile(r"^$|^\?\?$|\.(?:c|cc|cpp|cxx|cu|cuh|h|hpp|so|inl|o)$|\.so\.")
_BACKWARD = re.compile(r"autograd::Engine::|Backward\d*(?:::apply|$)|autograd::(?:Node::operator|AccumulateGrad)")
_NODE = re.compile(r"(?:^|::)(\w+?)Backward\d*(?:::apply|$)")
_OPERATOR = re.compile(r"^(?:at::_ops::(?=\w+::call)|aten::)(\w+)")
_OPTIMIZER_FOLDER = re.compile(r"(?:^|/)optim(?:s|i[sz]ers?)?/[^/]*$", re.IGNORECASE)
_OPTIMIZER_FILE = re.compile(
    r"(?:^|[/_\W])[a-z0-9]*optim(?:s|i[sz]ers?|i[sz]ation)?(?![a-z])[^/]*$"
    r"|(?:^|[/_])(?:adam|adamw|adam8bit|adafactor|adagrad|adan|came|galore|lamb|lars|lion|muon|nadam|prodigy|radam|rmsprop"
    r"|sgd|shampoo|soap|sophia)(?:_[^/]*)?\.py$"
    r"|(?:^|/)deepspeed/runtime/zero/stage[^/]*$",
    re.IGNORECASE,
)
"""Files of optimizers that need not derive from torch.optim.Optimizer: by name, or by their algorithm."""
_OPTIMIZER_CALL = re.compile(r"_?step|_?update\w*|apply_grad\w*|\w*(?:state|master|moment|fp32)\w*")
_OPTIMIZER_MADE = re.compile(r"__init__|_?init_\w+")
"""Functions that only tell in such a file: a folder of optimizers may also hold a model."""
_STEP_CALL = re.compile(
    r"step|apply_grad\w*|update_(?:param|weight)\w*|(?:optim\w*|adam\w*|sgd|lion|muon|momentum|rmsprop)_(?:step|update)"
)
_QUANTISED = re.compile(
    r"(?:^|/)(?:bitsandbytes/(?!optim/)|hqq/|torchao/(?:quantization|dtypes)/|quanto/|gptqmodel/|auto_gptq/|awq/)"
)
_MODEL = re.compile(r"(?:^|/)torch/nn/(?:modules/\w+|parameter)\.py$")
_MODEL_CALL = re.compile(r"_apply|__init__|reset_parameters|__deepcopy__|to_empty|materialize|load_state_dict")
_MODEL_LOAD = re.compile(r"(?:^|/)(?:transformers|accelerate|diffusers|safetensors)/.*\.py$")
_MODEL_LOAD_CALL = re.compile(r"from_pretrained|_?load_\w+|set_module_tensor_to_device|_materialize_copy")
_WORKSPACE = re.compile(r"CUDABlas(?:Lt)?(?:Workspace|Handle)|[cC]ublas\w*[wW]orkspace")


def signs_of(frame: Frame) -> Sign:
    """The signs that one frame gives."""
    path, name = frame.filename.replace("\\", "/"), frame.name
    signs = Sign(0)
    if _NATIVE.search(path):
        signs |= Sign.BACKWARD if _BACKWARD.search(name) else Sign(0)
        signs |= Sign.AUTOCAST_EXIT if "autocast::clear_cache" in name else Sign(0)
        return signs | (Sign.WORKSPACE if _WORKSPACE.search(name) else Sign(0))
    signs |= Sign.PYTHON
    own = _OWN.search(path)
    if _TORCH.search(path):
        signs |= Sign.TORCH | Sign.LIBRARY
    elif (own and not own[1]) or (not own and _INSTALLED.search(path)):
        signs |= Sign.LIBRARY
    if "torch/optim/" in path or _is_optimizers(path, name):
        signs |= Sign.OPTIMIZER
    elif _STEP_CALL.fullmatch(name) and not signs & Sign.LIBRARY:
        signs |= Sign.STEP
    elif "closure" in name:
        signs |= Sign.CLOSURE
    signs |= Sign.QUANTISED if _QUANTISED.search(path) else Sign(0)
    if _MODEL.search(path) and name in {"_call_impl", "_wrapped_call_impl", "inner"}:
        signs |= Sign.CALL
    elif (_MODEL.search(path) and _MODEL_CALL.fullmatch(name)) or (
        _MODEL_LOAD.search(path) and _MODEL_LOAD_CALL.fullmatch(name)
    ):
        signs |= Sign.MODEL
    if name == "zero_grad":
        signs |= Sign.ZERO_GRAD
    if signs & Sign.TORCH and name in {"backward", "_engine_run_backward"}:
        signs |= Sign.BACKWARD
    if path.endswith("amp/autocast_mode.py") and name == "__exit__":
        signs |= Sign.AUTOCAST_EXIT
    return signs


def _is_optimizers(path: str, name: str) -> bool:
    if _OPTIMIZER_CALL.fullmatch(name):
        return bool(_OPTIMIZER_FILE.search(path) or _OPTIMIZER_FOLDER.search(path))
    return bool(_OPTIMIZER_MADE.fullmatch(name) and _OPTIMIZER_FILE.search(path))


class Stacks:
    """Every stack of a snapshot, each with a number; number 0 is the empty stack."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._numbers: dict[tuple[int, ...], int] = {(): NO_STACK}
        self._by_frames: dict[tuple[int, ...], int] = {(): NO_STACK}
        self._frame_of_id: dict[int, int] = {}
        self._frame_of: dict[Frame, int] = {}
        self._frames: list[Frame] = []
        self._frame_signs: list[int] = []
        self._stacks: list[tuple[int, ...]] = [()]
        self.signs: list[int] = [0]
        """By number of the stack, the signs of all its frames together, as bits of Sign."""
        self.sites: list[str] = [""]
        """By number of the stack, the line of code or the operator that tells most about it."""

    def number(self, frames: Sequence[Any] | float | None) -> int:
        """The number of a stack, as the snapshot has it. Raises InputError for what is no list of frames."""
        if not isinstance(frames, (list, tuple)):
            raise InputError(f"{self._source}: no memory snapshot that can be read: `frames` holds no list")
        frames = frames[:DEEPEST]
        # The frames' own objects live as long as the snapshot, so that an id stays theirs.
        key = tuple(map(id, frames))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._new(tuple(map(self._frame, frames)))
        return number

    def _new(self, frames: tuple[int, ...]) -> int:
        number = self._by_frames.get(frames)
        if number is not None:
            return number
        number = self._by_frames[frames] = len(self._stacks)
        signs, of_frame = 0, self._frame_signs
        for frame in frames:
            found = of_frame[frame]
            if found & _OPTIMIZER and self._is_of_the_script(frame, frames):
                # Named after the optimizer that it uses, as train_adamw.py, it has its model and its trainer, too.
                found = found & ~_OPTIMIZER | (_STEP if _STEP_CALL.fullmatch(self._frames[frame].name) else 0)
            # What an optimizer calls to have the loss computed is none of its own; an optimizer that a hook of backward
            # calls is.
            signs |= found & _OUTSIDE if signs & _INNER else found
        self._stacks.append(frames)
        self.signs.append(signs)
        self.sites.append(self._site(frames))
        return number

    def _is_of_the_script(self, frame: int, frames: tuple[int, ...]) -> bool:
        """Whether a frame is of the file that the process runs."""
        file = self._frames[frame].filename
        return any(self._frames[other].name == "<module>" and self._frames[other].filename == file for other in frames)

    def _frame(self, raw: Any) -> int:
        number = self._frame_of_id.get(id(raw))
        if number is not None:
            return number
        try:
            frame = msgspec.convert(raw, Frame)
        except (msgspec.ValidationError, OverflowError, UnicodeEncodeError) as fault:
            at = "frames[...]"
            message = one_line(fault).replace("`$", f"`{at}")
            message += "" if at in message else f" - at `{at}`"
            raise InputError(f"{self._source}: no memory snapshot that can be read: {message}") from None
        number = self._frame_of.get(frame)
        if number is None:
            number = self._frame_of[frame] = len(self._frames)
            self._frames.append(frame)
            self._frame_signs.append(int(signs_of(frame)))
        self._frame_of_id[id(raw)] = number
        return number

    def frames(self, number: int) -> Sequence[str]:
        """The frames of a stack, innermost first: file:line function."""
        return [str(self._frames[frame]) for frame in self._stacks[number]]

    def _site(self, frames: tuple[int, ...]) -> str:
        """The line that tells most: the innermost of the user's own code, else of a library, else of PyTorch. Where
        autograd runs below all Python, or on a thread without, the operator whose backward it is."""
        first = next((i for i, number in enumerate(frames) if self._frame_signs[number] & _PYTHON), len(frames))
        node = self._node(frames[:first])
        if node:
            return node
        for unwanted in _LESS_TELLING:
            for number in frames:
                signs = self._frame_signs[number]
                if signs & _PYTHON and not signs & unwanted:
                    frame = self._frames[number]
                    return printable(f"{_short(frame.filename)}:{frame.line} {frame.name}")
        return self._native(frames)

    def _native(self, frames: tuple[int, ...]) -> str:
        """The name for a stack without Python frames: the outermost operator, else the outermost frame."""
        names = [self._frames[number].name for number in frames]
        operator = next((found[1] for name in reversed(names) if (found := _OPERATOR.search(name))), None)
        if any(self._frame_signs[number] & Sign.BACKWARD for number in frames):
            return f"{AUTOGRAD}, {operator}" if operator else AUTOGRAD
        return printable((operator or names[-1])[:_LONGEST_NAME]) if names else ""

    def _node(self, frames: tuple[int, ...]) -> str:
        for number in frames:
            found = _NODE.search(self._frames[number].name)
            if found:
                return f"{AUTOGRAD}, of {found[1]}"
        return ""


def _short(path: str) -> str:
    """The last two parts of a path."""
    return "/".join(path.replace("\\", "/").split("/")[-2:])
