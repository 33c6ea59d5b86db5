"""RMSNorm and LayerNorm in few bits on the inputs that a model's own norms get in a step.

A step in fp32 runs forward, and what each norm reads is kept. Each way to normalise (`cases.py`) then gets those rows
in each format, without the norm's weights, and is held against float64.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.core.answer import Answer, Cell, Panel, Table
from stepscope.core.errors import InputError
from stepscope.core.finding import Finding, note, warning
from stepscope.questions.against_float64 import DTYPES, Deviation, deviation
from stepscope.questions.answers import computed_answer, curves, pivot
from stepscope.questions.normalisation.cases import BUILT_IN, MEAN, SUM, UPCAST, normalise
from stepscope.questions.steps import layers_folded, own_workload, settings_of, step_of
from stepscope.recording.device import resolve_device

TRIED = (SUM, MEAN, UPCAST, BUILT_IN)
"""The ways that are tried. In turn is left out: a step has too many rows for one call a number."""


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What norms of one kind read in a step: rows (R, W) of fp32."""

    module: str
    norm: str
    """RMSNorm or LayerNorm."""
    epsilon: float
    rows: Tensor
    calls: int


def study_own_normalisation(
    *, own: str, arguments: Mapping[str, Any] | None = None, device: str = "cpu", seed: int = 0
) -> Answer:
    """Try each way on what the norms of a user's own module read, in every format.

    own: the factory, or the configuration, of the module. Raises InputError for a module without RMSNorm or LayerNorm.
    """
    on = resolve_device(device)
    workload = own_workload(own, arguments, phase="forward-backward", seed=seed)
    step = step_of(workload, on)
    with _kept(step.model) as found:
        step.prepare()
        step.phases[0].run()
    reads = [_together(module, kept) for module, kept in found.items()]
    if not reads:
        raise InputError(f"{own} runs no RMSNorm and no LayerNorm in forward: there is nothing to look at")
    cases = {
        (read.module, name, way): _deviation(read, name, way) for read in reads for name in DTYPES for way in TRIED
        if (name, way) != ("fp32", UPCAST)  # the same as its mean
    }  # fmt: skip
    return computed_answer(
        on,
        study="normalisation",
        question="Where do the norms of this model break in few bits, and does upcasting mend it?",
        settings={**settings_of(workload), "seed": seed},
        tables=(_inputs(reads), *(_errors(name, reads, cases) for name in DTYPES)),
        panels=(_panel(reads, cases),),
        findings=_findings(reads, cases),
    )


def kind_of_norm(module: nn.Module) -> str | None:
    """RMSNorm or LayerNorm, by the module's class; None for another module. Models bring classes of their own, as
    LlamaRMSNorm."""
    name = type(module).__name__
    return next((kind for kind in ("RMSNorm", "LayerNorm") if name.endswith(kind)), None)


