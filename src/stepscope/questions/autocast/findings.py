"""Findings on what was seen under autocast."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stepscope.core.finding import Finding, note, warning
from stepscope.core.float_format import FORMATS
from stepscope.questions.autocast.model_with_loss import ModelWithLoss
from stepscope.questions.autocast.operators import OPERATORS, TREATMENTS, Casts, Observed, Treatment, dtype_name
from stepscope.questions.autocast.recording import AutocastRecord, Seen

_WORDS: dict[Treatment, str] = {
    "sent down": "sent down to 16 bits",
    "kept up": "kept up in fp32",
    "promotes": "promoted where inputs differ",
    "as its inputs": "left in the dtype of the inputs",
    "refuses": "refused",
}

_LARGE = 1000.0
"""Deviation of the numbers that layer norm is tried on: its square, a million, is far above fp16's largest number."""


def parameters_found(recording: AutocastRecord) -> Finding:
    """A finding on the dtypes of parameters, of their gradients, and of the loss."""
    inside = Counter(recording.inside.values())
    gradients = Counter(recording.gradients.values())
    without = gradients.pop(None, 0)
    same = all(recording.gradients[name] in (None, dtype) for name, dtype in recording.inside.items())
    tail = f"; {without} got none" if without else ""
    return note(
        "parameters",
        f"Inside the region the {inside.total()} parameters are {_counted(inside)}, and the gradients "
        f"{_counted(gradients)}{tail}: "
        + ("each gradient has its parameter's dtype" if same else "not every gradient has its parameter's dtype")
        + f". The loss is {recording.loss}, of an output in {' and '.join(recording.output) or 'no tensor'}.",
        {
            **{f"parameters_{name}": number for name, number in inside.items()},
            **{f"gradients_{name}": number for name, number in gradients.items()},
            "gradients_none": without,
            "loss": str(recording.loss_value),
        },
    )


def loss_found(model: ModelWithLoss, recording: AutocastRecord) -> Iterator[Finding]:
    """A warning where the loss is not finite."""
    if not math.isfinite(recording.loss_value):
        yield warning(
            "loss",
            f"The loss of {model.name} is {recording.loss_value}: its dtypes stand, its gradients mean nothing.",
            {"loss": str(recording.loss_value)},
        )


def activations_found(model: ModelWithLoss, recording: AutocastRecord, dtype: str) -> Iterator[Finding]:
    """A finding on the dtype of gradients on their way back, where some are in 16 bits."""
    ran = [seen for seen in recording.seen.values() if seen.calls]
    low = sum(dtype in of.outputs for of in ran)
    back = sum(dtype in of.gradients for of in ran)
    if not back:
        return
    f = FORMATS[dtype]
    smallest = f.smallest_subnormal
    fp32 = FORMATS["fp32"].smallest_normal
    means = (
        f"it shares the range of fp32, whose smallest normal number is {fp32:.2g} too: no loss scale is needed"
        if f.smallest_normal == fp32
        else f"fp32 reaches {fp32:.2g} with all its digits: this is what a loss scale is for"
    )
    yield note(
        "activations",
        f"{low} of the {len(ran)} modules that ran gave {dtype}, and to {back} of them the gradient came back "
        f"in {dtype}, whatever the parameters' gradients are. In {dtype} the smallest normal number is "
        f"{f.smallest_normal:.2g}, and up to half of {smallest:.2g} a number becomes zero; {means}.",
        {
            "modules": len(ran), "low_outputs": low, "low_gradients": back, "smallest_normal": f.smallest_normal,
            "smallest_subnormal": smallest,
        },
    )  # fmt: skip


_NORMS: dict[type[nn.Module], str] = {
    nn.LayerNorm: "layer_norm", nn.GroupNorm: "group_norm", nn.RMSNorm: "rms_norm",
    nn.BatchNorm1d: "batch_norm", nn.BatchNorm2d: "batch_norm", nn.BatchNorm3d: "batch_norm",
}  # fmt: skip
"""PyTorch's modules that are one operator of the table, with that operator."""


def imitation_found(registered: Mapping[str, Observed], imitated: Mapping[str, Observed]) -> Finding:
    """A finding that says where the rules come from, and which operators their imitation treats otherwise."""
    told = {name: seen.treatment for name, seen in registered.items() if seen.treatment is not None}
    other = [name for name, treatment in told.items() if imitated[name].treatment != treatment]
    but = f" {', '.join(other)} do not: in a model that uses them, look at the operators." if other else ""
    return note(
        "rules",
        f"The rules are CUDA's, as PyTorch {torch.__version__} registers them, read here without a GPU: each operator "
        "ran on tensors without data that say they are on one, and the model ran on the CPU with the casts that follow "
        f"from them. {len(told) - len(other)} of {len(told)} operators come out alike in both.{but}",
        {"operators": len(told), "different": len(other)},
    )


def normalisations_found(
    model: ModelWithLoss, recording: AutocastRecord, operators: Mapping[str, Mapping[str, Observed]], rules: str
) -> Iterator[Finding]:
    """A finding for each kind of normalisation in the model: its dtypes, and the rule that made them."""
    found: dict[type[nn.Module], list[tuple[str, Seen]]] = {}
    for path, part in model.module.named_modules():
        seen = recording.seen.get(id(part), Seen())
        if "Norm" in type(part).__name__ and seen.calls:
            found.setdefault(type(part), []).append((path or type(part).__name__, seen))
    other = "cpu" if rules == "cuda" else "cuda"
    for kind, modules in found.items():
        first, seen = modules[0]
        which = first if len(modules) == 1 else f"{first} (of {len(modules)} {kind.__name__})"
        operator = _NORMS.get(kind)
        if operator is None:
            why = f"{kind.__name__} is no operator of the table, so what its code runs decides"
        else:
            here, there = operators[rules][operator].treatment, operators[other][operator].treatment
            why = f"on {rules} autocast has {operator} {_said(here)}, on {other} {_said(there)}"
        yield note(
            "normalisation",
            f"{which} takes {' and '.join(seen.inputs)} and gives {' and '.join(seen.outputs)}: {why}.",
            {"modules": len(modules), "input": ", ".join(seen.inputs), "output": ", ".join(seen.outputs)},
        )


