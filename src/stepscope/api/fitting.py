"""`stepscope.fit`: will it fit, and if not, what would make it fit. Nothing is run, and PyTorch is not needed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.api.shown import Shown, ShownAnswer, shown
from stepscope.api.workloads import given, textbook
from stepscope.core.attentions import Attention
from stepscope.core.errors import InputError
from stepscope.core.units import parse_bytes
from stepscope.core.workload import Compile, Dtype, Optimizer, Phase, Workload

if TYPE_CHECKING:
    from stepscope.memory.prediction.estimate import MemoryEstimate
    from stepscope.memory.prediction.fit import Budget, Fit, TextbookPlan


@dataclass(frozen=True, repr=False)
class Fitted(Shown):
    """The predicted peak of a step, and whether it fits into the memory that was named."""

    workload: Workload
    estimate: "MemoryEstimate"
    """The peak, its parts by category, and the peaks of the phases, in bytes."""
    verdict: "Fit | None"
    """Whether it fits, by how much, and what would make it fit; None where no memory was named."""
    answer: ShownAnswer

    @property
    def peak_bytes(self) -> int:
        """The most that PyTorch's allocator holds at once."""
        return self.estimate.peak_bytes

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None where no memory was named."""
        return self.verdict.fits if self.verdict is not None else None

    @property
    def plans(self) -> "tuple[TextbookPlan, ...]":
        """Changes that would make it fit, the cheapest first; none where it fits, or nothing helps."""
        return self.verdict.plans if self.verdict is not None else ()

    @property
    def answers(self) -> tuple[ShownAnswer, ...]:
        return (self.answer,)


def fit(
    model: str = "small",
    *,
    memory: int | str | None = None,
    device: str | None = None,
    seq_len: int = 512,
    batch_size: int | None = None,
    dtype: Dtype | None = None,
    phase: Phase | None = None,
    attention: Attention | None = None,
    compile: Compile | None = None,
    optimizer: Optimizer | None = None,
    checkpointing: str | None = None,
    accumulation: int | None = None,
    d_model: int | None = None,
    d_ff: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    vocabulary: int | None = None,
    tied: bool | None = None,
) -> Fitted:
    """Predict the peak memory of the textbook's step, say whether it fits, and what would make it fit.

        found = stepscope.fit("xl", seq_len=1024, memory="80GiB")
        found.fits, found.peak_bytes
        [plan.options for plan in found.plans]

    model: a preset, as `stepscope models` lists them: tiny, small, medium, large, xl and larger ones; d_model, d_ff,
    layers, heads, kv_heads, vocabulary and tied replace its own. memory: how much PyTorch may allocate, in bytes or as
    in "80GiB"; device: a device by its name, as in "H100", whose datasheet says how much. Without either the peak alone
    is predicted.
    seq_len (512), batch_size (4), dtype, phase, attention, compile, optimizer, checkpointing and accumulation are as in
    `stepscope.run`.

    Raises InputError for a name that is not known, sizes that cannot be, and where memory and device are both given.
    Nothing is run, and no GPU and no PyTorch is needed. A module of your own is measured by `stepscope.run`.
    """
    said = given(
        seq_len=seq_len, batch_size=batch_size, dtype=dtype, phase=phase, attention=attention, compile=compile,
        optimizer=optimizer, checkpointing=checkpointing, accumulation=accumulation, d_model=d_model, d_ff=d_ff,
        layers=layers, heads=heads, kv_heads=kv_heads, vocabulary=vocabulary, tied=tied,
    )  # fmt: skip
    return _of_the_textbook(textbook(model, said), _budget(memory, device))


def _of_the_textbook(workload: Workload, budget: "Budget | None") -> Fitted:
    from stepscope.memory.prediction.answer import answer_fit, answer_peak  # noqa: PLC0415  (only where it predicts)
    from stepscope.memory.prediction.estimate import estimate  # noqa: PLC0415
    from stepscope.memory.prediction.fit import fit as predict  # noqa: PLC0415

    if budget is None:
        predicted = estimate(workload)
        return Fitted(workload, predicted, None, shown(answer_peak(predicted, workload)))
    verdict = predict(workload, budget)
    return Fitted(workload, verdict.estimate, verdict, shown(answer_fit(verdict, workload)))


def _budget(memory: int | str | None, device: str | None) -> "Budget | None":
    from stepscope.memory.prediction.fit import budget_of_device, budget_of_memory  # noqa: PLC0415

    if memory is not None and device is not None:
        raise InputError("memory and device both say how much there is: give one of them")
    if device is not None:
        return budget_of_device(device)
    if memory is None:
        return None
    size = parse_bytes(memory) if isinstance(memory, str) else memory
    if size <= 0:
        raise InputError(f"memory is {memory}: give bytes above zero, or a size as in '80GiB'")
    return budget_of_memory(size)