@contextlib.contextmanager
def _kept(model: nn.Module) -> Iterator[dict[tuple[str, str, float], list[Tensor]]]:
    """While open, keeps what each norm reads, by its folded path, kind and epsilon."""
    found: dict[tuple[str, str, float], list[Tensor]] = {}
    name_of = layers_folded(model)

    def keep(name: str, module: nn.Module, kind: str, args: Sequence[Any]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].dim() and args[0].is_floating_point():
            width = _width(module, args[0])
            rows = args[0].detach().float().reshape(-1, width)
            found.setdefault((name_of(name), kind, _epsilon(module)), []).append(rows)

    handles = [
        module.register_forward_pre_hook(lambda module, args, n=name, k=kind: keep(n, module, k, args))
        for name, module in model.named_modules()
        if (kind := kind_of_norm(module))
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _width(module: nn.Module, x: Tensor) -> int:
    """How many numbers are normalised together."""
    shape = getattr(module, "normalized_shape", None)
    return x[(0,) * (x.dim() - len(shape))].numel() if isinstance(shape, tuple) else x.shape[-1]


def _epsilon(module: nn.Module) -> float:
    """The norm's epsilon; PyTorch's RMSNorm takes fp32's own where it has None."""
    names = ("eps", "variance_epsilon", "epsilon")
    found = next((value for name in names if isinstance(value := getattr(module, name, None), float)), None)
    return torch.finfo(torch.float32).eps if found is None else found


def _together(kind: tuple[str, str, float], kept: list[Tensor]) -> _Read:
    module, norm, epsilon = kind
    return _Read(module=module, norm=norm, epsilon=epsilon, rows=torch.cat(kept), calls=len(kept))


def _deviation(read: _Read, name: str, way: str) -> Deviation:
    x = read.rows.to(DTYPES[name])
    _, found = normalise(x, read.norm, way, read.epsilon)
    _, right = normalise(x.double(), read.norm, MEAN, read.epsilon)
    return deviation(found, right, x)


def _inputs(reads: Sequence[_Read]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            read.module, read.norm, read.calls, read.rows.shape[1], read.epsilon,
            _digits(read.rows.abs().max()), _digits(read.rows.square().mean(-1).sqrt().min()),
            _digits(read.rows.square().mean(-1).sqrt().max()),
        )
        for read in reads
    ]  # fmt: skip
    columns = (
        "module", "norm", "calls", "width", "epsilon", "largest magnitude", "root mean square of a row, least",
        "root mean square of a row, most",
    )  # fmt: skip
    return Table(title="What the norms read in a step", columns=columns, rows=tuple(rows))


def _digits(number: Tensor) -> float:
    return float(f"{number.item():.3g}")


_Cases = Mapping[tuple[str, str, str], Deviation]


def _errors(name: str, reads: Sequence[_Read], cases: _Cases) -> Table:
    cells = (
        ((read.module,), way, cases[read.module, name, way].cell)
        for read in reads for way in TRIED if (read.module, name, way) in cases
    )  # fmt: skip
    return pivot(f"Error of the output in {name}, without weights", ("module",), cells)


def _panel(reads: Sequence[_Read], cases: _Cases) -> Panel:
    """Curves over the norms in the order in which they run."""
    points = (
        (f"{name}, {way}", float(place), cases[read.module, name, way].plotted)
        for name in ("fp16", "bf16") for way in (MEAN, UPCAST) for place, read in enumerate(reads, start=1)
    )  # fmt: skip
    return curves(points, x_title="norm, in the order of the model", y_title="relative error", y_log=True)


def _findings(reads: Sequence[_Read], cases: _Cases) -> Iterator[Finding]:
    for name in ("fp16", "bf16"):
        broken = [read.module for read in reads if cases[read.module, name, MEAN].broken]
        worst = max(reads, key=lambda read: _size(cases[read.module, name, UPCAST]))
        upcast = cases[worst.module, name, UPCAST]
        if broken:
            mended = sum(not cases[module, name, UPCAST].broken for module in broken)
            yield warning(
                "norm-breaks",
                f"In {name} {len(broken)} of {len(reads)} kinds of norm break on what they read in this step, first "
                f"{broken[0]} ({cases[broken[0], name, MEAN].word}); upcasting to fp32 mends {mended} of them.",
                {"format": name, "broken": len(broken), "norms": len(reads), "first": broken[0], "mended": mended},
                remedy="compute the norm in fp32, or under autocast, which does",
            )
        else:
            plain = max(reads, key=lambda read: _size(cases[read.module, name, MEAN]))
            yield note(
                "norm-error",
                f"In {name} no norm breaks on what it reads in this step. The error is at most "
                f"{cases[plain.module, name, MEAN].error:.2g} ({plain.module}); with statistics in fp32 it is at most "
                f"{upcast.error:.2g} ({worst.module}).",
                {"format": name, "error": cases[plain.module, name, MEAN].error, "upcast": upcast.error},
            )


def _size(found: Deviation) -> float:
    return float("inf") if found.broken else found.error
