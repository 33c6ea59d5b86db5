"""`stepscope study collectives`: how fast ranks communicate."""

import os

import typer

from stepscope.app.cli.studies.answering import given_ones, study_verb
from stepscope.core import interrupts
from stepscope.core.answer import Answer
from stepscope.core.ranks import place_in_job
from stepscope.engine.request import Stage, Tell


@study_verb(
    "collectives",
    "stepscope study collectives --ranks 2 --backend gloo --largest 1MiB",
    "stepscope study collectives --ranks 2,4,8 --save bandwidth.svg",
    ranks="every GPU, or 2 on CPUs",
    backend="nccl where GPUs are",
    largest="1 GiB on GPUs, 16 MiB on CPUs",
)
def collectives(
    tell: Tell, *, ranks: tuple[int, ...] | None, backend: tuple[str, ...] | None, sizes: tuple[int, ...] | None,
    largest: int | None, seconds: float | None,
) -> Answer:  # fmt: skip
    """Time, bandwidth and latency of all-reduce, all-gather, reduce-scatter, all-to-all, broadcast and send, by size.

    Inside torchrun or srun the ranks of that job take part.
    """
    place = place_in_job(os.environ)
    from stepscope.questions.collectives.study import study_collectives

    given = given_ones({"ranks": ranks, "backends": backend, "sizes": sizes, "largest": largest, "seconds": seconds})
    with interrupts.raising():
        found = study_collectives(lambda name, share: tell(Stage(name=name, fraction=share)), place=place, **given)
    if place is not None and place.rank:
        raise typer.Exit  # the first rank shows what all measured
    return found
