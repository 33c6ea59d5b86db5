"""Which kind of work a kernel does: its family, by its name, and where the name leaves it open by where it ran."""

import re
from typing import get_args

from stepscope.core.range_names import OPTIMIZER, SOFTMAX
from stepscope.traces.kernels.family_rules import Family, Rule
from stepscope.traces.kernels.kernel_rules import KERNEL_RULES
from stepscope.traces.kernels.names.name import split_name
from stepscope.traces.kernels.operator_rules import OPERATOR_RULES

__all__ = ["FAMILIES", "Family", "classify", "is_generated", "rule_of"]

FAMILIES: tuple[Family, ...] = get_args(Family)

FUNCTION_LIMIT = 512
"""Characters of a function's name that patterns look at; the longest real ones have some 250."""

_POINTWISE: frozenset[Family] = frozenset(
    {"activation/elementwise", "copy/cast", "reduction", "sorting", "Triton/compiled fusion"}
)
"""Kernels of these families serve any layer: what they belong to is decided by operator, part and phase."""


def classify(name: str, *, operator: str | None = None, part: str | None = None, phase: str | None = None) -> Family:
    """The family of a kernel, or in a CPU trace of an operator, by its name.

    Where the name leaves it open, the innermost PyTorch operator decides, then the phase of the step and the part of
    the model: a softmax made of max, sub, exp, sum and div is softmax. A kernel named pointwise is never a product,
    wherever it ran. A product that an operator of convolution launches is how that convolution is computed.
    """
    rule = rule_of(name)
    family: Family = rule.family if rule else "other"
    if family == "matrix multiplication" and operator and not _is_operator(name):
        return "convolution" if _family_of_operator(operator) == "convolution" else family
    if family in _POINTWISE:
        return _place(family, operator, part, phase)
    if family == "other" and operator and not _is_operator(name):
        return _family_of_operator(operator)
    return family


def _place(family: Family, operator: str | None, part: str | None, phase: str | None) -> Family:
    """The family that a pointwise kernel, copy or reduction works for; its own where nothing says."""
    by_operator = _family_of_operator(operator) if operator else "other"
    # A copy launched by aten::addmm itself is the bias's, one by a convolution changes a layout: they stay what their
    # names say.
    if by_operator not in _POINTWISE | {"other", "matrix multiplication", "convolution", "view/allocation"}:
        return by_operator
    if phase == OPTIMIZER:
        return "optimizer"
    if part == SOFTMAX:
        return "softmax"
    return "copy/cast" if (family, by_operator) == ("activation/elementwise", "copy/cast") else family


_GENERATED = re.compile(r"triton_(?:poi|red|per|for|unk)_")


def is_generated(name: str) -> bool:
    """Whether a compiler made the kernel of several operators, whatever its family."""
    return _GENERATED.match(name) is not None


def rule_of(name: str) -> Rule | None:
    """The rule that the name alone falls under."""
    if _is_operator(name):
        return OPERATOR_RULES.find(_operator_of(name[:FUNCTION_LIMIT]))
    function, arguments, _ = split_name(name)
    return KERNEL_RULES.find(function[:FUNCTION_LIMIT], arguments)


_OPERATOR = re.compile(
    r"(?:aten|stepscope|c10d|_c10d_functional|prims|autograd|torch|profiler|mkl|mkldnn|gloo|mpi)::|(?:nccl|gloo|mpi):|"
    r"Optimizer\.|record_param_comms|\w+Backward\d*$"
)
_BACKWARD = re.compile(r"(\w+?)Backward\d*$")


def _is_operator(name: str) -> bool:
    return _OPERATOR.match(name[:FUNCTION_LIMIT]) is not None


def _family_of_operator(operator: str) -> Family:
    rule = OPERATOR_RULES.find(_operator_of(operator[:FUNCTION_LIMIT]))
    return rule.family if rule else "other"


def _operator_of(name: str) -> str:
    """An autograd node is what it is the gradient of: AddmmBackward0 -> aten::addmm."""
    match = _BACKWARD.match(name)
    if match is None:
        return name
    return "aten::" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", match[1]).lower()
