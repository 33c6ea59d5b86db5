"""Families of kernels, and the rules that sort kernels and operators into them: data, each with an example.

A rule looks at the function's name first: a template argument says with what, not what (row 16 of docs/measuring.md).
The first rule that fits holds. Patterns have no nested repetition and are searched in a bounded text.
"""

import re
from dataclasses import dataclass
from typing import Literal

Family = Literal[
    "matrix multiplication", "attention (fused)", "convolution", "recurrence", "softmax", "normalisation",
    "activation/elementwise", "quantisation", "copy/cast", "reduction", "pooling/interpolation", "sorting",
    "embedding/gather", "expert routing", "sampling", "optimizer", "random", "communication", "memcpy/memset",
    "view/allocation", "Triton/compiled fusion", "other",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A kernel, or operator, whose function's name has `function` and whose template arguments have `arguments`."""

    family: Family
    function: str
    arguments: str = ""
    example: str


class Rulebook:
    """Rules with their patterns compiled."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self._compiled = [
            (rule, re.compile(rule.function).search, re.compile(rule.arguments).search if rule.arguments else None)
            for rule in rules
        ]

    def find(self, function: str, arguments: str = "") -> Rule | None:
        """The first rule that fits."""
        for rule, in_function, in_arguments in self._compiled:
            if in_function(function) and (in_arguments is None or in_arguments(arguments)):
                return rule
        return None
