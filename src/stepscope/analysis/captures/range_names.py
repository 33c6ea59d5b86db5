"""What a named range of a capture stands for: a step, a phase, a part of attention, or else a module."""

import re
from typing import Literal, get_args

RangeKind = Literal["step", "phase", "part", "module", "aside"]

PARTS = ("attention scores", "softmax", "attention output")
GRADIENT_ACCUMULATION = "gradient accumulation"
RECOMPUTATION = "recomputation"

_STEP = re.compile(
    r"(?:train(?:ing)?[ _]?)?(?:step|iteration|iter|batch)[ _#:]*\d*|ProfilerStep[#*]?\d*", re.IGNORECASE
)
_PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("forward", re.compile(r"(?:model[ _.]?)?(?:forward|fwd)(?:[ _](?:pass|step|loss|and loss))?", re.IGNORECASE)),
    ("forward", re.compile(r"(?:Fully\w+|Distributed)DataParallel\.forward|inference", re.IGNORECASE)),
    ("backward", re.compile(r"(?:loss[ _.]?)?(?:backward|bwd)(?:[ _](?:pass|step))?", re.IGNORECASE)),
    ("optimizer", re.compile(r"opt(?:imi[sz]er)?(?:[ _.]?(?:step|update|pass))?|Optimizer\.step#.*", re.IGNORECASE)),
)
_ASIDE = re.compile(
    r"Optimizer\.zero_grad#|zero[ _]?grad|mark backward|PyTorch Profiler|nccl|cub::|CUB|thrust::|cudnn|cublas|"
    r"DataLoader|enumerate\(|## Call CompiledFxGraph|Torch-Compiled Region|"
    r"(?:aten|autograd|torch|c10d)::|[^,]+, sizes = \[",
    re.IGNORECASE,
)
"""Ranges of libraries and of what goes on beside the model: no modules."""

PHASES = ("forward", "backward", "optimizer")
RANGE_KINDS: tuple[RangeKind, ...] = get_args(RangeKind)


def kind_of(name: str) -> RangeKind:
    """The kind of a range, by its name alone."""
    name = name[:200].strip()
    if _STEP.fullmatch(name):
        return "step"
    if phase_of(name):
        return "phase"
    if name in PARTS:
        return "part"
    return "aside" if _ASIDE.match(name) else "module"


def phase_of(name: str) -> str | None:
    """The phase that a range's name says, in any of the usual spellings, or None."""
    name = name[:200].strip()
    return next((phase for phase, pattern in _PHASES if pattern.fullmatch(name)), None)
