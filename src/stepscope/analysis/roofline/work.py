"""FLOPs and bytes of an operator call, from the shapes and dtypes that a trace recorded of it."""

import msgspec

from stepscope.analysis.roofline.calls import Unknown, read_call
from stepscope.analysis.roofline.rules import OPERATOR_WORK_RULES, OperatorRule
from stepscope.core.work import CausalConvention, Convention, Work

_PRODUCTS = ("matrix product", "attention", "attention backward", "convolution", "convolution backward")
_RULES: dict[str, OperatorRule] = {name: rule for rule in OPERATOR_WORK_RULES for name in rule.operators}


def operator_rule(operator: str) -> OperatorRule | None:
    """The rule that counts this operator's work, or None."""
    return _RULES.get(operator)


def is_product(operator: str) -> bool:
    """Whether the operator's FLOPs are those of matrix products; fused attention and convolutions have them too."""
    rule = _RULES.get(operator)
    return rule is not None and rule.name in _PRODUCTS


def operator_work(
    operator: str,
    shapes: str | None,
    dtypes: str | None,
    *,
    list_element_bytes: int | None = None,
    causal: CausalConvention = "half",
) -> Work | None:
    """The work of one call; None for operators without a rule and for records that leave it open.

    `shapes`, `dtypes`: the JSON texts of Kineto's "Input Dims" and "Input type". `list_element_bytes`: bytes of an
    element of tensors in lists, whose dtype Kineto does not record, and of a matrix product's tensors where there are
    no dtypes at all, as in a capture of emit_nvtx. What ran is counted, recomputation included: the
    result's convention says so. Fused attention counts as `causal` says; written out, it is two full products.
    """
    rule = _RULES.get(operator)
    countable = dtypes or (list_element_bytes and is_product(operator))
    call = read_call(operator, shapes, dtypes, list_element_bytes) if rule and shapes and countable else None
    if rule is None or call is None:
        return None
    try:
        work = rule.work(call, causal)
    except Unknown:
        return None
    return msgspec.structs.replace(work, convention=Convention(causal=causal, recompute=True))
