"""`stepscope study speed`: forward and backward in fp32, TF32 and bf16, measured and captured here, or before."""

import dataclasses

from stepscope.app.cli.studies.answering import AskedStepsOfAny
from stepscope.app.cli.verb import verb
from stepscope.core.answer import Answer
from stepscope.core.workload import DTYPES
from stepscope.engine.request import TraceRequest


@verb(
    "study speed",
    "stepscope study speed --model small,medium --dtype fp32,bf16",
    "stepscope study speed --from results/h200/precision-speed --only amdahl",
    model="small to 2.7B; tiny,small on a CPU",
    seq_len="512; 32 on a CPU",
    batch_size="4; 1 on a CPU",
    dtype="fp32,tf32,bf16",
)
def speed(*, asked: AskedStepsOfAny, warmup: int | None) -> None:
    """How much faster lower precision is by the model's size, and which part of the step makes the gain."""
    from stepscope.questions.speed.answer import answer_speed
    from stepscope.questions.speed.cells import TimedCell, pair_up
    from stepscope.questions.speed.study import ON_CPU, ON_GPU, dtypes_here, speed_cells

    lacking: tuple[str, ...] = ()

    def answer(cells: list[TimedCell], unread: int) -> Answer:
        return answer_speed(pair_up(cells, asked.dtype or DTYPES), lacking=lacking, unread=unread)

    comparing = asked.comparing("speed", TimedCell, answer)
    if asked.from_:
        comparing.from_stored(asked.from_, asked.given)
        return
    usual = ON_CPU if asked.device_type == "cpu" else ON_GPU
    here, lacking = dtypes_here(asked.dtype or usual.dtypes, asked.device_type)
    if asked.is_own:
        cells = dataclasses.replace(asked, dtype=here).own_cells(ON_CPU, ON_GPU, warmup, phase=("forward-backward",))
    else:
        cells = speed_cells(**{**asked.sizes(ON_CPU, ON_GPU, warmup), "dtypes": here})
    comparing.measured(asked.plan(cells, TraceRequest(tools=("kineto",), steps=1)))
