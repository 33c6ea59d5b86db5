"""What dtype everything has under autocast: parameters, each module's input and output, the loss, the gradients.

What stands in the tables was seen, in a step of the model and in runs of single operators. Without a GPU CUDA's rules
are seen operator by operator, on tensors without data; a whole step by them is imitated (`recording/as_on_cuda.py`),
and the imitation held against what was seen.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from stepscope.core.answer import Answer, Cell, Table, as_lines
from stepscope.core.errors import InputError, choose
from stepscope.core.finding import Finding
from stepscope.questions.answers import computed_answer
from stepscope.questions.autocast.findings import (
    activations_found,
    caching_found,
    differences_found,
    imitation_found,
    loss_found,
    normalisations_found,
    parameters_found,
    squares_found,
    treated_found,
)
from stepscope.questions.autocast.model_with_loss import TOY, model_with_loss
from stepscope.questions.autocast.operators import (
    LOW,
    OPERATORS,
    Casts,
    Observed,
    autocast_region,
    observe_cuda_rules,
    observe_operators,
)
from stepscope.questions.autocast.recording import AutocastRecord, record, record_repeats
from stepscope.questions.autocast.tree import tree_table
from stepscope.recording.as_on_cuda import AsOnCuda
from stepscope.recording.device import resolve_device

TREE, CASTS, OPERATOR_TABLE = "Modules", "Casts", "Operators"
"""Titles of the tables."""
RULES = ("cpu", "cuda")
"""Devices whose rules autocast may go by."""
_WHOSE = {"cpu": "the CPU's", "cuda": "CUDA's"}


def study_autocast(
    model: str = TOY, own: str | None = None, dtype: str = "bf16", device: str = "auto", rules: str | None = None,
    *, arguments: Mapping[str, Any] | None = None,
) -> Answer:  # fmt: skip
    """Say what dtype everything has under autocast in the toy network, a preset, or with `own` the user's module.

    own: `models/own/` says how a module is named; `arguments` are what its factory is called with. rules: whose rules
    autocast goes by, `cpu` or `cuda`; None for the device's own. CUDA's are imitated on a CPU. Raises InputError for a
    device, dtype, module or rules that cannot be used.
    """
    low = LOW[choose(dtype, tuple(LOW), "dtype")]
    where = resolve_device(device)
    rules = choose(rules or where.type, RULES, "rules")
    if where.type == "cuda" and rules == "cpu":
        raise InputError("--rules cpu on a GPU: add --device cpu, where autocast goes by them")
    imitated = rules != where.type
    with autocast_region(where.type, low):
        pass  # refused before the model is made
    looked_at = model_with_loss(model, own, where, arguments=arguments)
    with AsOnCuda() if imitated else contextlib.nullcontext():
        recording = record(looked_at, where, low)
        repeats = record_repeats(looked_at, where, low)
    cpu = torch.device("cpu")
    operators = {
        "cpu": observe_operators(cpu, low),
        "cuda": observe_operators(where, low) if where.type == "cuda" else observe_cuda_rules(low),
    }
    normalisations = tuple(normalisations_found(looked_at, recording, operators, rules))
    settings: dict[str, Cell] = {
        "model": looked_at.name,
        "dtype": dtype,
        "device": where.type,
        "rules": rules,
        "CUDA's rules": "observed on this GPU" if where.type == "cuda" else "observed on tensors without data",
    }
    said: list[Finding] = []
    if imitated:
        with AsOnCuda():
            said.append(imitation_found(operators["cuda"], observe_operators(cpu, low)))
    return computed_answer(
        where,
        study="autocast",
        question=f"What dtype does everything in {looked_at.name} have under {dtype} autocast, "
        f"by {_WHOSE[rules]} rules?",
        settings=settings,
        tables=(
            msgspec.structs.replace(tree_table(looked_at, recording, TREE), notes=as_lines(_by(rules, imitated))),
            _casts_table(recording, repeats),
            _operator_table(operators, rules, dtype),
        ),
        findings=(
            *said,
            parameters_found(recording),
            *loss_found(looked_at, recording),
            *activations_found(looked_at, recording, dtype),
            *normalisations,
            *([squares_found(where, low)] if normalisations else []),
            caching_found(recording, repeats, dtype),
            treated_found(operators[rules], rules),
            *differences_found(operators),
        ),
    )


def _by(rules: str, imitated: bool) -> str:
    return f"By {_WHOSE[rules]} rules{', imitated here' if imitated else ''}."


def _casts_table(recording: AutocastRecord, repeats: Mapping[str, Casts]) -> Table:
    counted = {"one forward": recording.casts, **repeats}
    columns = ("how", "casts of parameters", "parameters cast", "bytes of their copies", "casts of other tensors")
    return Table(
        title=CASTS,
        columns=columns,
        rows=tuple(
            (how, c.of_named.total(), len(c.of_named), c.bytes_of_named, c.others) for how, c in counted.items()
        ),
    )


def _operator_table(operators: Mapping[str, Mapping[str, Observed]], rules: str, dtype: str) -> Table:
    here = operators[rules]
    columns = (
        "operator", "of fp32", f"of {dtype}", "of both", "of both without autocast", "autocast on cpu",
        "autocast on cuda",
    )  # fmt: skip
    return Table(
        title=OPERATOR_TABLE,
        columns=columns,
        rows=tuple(
            (
                op.name, here[op.name].of_fp32, here[op.name].of_low, here[op.name].of_both,
                here[op.name].of_both_without, operators["cpu"][op.name].treatment,
                operators["cuda"][op.name].treatment,
            )
            for op in OPERATORS
        ),
    )  # fmt: skip
