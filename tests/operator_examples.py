"""The examples of rules for operators, as the records that Kineto would write of such calls."""

import json
import re
from typing import Any, NamedTuple

from stepscope.core.formulas import CausalConvention, Work
from stepscope.core.formulas.operator_rules import call_work, recorded_call

DTYPES = {
    "fp32": "float", "bf16": "c10::BFloat16", "fp16": "c10::Half", "fp8": "c10::Float8_e4m3fn", "int8": "signed char",
    "int16": "short", "int32": "int", "int64": "long int", "bool": "bool",
}  # fmt: skip


def operator_work(
    operator: str, shapes: str | None, dtypes: str | None, causal: CausalConvention = "half", **more: Any
) -> Work | None:
    """The work of one call as `recorded_call` takes it and `call_work` counts it."""
    call = recorded_call(operator, shapes, dtypes, **more)
    return call_work(call, causal) if call is not None else None


class Recorded(NamedTuple):
    """A call: JSON texts of "Input Dims", "Input type" and, where any value is recorded, "Concrete Inputs"."""

    operator: str
    shapes: str
    dtypes: str
    values: str | None


def recorded(example: str) -> Recorded:
    """The record of a call that is written as `OperatorRule.example` has it."""
    operator, *words = example.split()
    arguments = [_argument(word.partition("*")[0]) for word in words for _ in range(int(word.partition("*")[2] or 1))]
    shapes, dtypes, values = zip(*arguments, strict=True)
    name = operator if "::" in operator else f"aten::{operator}"
    return Recorded(name, json.dumps(shapes), json.dumps(dtypes), json.dumps(values) if any(values) else None)


def _argument(word: str) -> tuple[list[int] | list[list[int]], str, str]:
    """Shape or shapes, dtype, and value of one argument."""
    if word == "-":
        return [], "", ""
    if word.startswith("#"):
        return [], "Scalar", word[1:]
    if word.startswith("("):
        return [], "ScalarList", f"[{word[1:-1].replace(',', ', ')}]" if word != "()" else ""
    tensors = re.findall(r"\[([\d,]*)\]", word)  # none in a list whose shapes are not recorded, [?]
    sides = [[int(side) for side in tensor.split(",") if side] for tensor in tensors]
    return (sides, "TensorList", "") if word.startswith("[") else (sides[0], DTYPES[word.partition("[")[0]], "")
