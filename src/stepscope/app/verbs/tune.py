"""`tune`: the fastest step that fits and stays right."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from stepscope.app.cli.output import Presentation, exit_code_of, stdout_kept_clean, sweep_progress
from stepscope.app.verbs.results import Shown, ShownAnswer, shown_answer
from stepscope.core.errors import EXIT_INTERRUPTED, InputError, warn
from stepscope.core.files import decode_document, json_document, read_named
from stepscope.core.options import MEASURING, STORED, Option, Rule, verb
from stepscope.core.run_directory import SEARCH_FOLDER
from stepscope.core.strategies import shared_somehow
from stepscope.core.study_results import TUNED_FIELDS, Tuned, fields_kept, named_apart
from stepscope.core.units import parse_bytes, parse_seconds
from stepscope.core.workloads import Workload
from stepscope.engine.workload_options import OneWorkload, check_one_model, of_factory, usual_sizes


@dataclass(frozen=True, repr=False)
class Found(Shown):
    """What a search for the fastest step found."""

    tuned: Tuned
    """Each change that was tried, the step that the search ended with, and how sure that is."""
    answer: ShownAnswer
    """The table of what each change gave, and the words that use the fastest step."""

    @property
    def best(self) -> Workload:
        """The fastest step; the one asked for where no change made it surely faster."""
        return self.tuned.best


def tune(
    model: str | None = None,
    *,
    module: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    budget: str | float = "10min",
    keep: Iterable[str] = (),
    memory: str | int | None = None,
    device: str = "auto",
    fresh: bool = False,
    runs: str | Path = "runs",
    tag: str | None = None,
    tell: Callable[[str], None] = warn,
    **chosen: Any,
) -> Found:
    """Find the fastest step that fits and trains as this one does, at the same batch.

        found = stepscope.tune("large", dtype="bf16", memory="80GiB")
        found                       # in a notebook: what each change gave
        found.best, found.tuned.confirmed, found.tuned.curves

    model, module, arguments: as of `stepscope.run`: a preset's name, or a factory. An object that exists already cannot
    be made in the processes that measure. chosen: what `run` takes beside them, as seq_len, batch_size and dtype;
    attention="mine.py:fn,sdpa" races these, and no others.
    budget: seconds, or text as in "90s", "10min", "1h". keep: fields that stay as they are. memory: what PyTorch may
    allocate, in bytes or as in "80GiB". fresh: measure again what an earlier search in `runs` has. tell: is given what
    is tried, in words.

    Raises InputError for what cannot be measured as asked. Interrupted, it gives what it found until then.
    """
    check_one_model(model, module, arguments, optimizer=chosen.get("optimizer"))
    if model is not None and not isinstance(model, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError("tune measures in processes of its own: give a preset's name, or module='file.py:factory'")
    choices, named = named_apart(shared_somehow(chosen))
    kept = fields_kept(keep)
    budget_s = parse_seconds(str(budget), "budget")
    limit = parse_bytes(memory) if isinstance(memory, str) else memory

    from stepscope.questions.tuning import tune as search
    from stepscope.questions.tuning_answer import answer_tuned
    from stepscope.questions.tuning_races import Racing
    from stepscope.recording.environment import resolve_device

    on_gpu = resolve_device(device).type == "cuda"
    if module is not None:
        workload: Workload = of_factory(module, arguments, choices)
    else:
        of_model = {"model": model} if model else {}
        workload = OneWorkload({**of_model, **choices}).workload(**usual_sizes(on_gpu=on_gpu))
    with Racing(
        device=device,
        out=_folder(runs, workload),
        budget_s=budget_s,
        memory_limit_bytes=limit,
        tag=tag or "tune",
        fresh=fresh,
    ) as racing:
        tuned = search(
            workload, racing, device=device, on_gpu=on_gpu, kept=kept, named=named, memory_limit_bytes=limit, tell=tell
        )
    return Found(tuned, shown_answer(answer_tuned(tuned)))


def _folder(runs: str | Path, workload: Workload) -> str:
    """Where the search keeps what it measures."""
    return str(Path(runs, SEARCH_FOLDER.format(key=workload.key)))


Budget = Annotated[
    float,
    Option(
        "How long the search may take, as in 90s, 10min or 1h; a race that takes longer is stopped.",
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
    conflicts=(Rule("alone", ("--from",)),),
    model="small on a GPU, tiny on a CPU",
    seq_len="512 on a GPU, 128 on a CPU",
)
def command(
    *,
    workload: OneWorkload,
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
    if from_ is not None:
        tuned = decode_document(read_named(from_), Tuned, str(from_), holds="search of `stepscope tune --json`")
    else:
        kept = fields_kept(keep)
        options, named = named_apart(shared_somehow(workload.options))
        workload = OneWorkload(options)
        workload.check()
        from stepscope.engine.request import type_of_device
        from stepscope.engine.sweep import Series

        with Series(device) as series:
            series.begin()
            from stepscope.questions.tuning import tune as search
            from stepscope.questions.tuning_races import Racing

            on_gpu = type_of_device(device) == "cuda"
            first = workload.any_workload(**usual_sizes(on_gpu=on_gpu))
            with (
                stdout_kept_clean(),
                sweep_progress() as tell,
                Racing(
                    device=device, out=_folder(runs, first), budget_s=budget, memory_limit_bytes=memory,
                    tag=tag or "tune", fresh=fresh, tell=tell, series=series,
                ) as racing,
            ):  # fmt: skip
                tuned = search(
                    first, racing, device=device, on_gpu=on_gpu, kept=kept, named=named, memory_limit_bytes=memory,
                    tell=warn,
                )  # fmt: skip
    from stepscope.questions.tuning_answer import answer_tuned

    answer = answer_tuned(tuned)
    shown.show(answer, document=lambda: json_document(tuned), save=save)
    return EXIT_INTERRUPTED if tuned.interrupted else exit_code_of(answer.findings)
