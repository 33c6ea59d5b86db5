"""`stepscope.tune`: the fastest step that fits and stays right."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.app.api.running import check_one_model, of_factory, textbook
from stepscope.app.api.shown import Shown, ShownAnswer, shown
from stepscope.core.errors import InputError, warn
from stepscope.core.strategies import shared_somehow
from stepscope.core.study_results import fields_kept
from stepscope.core.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from stepscope.core.study_results import Tuned
    from stepscope.core.workloads import Workload


@dataclass(frozen=True, repr=False)
class Found(Shown):
    """What a search for the fastest step found."""

    tuned: "Tuned"
    """Each change that was tried, the step that the search ended with, and how sure that is."""
    answer: ShownAnswer
    """The table of what each change gave, and the words that use the fastest step."""

    @property
    def best(self) -> "Workload":
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
    be made in the processes that measure. chosen: what `run` takes beside them, as seq_len, batch_size and dtype.
    budget: seconds, or text as in "90s", "10min", "1h". keep: fields that stay as they are. memory: what PyTorch may
    allocate, in bytes or as in "80GiB". fresh: measure again what an earlier search in `runs` has. tell: is given what
    is tried, in words.

    Raises InputError for what cannot be measured as asked. Interrupted, it gives what it found until then.
    """
    check_one_model(model, module, arguments, batch=None, loss=None, optimizer=chosen.get("optimizer"))
    if model is not None and not isinstance(model, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError("tune measures in processes of its own: give a preset's name, or module='file.py:factory'")
    chosen = shared_somehow(chosen)
    kept = fields_kept(keep)
    budget_s = parse_seconds(str(budget), "budget")
    limit = parse_bytes(memory) if isinstance(memory, str) else memory

    from stepscope.questions.tuning import tune as search
    from stepscope.questions.tuning_answer import answer_tuned
    from stepscope.questions.tuning_races import Racing
    from stepscope.recording.device import resolve_device

    on_gpu = resolve_device(device).type == "cuda"
    if module is not None:
        asked: Workload = of_factory(module, arguments, chosen)
    else:
        usual = {"seq_len": 512 if on_gpu else 128}
        asked = textbook(model or ("small" if on_gpu else "tiny"), {**usual, **chosen})
    with Racing(
        device=device, out=str(runs), budget_s=budget_s, memory_limit_bytes=limit, tag=tag, fresh=fresh
    ) as racing:
        found = search(asked, racing, device=device, on_gpu=on_gpu, kept=kept, memory_limit_bytes=limit, tell=tell)
    return Found(tuned=found, answer=shown(answer_tuned(found)))
