"""FLOPs and bytes of an operator call, from what a trace recorded of it."""

from stepscope.core.work import CausalConvention, Convention, Work
from stepscope.core.work.operators.attention import Sight
from stepscope.core.work.operators.calls import OperatorCall, Unknown, read_call
from stepscope.core.work.operators.rules import OPERATOR_WORK_RULES, OperatorRule

_RULES: dict[str, OperatorRule] = {name: rule for rule in OPERATOR_WORK_RULES for name in rule.operators}
_NOT_FORESEEN = (Unknown, ArithmeticError, LookupError, TypeError, ValueError)
"""What a formula may raise: Unknown, by rule; the others where a damaged record is one that no formula foresees."""


def operator_rule(operator: str) -> OperatorRule | None:
    """The rule that counts this operator's work, or None."""
    return _RULES.get(operator)


def is_product(operator: str) -> bool:
    """Whether the operator's FLOPs are those of matrix products; fused attention and convolutions have them too."""
    rule = _RULES.get(operator)
    return rule is not None and rule.multiplies


def recorded_call(
    operator: str,
    shapes: str | None,
    dtypes: str | None,
    *,
    values: str | None = None,
    list_element_bytes: int | None = None,
) -> OperatorCall | None:
    """The call that a trace recorded; None for operators without a rule and for records that cannot be read.

    `shapes`, `dtypes`, `values`: the JSON texts of Kineto's "Input Dims", "Input type" and "Concrete Inputs".
    `list_element_bytes`: bytes of an element of tensors in lists, whose dtype Kineto does not record, and of a matrix
    product's tensors where there are no dtypes at all, as in a capture of emit_nvtx.
    """
    countable = dtypes or (list_element_bytes and is_product(operator))
    if operator not in _RULES or not shapes or not countable:
        return None
    return read_call(operator, shapes, dtypes, values, list_element_bytes)


def call_work(call: OperatorCall, causal: CausalConvention = "half") -> Work | None:
    """The work of a call; None where no rule counts it, or the record leaves it open.

    What ran is counted, recomputation included: the result's convention says so. Fused attention counts as `causal`
    says; written out, it is two full products.
    """
    rule = _RULES.get(call.operator)
    try:
        work = rule.work(call, causal) if rule is not None else None
    except _NOT_FORESEEN:
        return None
    convention = Convention(causal=causal, recompute=True)
    return work and Work(
        flops=work.flops, bytes_read=work.bytes_read, bytes_written=work.bytes_written, convention=convention
    )


def call_sight(call: OperatorCall) -> Sight | None:
    """Which keys the queries of fused attention see; None for other operators, and where the record leaves it open."""
    rule = _RULES.get(call.operator)
    try:
        return rule.attention.sight(call) if rule is not None and rule.attention is not None else None
    except _NOT_FORESEEN:
        return None


def operator_work(
    operator: str,
    shapes: str | None,
    dtypes: str | None,
    *,
    values: str | None = None,
    list_element_bytes: int | None = None,
    causal: CausalConvention = "half",
) -> Work | None:
    """The work of one call as `recorded_call` takes it and `call_work` counts it."""
    call = recorded_call(operator, shapes, dtypes, values=values, list_element_bytes=list_element_bytes)
    return call_work(call, causal) if call is not None else None