def _said(treatment: Treatment | None) -> str:
    return "not observed" if treatment is None else _WORDS[treatment]


def squares_found(device: torch.device, low: torch.dtype) -> Finding:
    """A finding that sets layer norm written out in 16 bits beside PyTorch's operator, on numbers of +-_LARGE."""
    fp16, bf16, dtype = FORMATS["fp16"], FORMATS["bf16"], dtype_name(low)
    x = torch.tensor([-_LARGE, _LARGE] * 4, dtype=low, device=device)
    square = (x - x.mean()).pow(2).mean().item()
    written = (x / (x - x.mean()).pow(2).mean().sqrt()).abs().max().item()
    operator = F.layer_norm(x, (8,)).abs().max().item()
    return note(
        "squares",
        f"A norm averages squares: they overflow above {fp16.square_overflows_above:.1f} in fp16, above "
        f"{bf16.square_overflows_above:.2g} in bf16. For its range bf16 would not need fp32 here; for its precision it "
        f"may, with steps of {bf16.epsilon:.2g} against fp16's {fp16.epsilon:.2g}. Of +-{_LARGE:g} in {dtype}, "
        f"written out in {dtype}, the variance is {square:g} and the largest result {written:g} (exactly: 1); "
        f"PyTorch's layer_norm in {dtype} without autocast gives {operator:g}"
        + ("." if written == operator else ": its kernel computes inside in more than it is given."),
        {
            "fp16_square_overflows_above": fp16.square_overflows_above,
            "bf16_square_overflows_above": bf16.square_overflows_above,
            "variance": str(square), "written_out": str(written), "operator": str(operator),
        },
    )  # fmt: skip


def caching_found(recording: AutocastRecord, repeats: Mapping[str, Casts], dtype: str) -> Finding:
    """A finding on how often parameters are cast, and how long autocast keeps the copies."""
    one = recording.casts
    first = one.of_named.total()
    cached, uncached, apart = (casts.of_named.total() for casts in repeats.values())
    if not uncached:
        said = f"No parameter is cast to {dtype}: there are no copies to keep"
    else:
        again = cached - first
        said = (
            f"One forward casts {len(one.of_named)} parameters ({first} casts, {one.bytes_of_named:,} bytes of "
            f"copies). A second one in the same region casts {again}: "
            + ("the copies are kept until the region ends" if again == 0 else "not every copy is kept")
            + f". With the cache off two forwards take {uncached} casts, in a region each {apart}"
        )
    return note(
        "cast-cache",
        f"{said}. Other tensors are cast {one.others} times in one forward.",
        {
            "casts": first, "casts_of_two": cached, "casts_of_two_uncached": uncached, "casts_of_two_regions": apart,
            "bytes_of_copies": one.bytes_of_named, "casts_of_others": one.others,
        },
    )  # fmt: skip


def treated_found(here: Mapping[str, Observed], rules: str) -> Finding:
    """A finding on how many operators these rules treat in each way."""
    counts = Counter(observed.treatment for observed in here.values())
    told = len(here) - counts[None]
    parts = [f"{counts[treatment]} {_WORDS[treatment]}" for treatment in TREATMENTS if counts[treatment]]
    return note(
        "operators",
        f"Of {told} operators autocast on {rules} has {', '.join(parts[:-1])} and {parts[-1]}.",
        {**{treatment: counts[treatment] for treatment in TREATMENTS}, "operators": told},
    )


def differences_found(operators: Mapping[str, Mapping[str, Observed]]) -> Iterator[Finding]:
    """Findings on the operators that CPU and CUDA treat differently, grouped by how."""
    pairs: dict[tuple[str, str], list[str]] = {}
    common = 0
    for op in OPERATORS:
        cpu, cuda = operators["cpu"][op.name].treatment, operators["cuda"][op.name].treatment
        common += cpu is not None and cuda is not None
        if cpu is not None and cuda is not None and cpu != cuda:
            pairs.setdefault((cpu, cuda), []).append(op.name)
    different = sum(map(len, pairs.values()))
    unseen = [op.name for op in OPERATORS if operators["cuda"][op.name].treatment is None]
    if not different:
        return
    said = "; ".join(
        f"{', '.join(names)} ({cpu} on the CPU, {cuda} on CUDA)"
        for (cpu, cuda), names in sorted(pairs.items(), key=lambda item: -len(item[1]))
    )
    tail = f" Not observed for CUDA here: {', '.join(unseen)}." if unseen else ""
    yield note(
        "cpu-against-cuda",
        f"CPU and CUDA treat {different} of {common} operators differently: {said}.{tail}",
        {"different": different, "operators": common},
    )


def _counted(counts: Counter[Any]) -> str:
    """Counts in words: `all fp32`, or `3 fp32 and 1 bf16`."""
    if not counts:
        return "none"
    if len(counts) == 1:
        return f"all {next(iter(counts))}" if counts.total() > 1 else str(next(iter(counts)))
    return " and ".join(f"{number} {name}" for name, number in counts.most_common())
