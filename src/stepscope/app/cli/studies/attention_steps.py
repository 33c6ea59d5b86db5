"""`stepscope study attention-step`: a whole training step with each attention, measured and captured, or read."""

from collections.abc import Sequence
from pathlib import Path

from stepscope.app.cli.captured_runs import finished_answer, stored_runs
from stepscope.app.cli.given_options import refuse_beside
from stepscope.app.cli.studies.answering import Answering, AskedSteps, Comparing
from stepscope.app.cli.verb import verb
from stepscope.core.attentions import attention_names
from stepscope.core.errors import InputError, choose
from stepscope.engine.request import TraceRequest

STUDY = "attention"
"""The answer's study: calls and steps are one."""


@verb(
    "study attention-step",
    "stepscope study attention-step --model small,medium --seq-len 1024 --attention reference,flash",
    "stepscope study attention-step --from results/h200/attention-steps --only findings",
    model="tiny",
    seq_len="1024; 64 on a CPU",
    batch_size="4; 1 on a CPU",
    dtype="bf16; fp32 on a CPU",
    attention="reference,sdpa-cudnn,flash; reference,sdpa on a CPU",
)
def attention_step(*, asked: AskedSteps, attention: tuple[str, ...] | None) -> None:
    """A whole training step with each attention in it: time, memory, and where the difference comes from."""
    answering = Answering(study=STUDY, shown=asked.shown, save=asked.save)
    if asked.from_:
        refuse_beside("--from", "--keep-digests")
        file = finished_answer(asked.from_, {})
        if file is not None:
            refuse_beside("--from")
            answering.read(file)
        else:
            read_steps(asked.from_, asked.keep_digests, answering)
        return
    if asked.shown.only is not None:
        from stepscope.questions.attention_step.answer import TITLES

        check_only(asked.shown.only, TITLES)
    from stepscope.questions.attention_step.study import ON_CPU, ON_GPU, usual_attentions
    from stepscope.questions.compared_cells import compared_cells

    attentions = attention or usual_attentions(asked.device_type)
    cells = compared_cells(
        attention=[choose(name, attention_names(), "attention") for name in attentions], **asked.sizes(ON_CPU, ON_GPU)
    )
    # Operators of a CPU take now this long and now that; kernels do not.
    trace = TraceRequest(tools=("kineto",), steps=5 if asked.device_type == "cpu" else 1)
    _comparing(answering, asked.keep_digests).measured(asked.plan(cells, trace))


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
    from stepscope.questions.attention_step.answer import answer_steps
    from stepscope.questions.attention_step.cells import StepCell

    return Comparing(
        verb="attention-step",
        answering=answering,
        cell=StepCell,
        answer=answer_steps,
        keep_digests=keep,
    )
