"""The kind of a named range of a capture: a step, a phase, a part of attention, or else a module."""

import re
from typing import Literal, get_args

from stepscope.core.range_names import ATTENTION_PARTS, BACKWARD, FORWARD, MARKING, OPTIMIZER

RangeKind = Literal["step", "phase", "part", "module", "aside"]

_STEP = re.compile(
    r"(?:train(?:ing)?[ _]?)?(?:step|iteration|iter|batch)[ _#:]*\d*|ProfilerStep[#*]?\d*", re.IGNORECASE
)
_PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (FORWARD, re.compile(r"(?:model[ _.]?)?(?:forward|fwd)(?:[ _](?:pass|step|loss|and loss))?", re.IGNORECASE)),
    (FORWARD, re.compile(r"(?:Fully\w+|Distributed)DataParallel\.forward|inference", re.IGNORECASE)),
    (BACKWARD, re.compile(r"(?:loss[ _.]?)?(?:backward|bwd)(?:[ _](?:pass|step))?", re.IGNORECASE)),
    (OPTIMIZER, re.compile(r"opt(?:imi[sz]er)?(?:[ _.]?(?:step|update|pass))?|Optimizer\.step#.*", re.IGNORECASE)),
)
_FRAMED = re.compile(r"[#=*\-<\[(|]+\s*([^#=*\-<>\[\]()|]*[^#=*\-<>\[\]()|\s])\s*[#=*\->\])|]+")
_ASIDE = re.compile(
    rf"Optimizer\.zero_grad#|zero[ _]?grad|{MARKING}|PyTorch Profiler|nccl|cub::|CUB|thrust::|cudnn|cublas|"
    r"DataLoader|enumerate\(|(?:## )?Call CompiledFxGraph|Torch-Compiled Region|"
    r"(?:aten|autograd|torch|c10d|FSDP)::|[^,]+, sizes = \[",
    re.IGNORECASE,
)
"""A pattern of ranges that are not modules: of libraries, and of work outside the model."""

_OF_PYTORCH = re.compile(r"Optimizer\.|ProfilerStep|(?:Fully\w+|Distributed)DataParallel\.forward")

RANGE_KINDS: tuple[RangeKind, ...] = get_args(RangeKind)


def _undecorated(name: str) -> str:
    """The name without what frames it: `## forward ##` is forward."""
    name = name[:200].strip()
    framed = _FRAMED.fullmatch(name)
    return framed[1] if framed else name


def range_kind(name: str) -> RangeKind:
    """The kind of a range, by its name only."""
    name = _undecorated(name)
    if _STEP.fullmatch(name):
        return "step"
    if phase_of(name):
        return "phase"
    if name in ATTENTION_PARTS:
        return "part"
    return "aside" if _ASIDE.match(name) else "module"


def is_of_pytorch(name: str) -> bool:
    """Whether PyTorch itself emits ranges of this name, in a loop that marks nothing."""
    return _OF_PYTORCH.match(name) is not None


def phase_of(name: str) -> str | None:
    """The phase that a range's name means, in any of the usual spellings, or None."""
    name = _undecorated(name)
    return next((phase for phase, pattern in _PHASES if pattern.fullmatch(name)), None)
