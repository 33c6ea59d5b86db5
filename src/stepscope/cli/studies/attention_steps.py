"""`stepscope study attention-step`: a whole training step with each attention, measured and captured, or read."""

from collections.abc import Sequence
from pathlib import Path

from stepscope.cli.captured_runs import finished_answer, stored_runs, type_of_device
from stepscope.cli.options import settings_from
from stepscope.cli.presentation import Presentation
from stepscope.cli.studies.answering import Answering, Comparing
from stepscope.cli.verb import verb
from stepscope.core.answer import Answer
from stepscope.core.attentions import attention_names
from stepscope.core.errors import InputError, choose
from stepscope.engine.request import TraceRequest

STUDY = "attention"
"""The answer's study: calls and steps are one."""


@verb(
    "study attention-step",
    "stepscope study attention-step --model small,medium --seq-len 1024 --attention reference,flash",
    "stepscope study attention-step --from results/h200/attention-steps --only findings",
    seq_len="1024; 64 on a CPU",
    batch_size="4; 1 on a CPU",
    dtype="bf16; fp32 on a CPU",
    attention="reference,sdpa-cudnn,flash; reference,sdpa on a CPU",
)
def attention_step(
    *,
    model: tuple[str, ...] = ("tiny",),
    seq_len: tuple[int, ...] | None,
    batch_size: int | None,
    dtype: tuple[str, ...] | None,
    attention: tuple[str, ...] | None,
    device: str,
    steps: int | None,
    seconds: float = 1.0,
    keep_digests: bool,
    runs: Path,
    from_: tuple[Path, ...] = (),
    tag: str | None,
    save: Path | None,
    shown: Presentation,
) -> None:
    """A whole training step with each attention in it: time, memory, and where the difference comes from."""
    answering = Answering(study=STUDY, shown=shown, save=save)
    if from_:
        file = finished_answer(from_, {})
        if file is not None:
            answering.read(file)
        else:
            read_steps(from_, keep_digests, answering)
        return
    if shown.only is not None:
        from stepscope.analysis.comparisons.attention.answer import TITLES

        check_only(shown.only, TITLES)
    from stepscope.core.model_config import configure
    from stepscope.engine.plan import SweepPlan
    from stepscope.studies.attention_steps import step_cells, step_sizes_for

    device_type = type_of_device(device)
    usual = step_sizes_for(device_type)
    plan = SweepPlan(
        cells=step_cells(
            models=[configure(name) for name in model],
            seq_lens=seq_len or tuple(map(int, usual.seq_len.split(","))),
            batch_size=usual.batch_size if batch_size is None else batch_size,
            dtypes=dtype or usual.dtypes.split(","),
            attentions=[
                choose(name, attention_names(), "attention") for name in attention or usual.implementations.split(",")
            ],
            settings=settings_from(None, steps, seconds, device_type == "cpu"),
        ),
        devices=(device,),
        out=str(runs),
        tag=tag,
        # Operators of a CPU take now this long and now that; kernels do not.
        trace=TraceRequest(tools=("kineto",), steps=5 if device_type == "cpu" else 1),
    )

    _comparing(answering, keep_digests).measured(plan)


def check_only(only: str, titles: Sequence[str]) -> None:
    """Raises InputError, before anything is measured, for what is in no title that the answer may have."""
    if not only or not any(only.casefold() in title.casefold() for title in (*titles, "findings")):
        raise InputError(f"--only {only!r} names no table: there are {', '.join(map(repr, titles))}, and findings")


def read_steps(places: Sequence[Path], keep: bool, answering: Answering) -> None:
    """Answer from folders of runs."""
    found = [(run, directory) for run, directory in stored_runs(places) if run.workload.phase != "forward"]
    if not found:
        files = [file for place in places for file in sorted(place.glob("*.json"))]
        remedy = f"give one of its files, as in {files[0]}" if files else "give one that this study filled"
        raise InputError(f"no run of a training step in {', '.join(map(str, places))}: {remedy}")
    _comparing(answering, keep).from_runs(found)


def _comparing(answering: Answering, keep: bool) -> Comparing:
    from stepscope.analysis.comparisons.attention.answer import answer_steps
    from stepscope.analysis.comparisons.attention.cells import StepCell

    def answer(cells: list[StepCell], unread: int) -> Answer:
        return answer_steps(cells, unread=unread)

    return Comparing(
        verb="attention-step",
        answering=answering,
        cell=lambda run, digest: StepCell(run=run, digest=digest),
        answer=answer,
        keep_digests=keep,
    )
