"""What dtype everything has under autocast: parameters, each module's input and output, the loss, the gradients.

Nothing is derived from lists: what stands in the tables was seen, in a step of the model and in runs of single
operators.
"""

from collections.abc import Mapping

import torch

from stepscope.core.errors import choose
from stepscope.core.experiment import Experiment, Table
from stepscope.measure.device import resolve_device
from stepscope.numerics.autocast_findings import (
    activations_found,
    caching_found,
    differences_found,
    loss_found,
    normalisations_found,
    parameters_found,
    treated_found,
)
from stepscope.numerics.autocast_operators import (
    LOW,
    OPERATORS,
    Casts,
    Observed,
    autocast_region,
    observe_cuda_rules,
    observe_operators,
)
from stepscope.numerics.autocast_recording import Recording, record, record_repeats
from stepscope.numerics.autocast_tree import tree_table
from stepscope.numerics.setting import device_name, versions
from stepscope.numerics.subject import TOY, subject

TREE, CASTS, OPERATOR_TABLE = "Modules", "Casts", "Operators"
"""Titles of the tables."""


def study_autocast(model: str = TOY, own: str | None = None, dtype: str = "bf16", device: str = "auto") -> Experiment:
    """The toy network, a preset, or with `own` the user's module (`numerics/subject.py` says how it is named).

    Raises InputError for a device, dtype or module that cannot be used.
    """
    low = LOW[choose(dtype, tuple(LOW), "dtype")]
    where = resolve_device(device)
    with autocast_region(where.type, low):
        pass  # refused before the model is made
    looked_at = subject(model, own, where)
    recording = record(looked_at, where, low)
    operators = {where.type: observe_operators(where, low)}
    if where.type == "cuda":
        operators["cpu"] = observe_operators(torch.device("cpu"), low)
    else:
        operators["cuda"] = observe_cuda_rules(low)
    repeats = record_repeats(looked_at, where, low)
    return Experiment(
        study="autocast",
        question=f"What dtype does everything in {looked_at.name} have under {dtype} autocast?",
        device=device_name(where),
        versions=versions(),
        settings={
            "model": looked_at.name,
            "dtype": dtype,
            "device": where.type,
            "CUDA's rules": "observed on this GPU" if where.type == "cuda" else "observed on tensors without data",
        },
        tables=(
            tree_table(looked_at, recording, TREE),
            _casts_table(recording, repeats),
            _operator_table(operators, where, dtype),
        ),
        findings=(
            parameters_found(recording),
            *loss_found(looked_at, recording),
            *activations_found(looked_at, recording, dtype),
            *normalisations_found(looked_at, recording, operators, where, low),
            caching_found(recording, repeats, dtype),
            treated_found(operators[where.type], where),
            *differences_found(operators),
        ),
    )


def _casts_table(recording: Recording, repeats: Mapping[str, Casts]) -> Table:
    counted = {"one forward": recording.casts, **repeats}
    columns = ("how", "casts of parameters", "parameters cast", "bytes of their copies", "casts of other tensors")
    return Table(
        title=CASTS,
        columns=columns,
        rows=tuple(
            (how, c.of_named.total(), len(c.of_named), c.bytes_of_named, c.others) for how, c in counted.items()
        ),
    )


def _operator_table(operators: Mapping[str, Mapping[str, Observed]], device: torch.device, dtype: str) -> Table:
    here = operators[device.type]
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
