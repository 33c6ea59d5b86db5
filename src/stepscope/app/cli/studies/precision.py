"""`stepscope study NAME` for the arithmetic of 16 bits: formats, sums, softmax, normalisation."""

from typing import Any

from stepscope.app.cli.given_numbers import Numbers
from stepscope.app.cli.studies.answering import given_ones, of_own_model, refuse_preset, refuse_sizes, study_verb
from stepscope.core.address_space import require_room_for_torch
from stepscope.core.answer import Answer


@study_verb(
    "formats",
    "stepscope study formats --value 1e-7 --only becomes",
    "stepscope study formats --only Formats",
    plot=False,
)
def formats_study(*, value: str | None, device: str = "cpu") -> Answer:
    """Range, precision and largest integer of every floating format, from its bits."""
    require_room_for_torch()
    from stepscope.questions.formats import study_formats

    return study_formats(value, device)


@study_verb(
    "accumulation",
    "stepscope study accumulation --only findings",
    "stepscope study accumulation --addend 0.1 --count 5000",
)
def accumulation_study(*, addend: float | None, count: int | None) -> Answer:
    """Sums of many small numbers in every pair of accumulator and addend: where they stop growing, and why."""
    require_room_for_torch()
    from stepscope.questions.accumulation import study_accumulation

    return study_accumulation(addend=addend, count=count)


@study_verb(
    "normalisation",
    "stepscope study normalisation --scales 0.1,10,300 --widths 256,4096",
    "stepscope study normalisation --from results/cpu/precision/normalisation.json --save normalisation.svg",
    batch_size="4 of a config.json",
    seq_len="512 of a config.json",
)
def normalisation_study(
    *, module: str | None, arg: tuple[str, ...] = (), model: str | None, batch_size: int | None,
    seq_len: int | None, scales: Numbers | None, widths: Numbers | None, epsilon: float | None, device: str = "cpu",
) -> Answer:  # fmt: skip
    """RMSNorm and LayerNorm in fp16, bf16 and fp32: where squares overflow and epsilon vanishes, and the safe way.

    With --module or --model CONFIG.json: on what the norms of that model read in a step.
    """
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if found := of_own_model("normalisation", module, model, arg, **sizes, device=device):
        return found
    refuse_preset(model)
    refuse_sizes(**sizes)
    from stepscope.questions.normalisation.study import study_normalisation

    given = {"scales": scales, "widths": widths, "epsilon": epsilon}
    return study_normalisation(device=device, **given_ones(given))


@study_verb(
    "softmax",
    "stepscope study softmax --row 10,11.5,89",
    "stepscope study softmax --from results/cpu/precision/softmax.json --only 'exp in each format'",
)
def softmax_study(*, row: Numbers | None, scales: Numbers | None, device: str = "cpu") -> Answer:
    """Softmax, naive, safe and online, and attention's scores: where each overflows as its inputs grow."""
    from stepscope.questions.softmax.study import study_softmax

    return study_softmax(row=row, device=device, **given_ones({"scales": scales}))
