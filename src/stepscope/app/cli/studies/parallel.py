"""`stepscope study parallel`: strategies that share a step over ranks, measured here, or before."""

from stepscope.app.cli.studies.answering import AskedSteps, given_ones
from stepscope.app.cli.verb import verb
from stepscope.core.answer import Answer
from stepscope.core.attentions import attention_names
from stepscope.core.errors import InputError, choose
from stepscope.core.parts import named_kernels
from stepscope.core.run import settings_from
from stepscope.core.strategies import spelled
from stepscope.engine.request import TraceRequest


@verb(
    "study parallel",
    "stepscope study parallel --model large --parallel ddp-bucketed --ranks 2,4 --graph step --scaling weak",
    "stepscope study parallel --model tiny --device cpu --save strategies.svg",
    model="large; tiny on a CPU",
    seq_len="512; 64 on a CPU",
    batch_size="8; 4 on a CPU",
    dtype="bf16; fp32 on a CPU",
    parallel="the lessons, ddp and fsdp2",
    ranks="every GPU, or 2 on a CPU",
    attention="reference",
    kernels="reference",
    graph="none",
    optimizer="adamw-foreach",
    checkpointing="none",
)
def parallel(
    *,
    asked: AskedSteps,
    parallel: tuple[str, ...] | None,
    ranks: tuple[int, ...] | None,
    scaling: str,
    attention: str | None,
    kernels: str | None,
    graph: str | None,
    optimizer: str | None,
    checkpointing: str | None,
) -> None:
    """Strategies that share a step, beside one process and one another: step, communication, memory, scaling.

    The batch is that of all ranks together; it is measured again with as many sequences for each rank. What is chosen
    of the step holds for one process, too: strategies whose step --graph step cannot replay are named, not measured.
    """
    from stepscope.questions.parallel.answer import STUDY, SharedCell, answer_parallel
    from stepscope.questions.parallel.study import ON_CPU, ON_GPU, USUAL, parallel_cells, usual_ranks, without_none

    refused: list[tuple[str, str]] = []
    chosen = given_ones(
        {"attention": attention, "graph": graph, "optimizer": optimizer, "checkpointing": checkpointing}
    )
    if attention is not None:
        choose(attention, attention_names(), "attention")
    if kernels is not None:
        chosen |= named_kernels(kernels)
    if graph == "step" and not asked.from_ and asked.device_type != "cuda":
        raise InputError(f"--graph step captures CUDA graphs, which {asked.device_type} has not: leave it out")

    def answer(cells: list[SharedCell], unread: int) -> Answer:
        return answer_parallel(cells, unread=unread, refused=refused)

    comparing = asked.comparing(STUDY, SharedCell, answer)
    if asked.from_:
        wanted = None if parallel is None else ("none", *map(spelled, parallel))
        among = {**asked.given, "parallel": wanted, "ranks": ranks and (1, *ranks)}
        among |= {field: (value,) for field, value in chosen.items()}
        comparing.from_stored(asked.from_, among, "--kernels")
        return
    sizes = asked.sizes(ON_CPU, ON_GPU)
    sizes["settings"] = settings_from(None, asked.steps, asked.seconds)  # the profile says what nothing hides
    cells, refused = parallel_cells(
        strategies=without_none(parallel or USUAL), ranks=ranks or usual_ranks(asked.device_type), scaling=scaling,
        **chosen, **sizes,
    )  # fmt: skip
    comparing.measured(asked.plan(cells, TraceRequest()))
