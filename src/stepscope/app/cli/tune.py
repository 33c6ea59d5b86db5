"""`stepscope tune`: find the fastest step that fits and stays right."""

from functools import partial
from pathlib import Path
from typing import Annotated

from stepscope.app.cli.output import Presentation, check_picture, draw, stdout_kept_clean, sweep_progress, warn
from stepscope.core.answer import worst
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_DONE, EXIT_INTERRUPTED
from stepscope.core.files import json_document, read_named
from stepscope.core.options import MEASURING, STORED, Alone, Option, verb
from stepscope.core.strategies import shared_somehow
from stepscope.core.study_results import TUNED_FIELDS, Tuned, decode_tuned, fields_kept
from stepscope.core.units import parse_seconds
from stepscope.engine.request import type_of_device
from stepscope.engine.workload_options import OneWorkload

Budget = Annotated[
    float,
    Option(
        "How long the search may take, as in 90s, 10min or 1h; what has begun is finished.",
        MEASURING,
        takes=partial(parse_seconds, option="--budget"),
        metavar="TIME",
    ),
]
Keep = Annotated[tuple[str, ...], Option("Choices that stay as they are said.", MEASURING, choices=TUNED_FIELDS)]
Fresh = Annotated[bool, Option("Measure again what an earlier search has measured.", STORED)]


@verb(
    "tune",
    "stepscope tune --model large --dtype bf16 --memory 80GiB",
    "stepscope tune --module train.py:make --budget 10min --keep dtype",
    conflicts=(Alone("--from"),),
    model="small on a GPU, tiny on a CPU",
    seq_len="512 on a GPU, 128 on a CPU",
)
def tune(
    *,
    said: OneWorkload,
    device: str,
    budget: Budget = 600.0,
    keep: Keep = (),
    memory: int | None,
    fresh: Fresh = False,
    from_: Path | None,
    tag: str | None,
    runs: Path,
    save: Path | None,
    shown: Presentation,
) -> int:
    """Find the fastest step that fits and trains as this one does, at the same batch. The same command goes on.

    Changes take turns with the best step until then; the losses of the fastest are compared, and it is confirmed in
    processes of its own.
    """
    check_picture(save)
    if from_ is not None:
        return _show(decode_tuned(read_named(from_), str(from_)), save, shown)
    kept = fields_kept(keep)
    said = OneWorkload(shared_somehow(said.said))
    own = said.own
    if own is None:
        said.check()
    on_gpu = type_of_device(device) == "cuda"
    asked = own or said.workload(model="small" if on_gpu else "tiny", seq_len=512 if on_gpu else 128)

    from stepscope.questions.tuning import tune as search
    from stepscope.questions.tuning_races import Racing

    with (
        stdout_kept_clean(),
        sweep_progress() as tell,
        Racing(
            device=device, out=str(runs), budget_s=budget, memory_limit_bytes=memory, tag=tag, fresh=fresh, tell=tell
        ) as racing,
    ):
        found = search(asked, racing, device=device, on_gpu=on_gpu, kept=kept, memory_limit_bytes=memory, tell=warn)
    return _show(found, save, shown)


def _show(found: Tuned, save: Path | None, shown: Presentation) -> int:
    """Show what a search found. Returns its exit code."""
    from stepscope.questions.tuning_answer import answer_tuned

    answer = answer_tuned(found)
    shown.show(answer, document=lambda: json_document(found))
    draw(answer, save)
    if found.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_CHECK_FAILED if worst(answer.findings) == "error" else EXIT_DONE
