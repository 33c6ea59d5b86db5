"""`fit`: will it fit, and if not, what would make it fit. Nothing is run on real tensors."""

import contextlib
import functools
import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import msgspec

from stepscope.app.cli.options import device_names
from stepscope.app.cli.output import Presentation, patient_progress, stdout_kept_clean, told_where_long
from stepscope.app.verbs.results import Shown, ShownAnswer, shown_answer
from stepscope.app.verbs.run import gradients_kept, of_object
from stepscope.core import interrupts
from stepscope.core.errors import InputError, LimitExceeded, choose, warn
from stepscope.core.files import json_document
from stepscope.core.float_formats import MULTIPLIED_BLOCKS
from stepscope.core.formulas.spelled import cell_name, describe_model, describe_workload
from stepscope.core.model_config import PRESETS, ModelOptions
from stepscope.core.options import BUDGET, PARALLEL, WORKLOAD, Option, Rule, spelled_out, verb
from stepscope.core.parts import Attention
from stepscope.core.precisions import Dtype
from stepscope.core.strategies import NOT_PARALLEL, STRATEGIES
from stepscope.core.units import counted, format_bytes, parse_bytes
from stepscope.core.workloads import (
    Compile,
    FactoryWorkload,
    Graph,
    Optimizer,
    Phase,
    Projections,
    TextbookWorkload,
    WatchedWorkload,
    Workload,
)
from stepscope.engine.request import Stage, Tell
from stepscope.engine.workload_options import (
    ManyWorkloads,
    OneWorkload,
    check_one_model,
    choices_among,
    flags_of,
    of_factory,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.allocations.prediction.answer import AnyFit
    from stepscope.allocations.prediction.estimate import MemoryEstimate
    from stepscope.allocations.prediction.fit import Budget, FakeEstimate, Fit, Plan, Way
    from stepscope.core.answer import Answer
    from stepscope.training.user_module.loading import Loaded
    from stepscope.training.user_module.module_step import UserModule


@dataclass(frozen=True, repr=False)
class Fitted(Shown):
    """The predicted peak of a step, and whether it fits into the memory that was named; of several steps or devices,
    the one that fits least."""

    workload: Workload
    """What is predicted: the model and how it runs."""
    estimate: "MemoryEstimate | FakeEstimate"
    """The peak, its parts by category, and the peaks of the phases, in bytes."""
    verdict: "Fit[MemoryEstimate] | Fit[FakeEstimate] | None"
    """Whether it fits, by how much, and what would make it fit; None where no memory was named."""
    answer: ShownAnswer
    """The peak by category, the verdict, and the plans; of several steps a table."""
    steps: "tuple[Fitted, ...]" = ()
    """Each of several steps, on each of several devices."""
    by_strategy: dict[str, int] = field(default_factory=dict[str, int])
    """With parallel: the peak of the rank that needs most, in bytes; the estimate is of one process then."""
    by_recipe: dict[str, int] = field(default_factory=dict[str, int])
    """With recipe: the peak in bytes, with operands in each format; the estimate is of the step without."""

    @property
    def peak_bytes(self) -> int:
        """The most that PyTorch's allocator holds at once; of several strategies or recipes the largest."""
        return max({**self.by_strategy, **self.by_recipe}.values(), default=self.estimate.peak_bytes)

    @property
    def peaks(self) -> dict[str, int]:
        """The peak of each step in bytes, by its name; with recipe, of the step in each format."""
        if self.by_recipe:
            return {f"{cell_name(self.workload)} in {name}": peak for name, peak in self.by_recipe.items()}
        return {cell_name(one.workload): one.peak_bytes for one in self.steps or (self,)}

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None where no memory was named, and with recipe, whose answer says what is left."""
        return self.verdict.fits if self.verdict is not None else None

    @property
    def plans(self) -> "tuple[Plan, ...]":
        """Changes that would make it fit, the cheapest first; none where it fits, or nothing helps."""
        return self.verdict.plans if self.verdict is not None else ()

    @property
    def ways(self) -> "tuple[Way, ...]":
        """Single changes with the memory that each leaves, enough or not; none where it fits, or for a module."""
        return self.verdict.ways if self.verdict is not None else ()

    @property
    def largest_batch(self) -> int | None:
        """The largest batch that fits, in samples, 0 if none does; None where it is not looked for, as for the
        textbook's model."""
        return self.verdict.largest_batch if self.verdict is not None else None

    @property
    def longest_sequence(self) -> int | None:
        """The longest sequence that fits, in tokens, 0 if none does; None where it is not looked for, as for the
        textbook's model."""
        return self.verdict.longest_sequence if self.verdict is not None else None


@spelled_out()
def fit(
    model: "str | nn.Module | None" = None,
    batch: object = None,
    loss: "Callable[..., Any] | None" = None,
    *,
    module: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    memory: int | str | None = None,
    device: str | Sequence[str] | None = None,
    fail_if_larger: int | str | None = None,
    seq_len: int | Sequence[int] | None = None,
    batch_size: int | Sequence[int] | None = None,
    dtype: Dtype | Sequence[Dtype] | None = None,
    phase: Phase | None = None,
    parallel: str | Sequence[str] | None = None,
    ranks: int | None = None,
    recipe: str | Sequence[str] | None = None,
    attention: Attention | Sequence[Attention] | None = None,
    kernels: str | Mapping[str, str] | None = None,
    projections: Projections | None = None,
    compile: Compile | None = None,
    graph: Graph | None = None,
    optimizer: "Optimizer | torch.optim.Optimizer | None" = None,
    clip: float | None = None,
    checkpointing: str | Sequence[str] | None = None,
    accumulation: int | Sequence[int] | None = None,
    run: str | Path | None = None,
    runs: str | Path = "runs",
    **options: Unpack[ModelOptions],
) -> Fitted:
    """Predict the peak memory of a step on a GPU, say whether it fits, and what would make it fit. Needs no GPU.

        found = stepscope.fit("xl", seq_len=1024, memory="80GiB")                  # the textbook's model
        found = stepscope.fit(module="train.py:make", arguments={"width": 64}, memory="80GiB")
        found = stepscope.fit(net, batch, loss, memory="80GiB")                    # a module of your own
        found.fits, found.peak_bytes, found.largest_batch
        [plan.options for plan in found.plans]
        stepscope.fit("xl", seq_len=[256, 512], device=["4090", "H100"]).steps     # of lists a table, and each step

    What is predicted, one of four:

    - model, the name of a preset of the textbook's model, as `stepscope models` lists them: tiny, small, medium, large,
      xl and larger ones (left out: small), with batch_size sequences (4) of seq_len tokens (512), an attention, and
      {options} in place of the preset's own, and kernels, compile and
      graph as in `stepscope.run`. It is computed by formula, and needs no PyTorch.
    - module, a factory as `--module` names it: "package.module:factory", "file.py:factory", or the config.json of a
      Hugging Face model; arguments are what it is called with, with seq_len and batch_size. It runs in a process of its
      own. The longest sequence is looked for, too, where seq_len is an argument.
    - model, an nn.Module, with its batch and its loss, as `stepscope.run` takes them. It is copied in this process,
      once for each variant that is tried, and its sequences keep their length. optimizer may be one that holds its
      parameters.
    - run, one that is stored, as `stepscope.show` takes it with runs: a loop that `watch` has traced, with other
      batch_size, seq_len and dtype; where it was not, what it measured on a GPU, on another device or with another
      batch_size, of which it gives a bound.

    A module of your own runs on fake tensors, which have sizes and no values: operators whose output depends on values
    are counted at their largest or refused by name. A compiled step (compile) is predicted as it runs without; replayed
    CUDA graphs and a step of your own with phases are refused.

    memory: how much PyTorch may allocate, in bytes or as in "80GiB".
    device: a device by its name, as in "H100", or several: how much PyTorch states of it.
    fail_if_larger: the largest peak that is right, in bytes or as in "22GiB".
    parallel, ranks: what one of so many ranks (2) holds of the textbook's step, by strategy, as in ["zero1", "none"].
    recipe: what the step holds with operands of linear layers in these formats of blocks, as in ["mxfp8", "nvfp4"], and
    with a device the least time of its products, by its datasheet; dtype is bf16-master then, and bf16 of a module.
    dtype, phase, projections, optimizer, clip, checkpointing, accumulation: as in `stepscope.run`, for any model.

    Of a list the result is the step that fits least, or has the largest peak; its answer is the table of all.

    Without memory and device the peak alone is predicted.

    Raises InputError for a name that is not known, sizes that cannot be, what cannot be predicted, and where memory and
    device are both given; LimitExceeded where the peak is larger than fail_if_larger.
    """
    choices = choices_among("fit", locals(), options)
    check_one_model(model, module, arguments, batch=batch, loss=loss, optimizer=optimizer)
    budgets, names = _budgets(memory, device)
    limit = None if fail_if_larger is None else _size(fail_if_larger, "fail_if_larger")
    several: dict[str, tuple[Any, ...]] = {
        name: (*value,) if isinstance(value, (list, tuple)) else (value,) for name, value in choices.items()
    }
    if empty := [name for name, values in several.items() if not values]:
        raise InputError(f"{empty[0]} is an empty list: name at least one value")
    strategies = several.pop("parallel", ())
    preset = model if isinstance(model, str) else None
    is_textbook = module is None and run is None and model is preset
    if recipe is not None:
        others = {"run": run, "parallel": parallel, "ranks": ranks}
        if strange := [name for name, value in others.items() if value is not None]:
            raise InputError(f"recipe is of one new step: leave out {' and '.join(strange)}; `plan --recipe` has ranks")
        if len(steps := _steps(model, batch, loss, module, arguments, several)) > 1:
            raise InputError(f"recipe looks at one step, and these options name {len(steps)}: give each one value")
        ((step, made),) = steps
        with contextlib.nullcontext() if made is None else gradients_kept(model):
            asked, words = (recipe,) if isinstance(recipe, str) else recipe, ("recipe", "device")
            found = _in_blocks(step, asked, budgets, names, words, module=made, dtype_is_given=dtype is not None)
    elif strategies:
        if budgets or not is_textbook:
            raise InputError("parallel is of the textbook's model, and asks for no budget: leave the others out")
        found = _held(_textbook(preset, several), strategies, ranks or 2)
    else:
        if ranks is not None:
            raise InputError("ranks belong to parallel: say which, as in parallel='zero1'")
        if run is None:
            fits = _each_predicted(_steps(model, batch, loss, module, arguments, several), model, budgets)
        elif model is not None or module is not None or several.keys() - {*_BESIDE_RUN}:
            raise InputError("run says which step: leave out all else of it but batch_size, seq_len and dtype")
        else:
            fits = _of_run(str(run), Path(runs), several, budgets)
        found = _of_several(fits, names) if len(fits) > 1 or len(fits[0]) > 1 else _fitted(fits[0][0])
    _refuse_larger(found.peaks, limit, "fail_if_larger")
    return found


def _steps(
    model: object,
    batch: object,
    loss: Any,
    module: str | None,
    arguments: Mapping[str, Any] | None,
    several: Mapping[str, tuple[Any, ...]],
) -> "list[tuple[Workload, Callable[[], UserModule] | None]]":
    """The steps of every combination of the choices; of a module that exists already each with what copies it."""
    if module is None and (model is None or isinstance(model, str)):
        return [(step, None) for step in _textbook(model, several)]
    combined = [dict(zip(several, values, strict=True)) for values in itertools.product(*several.values())]
    if module is not None:
        return [(of_factory(module, arguments, one), None) for one in combined]
    made = [of_object(model, batch, loss, one) for one in combined]
    return [(step, functools.partial(_made, copied)) for step, copied in made]


def _each_predicted(
    steps: "Sequence[tuple[Workload, Callable[[], UserModule] | None]]", model: object, budgets: "Sequence[Budget]"
) -> "list[list[AnyFit]]":
    """The predictions of `_steps`, each for every budget."""
    search = len(steps) == 1
    fits: list[list[AnyFit]] = []
    for step, made in steps:
        if made is None:
            fits.append(_predicted(step, budgets, search=search))
            continue
        from stepscope.engine.fake_module import fit_module

        assert isinstance(step, FactoryWorkload)
        with gradients_kept(model):
            fits.append([*fit_module(step, budgets, module=made, search=search)])
    return fits


def _made(copied: "Callable[[], Loaded]") -> "UserModule":
    loaded = copied()
    if loaded.user_module is None:
        raise InputError(f"{loaded.name} is a step of its own, with phases: give its module and a batch")
    return loaded.user_module


def _textbook(model: str | None, several: Mapping[str, tuple[Any, ...]]) -> list[Workload]:
    """The workloads of the textbook's model; of one, with the words of one for what cannot be."""
    options = {"model": (model or "small",), **several}
    if all(len(values) == 1 for values in options.values()):
        return [OneWorkload({name: value for name, (value,) in options.items()}).workload(seq_len=512)]
    return ManyWorkloads(options).workloads(seq_len=512)


def _of_several(fits: "Sequence[Sequence[AnyFit]]", names: Sequence[str]) -> Fitted:
    """The step that fits least, or needs most, with each of them and the table of all."""
    from stepscope.allocations.prediction.answer import answer_fits

    every = tuple(_fitted(fit) for of_step in fits for fit in of_step)
    least = max(every, key=lambda one: (one.fits is False, one.peak_bytes))
    return Fitted(least.workload, least.estimate, least.verdict, shown_answer(answer_fits(fits, names)), every)


def _held(steps: Sequence[Workload], strategies: Sequence[str], ranks: int) -> Fitted:
    from stepscope.allocations.prediction.estimate import estimate

    answer = _moments(steps, strategies, ranks)
    peaks = {str(row[0]): row[-1] for row in answer.tables[0].rows if isinstance(row[-1], int)}  # the last row of each
    step = steps[0]
    assert isinstance(step, TextbookWorkload)
    return Fitted(step, estimate(step), None, shown_answer(answer), by_strategy=peaks)


def _in_blocks(step: Workload, *asked: Any, **how: Any) -> Fitted:
    """What a step holds in formats of blocks, asked as `fit_in_blocks` is."""
    from stepscope.questions.fit_apart import fit_in_blocks

    answer, fit = fit_in_blocks(step, *asked, **how)
    place = answer.tables[0].columns.index("peak")
    peaks = {str(row[0]): peak for row in answer.tables[0].rows[1:] if isinstance(peak := row[place], int)}
    return Fitted(fit.workload, fit.estimate, None, shown_answer(answer), by_recipe=peaks)


def _fitted(fit: "Fit[MemoryEstimate] | Fit[FakeEstimate]") -> Fitted:
    from stepscope.allocations.prediction.answer import answer_fit

    return Fitted(fit.workload, fit.estimate, fit if fit.budget else None, shown_answer(answer_fit(fit)))


def _budgets(memory: int | str | None, device: str | Sequence[str] | None) -> "tuple[list[Budget], tuple[str, ...]]":
    """The budgets that are meant, and the names of those of devices."""
    from stepscope.allocations.prediction.fit import budget_of_device, budget_of_memory

    if memory is not None and device is not None:
        raise InputError("memory and device both say how much there is: give one of them")
    if device is not None:
        names = (device,) if isinstance(device, str) else tuple(device)
        return [budget_of_device(name, "; or give memory, as in memory='80GiB'") for name in names], names
    return ([] if memory is None else [budget_of_memory(_size(memory, "memory"))]), ()


def _size(given: int | str, name: str) -> int:
    size = parse_bytes(given) if isinstance(given, str) else given
    if size <= 0:
        raise InputError(f"{name} is {given}: give bytes above zero, or a size as in '80GiB'")
    return size


def _refuse_larger(peaks: Mapping[str, int], limit: int | None, option: str) -> None:
    """Raise LimitExceeded where a peak is beyond the limit, with the step that is furthest. peaks: by what they are."""
    larger = {name: peak - limit for name, peak in peaks.items() if limit is not None and peak > limit}
    if limit is None or not larger:
        return
    name, by = max(larger.items(), key=lambda one: one[1])
    of = f" ({len(larger)} of {len(peaks)} steps are larger)" if len(peaks) > 1 else ""
    raise LimitExceeded(
        f"the predicted peak of {name} is {format_bytes(limit + by)}, {format_bytes(by)} larger than {option} "
        f"{format_bytes(limit)}{of}"
    )


Memory = Annotated[
    int | None,
    Option("How much PyTorch may allocate, as in 80GiB.", BUDGET, takes=parse_bytes, metavar="SIZE"),
]
Device = Annotated[
    tuple[str, ...] | None,
    Option("A device by its name, as in H100 or 4090: its GiB less the driver's share.", BUDGET, complete=device_names),
]
Parallel = Annotated[
    tuple[str, ...] | None,
    Option(
        "What one rank holds around the optimizer's step, by part, in each of these, as in zero1,none.",
        PARALLEL,
        metavar="NAMES",
    ),
]
Ranks = Annotated[int | None, Option("With --parallel: ranks that share the step.", PARALLEL)]
From = Annotated[
    str | None,
    Option(
        "A stored run, by a path, a part of its name or `last`: whether its step fits another card, or with another "
        "--batch-size, --seq-len or --dtype.",
        metavar="RUN",
    ),
]
FailIfLarger = Annotated[
    int | None,
    Option("Leave with code 1 where a peak is larger, as in 22GiB.", BUDGET, takes=parse_bytes, metavar="SIZE"),
]
Tensors = Annotated[
    bool,
    Option(
        "List what a block keeps for backward, with each size's arithmetic; of your own model, what its step holds at "
        "the peak."
    ),
]
Sweep = Annotated[bool, Option("The largest batch and the longest sequence that fit, by model: several, or all.")]
Fake = Annotated[bool, Option("Predict a second time, by running the step on PyTorch's fake tensors.")]
Against = Annotated[tuple[Path, ...], Option("Compare with the measured runs in this folder.", metavar="DIR")]
Apart = Annotated[
    tuple[Path, ...],
    Option("With --against: runs shown apart, and not counted (the model was corrected by them).", metavar="DIR"),
]


Recipe = Annotated[
    tuple[str, ...] | None,
    Option(
        "What the step holds, and the least time of its products, with operands in these formats of blocks.",
        WORKLOAD,
        choices=MULTIPLIED_BLOCKS,
    ),
]


_QUESTIONS = ("--tensors", "--sweep", "--fake", "--against", "--parallel", "--recipe")
_BESIDE_RUN = ("batch_size", "seq_len", "dtype")
_BESIDE_NO_RUN = tuple(
    flag
    for flag in (*flags_of("fit"), "--module", "--arg", *_QUESTIONS)
    if flag.removeprefix("--").replace("-", "_") not in _BESIDE_RUN
)


@verb(
    "fit",
    "stepscope fit --model xl --seq-len 1024 --device H100",
    "stepscope fit --model 2.7B --seq-len 128,512 --dtype fp32,bf16 --memory 80GiB",
    conflicts=(
        Rule(
            "needs",
            ("--apart", "--against"),
            "--apart belongs to --against: say which runs to compare with, or leave it out",
        ),
        Rule("alone", ("--from",), "--from says which step: leave out {}", _BESIDE_NO_RUN),
        Rule("conflict", _QUESTIONS, "{} are different questions: ask one at a time"),
        Rule("needs", ("--ranks", "--parallel"), "--ranks belongs to --parallel: say which, as in zero1,none"),
        Rule("alone", ("--parallel",), "--parallel asks for no budget: leave out {}", ("--memory", "--device")),
        Rule("alone", ("--tensors",), "--tensors asks for no budget: leave out {}", ("--memory", "--device")),
        Rule("alone", ("--against",), "--against asks for no budget: leave out {}", ("--memory", "--device")),
        Rule("alone", ("--against",), "--against takes its workloads from the runs: leave out {}", flags_of("fit")),
        Rule(
            "alone",
            ("--fail-if-larger",),
            "--fail-if-larger is of peaks: leave out {}",
            ("--tensors", "--sweep", "--against", "--parallel"),
        ),
        Rule("conflict", ("--memory", "--device"), "{} both say how much there is: give one of them"),
    ),
    model="small",
    seq_len="512",
)
def command(
    *,
    workloads: ManyWorkloads,
    from_: From = None,
    memory: Memory,
    device: Device = None,
    fail_if_larger: FailIfLarger = None,
    tensors: Tensors = False,
    sweep: Sweep = False,
    fake: Fake = False,
    parallel: Parallel = None,
    ranks: Ranks = None,
    recipe: Recipe = None,
    against: Against = (),
    apart: Apart = (),
    runs: Path,
    save: Path | None,
    shown: Presentation,
) -> None:
    """Predict the peak memory of a step, say whether it fits, and what would make it fit. Needs no GPU.

    Options of several values, as in --seq-len 128,512, make a table of every combination.
    """
    from stepscope.allocations.prediction.fit import budget_of_device, budget_of_memory

    if against:
        _compare(against, apart, save, shown)
        return
    budgets = [budget_of_memory(memory)] if memory is not None else [*map(budget_of_device, device or ())]
    if from_ is not None:
        with patient_progress() as tell:
            fits = _of_run(from_, runs, workloads.options, budgets, _Told(tell))
        _say_if_interrupted()
        _show_table(fits, device or (), runs, save, shown, fail_if_larger)
        return
    mode = next((flag for flag, asked in (("--tensors", tensors), ("--sweep", sweep), ("--fake", fake)) if asked), None)
    if sweep and not ({"module", "arg"} & set(workloads.options)):
        if len(budgets) != 1:
            raise InputError(
                "how much memory is there? Say --memory, as in --memory 80GiB, or one --device, as in --device H100"
            )
        _refuse_plot(save)
        _show_largest(_those_that_can_be(workloads), budgets[0], shown)
        return
    steps = workloads.workloads(model="small", seq_len=512)
    if parallel:
        _refuse_plot(save)
        shown.show(_moments(steps, parallel, ranks or 2))
        return
    mode = mode or ("--recipe" if recipe else None)
    if mode in ("--sweep", "--fake") and steps[0].sizes is None:
        raise InputError(f"{mode} is for the textbook's model: leave it out; a step of your own runs on fakes")
    if mode is not None and len(steps) > 1:
        raise InputError(f"{mode} looks at one step, and these options name {len(steps)}: give each one value")
    if len(steps) > 1:
        fits = _predicted_in_turn(steps, budgets)
        _show_table(fits, device or (), runs, save, shown, fail_if_larger)
        return
    _refuse_plot(save)
    step = steps[0]
    if tensors:
        _list_tensors(step, shown)
    elif recipe:
        words, is_given = ("--recipe", "--device"), "dtype" in workloads.options
        with patient_progress(_clock_of(steps)) as tell:
            found = _in_blocks(step, recipe, budgets, device or (), words, tell=tell, dtype_is_given=is_given)
        shown.show(found.answer)
        _refuse_larger(found.peaks, fail_if_larger, "--fail-if-larger")
    if tensors or recipe:
        return
    second = None
    with patient_progress(_clock_of(steps)) as tell:
        fits = _predicted(step, budgets, search=True, told=_Told(tell))
    _say_if_interrupted()
    if fake and isinstance(step, TextbookWorkload):
        from stepscope.engine.fake_module import estimate_by_running

        with stdout_kept_clean():
            second = estimate_by_running(step)
    _show(fits, second, runs, shown, fail_if_larger)


def _without_source(budget: "Budget") -> str:
    """The memory and whose it is; the answer says where the figure comes from."""
    return budget.said.partition(" (")[0]


class _Told:
    """Says what is tried, and what is known as soon as it is."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self._said: set[str] = set()

    def asked(self, step: Workload, budgets: "Sequence[Budget]") -> None:
        """Say what is predicted, as far as it is known before the step is made."""
        if isinstance(step, FactoryWorkload):
            unless = "" if step.factory.endswith(".json") else " unless it has its own"
            optimizer = f", {step.optimizer}{unless}" if step.optimizer else ""
            what = f"{step.name} ({step.origin}), {step.dtype}, {step.phase}{optimizer}"
        else:
            what = f"{describe_model(step)}, {describe_workload(step)}"
        into = " and ".join(budget.said for budget in budgets)
        self._say(f"{what}{f', into {into}' if into else ''}")

    def know(self, fits: "Sequence[AnyFit]", *, several: bool) -> None:
        """Say what is new in the predictions of one step for each budget: verdicts, plans, and the largest sizes. The
        answer has them in full: these are shorter. several: whether there are several budgets, of which each line names
        one.
        """
        from stepscope.allocations.prediction.answer import peak_in_words, sizes_that_fit

        for fit in fits:
            if fit.budget is not None:
                of = f" into {_without_source(fit.budget)}" if several else ""
                self._say(f"{peak_in_words(fit)}: it {'fits' if fit.fits else 'does not fit'}{of}")
                for plan in fit.plans:
                    self._say(f"it fits{of} with {plan.options}: {format_bytes(plan.peak_bytes)}")
                for size in sizes_that_fit(fit):
                    self._say(size.replace("that fits", f"that fits{of}"))

    def ended(self, step: Workload, fits: "Sequence[AnyFit]") -> None:
        """Say what is known of one of several steps, for each budget."""
        for fit in fits:
            into = f" into {_without_source(fit.budget)}" if fit.budget else ""
            into = f", {'fits' if fit.fits else 'does not fit'}{into}" if into else ""
            most = "at most " if fit.is_bound else ""
            self._say(f"{cell_name(step)}: {most}{format_bytes(fit.peak_bytes)}{into}")

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.tell(Stage(name=line, lasts=True))


def _predicted(
    step: Workload, budgets: "Sequence[Budget]", *, search: bool, told: _Told | None = None, place: float | None = None
) -> "list[AnyFit]":
    """The prediction of a step for each budget, or of its peak alone where there is none.

    told: is told what is known and tried. place: the share of several steps that is done, of which no more is told.
    """
    if told is not None and place is None:
        told.asked(step, budgets)
    elif told is not None:
        told.tell(Stage(name="predicting", detail=cell_name(step), fraction=place))
    tell = None if told is None else told.tell
    work_out = functools.partial(_worked_out, step, budgets, search, tell)
    return _as_far_as_known(work_out, budgets, told if place is None else None)


def _as_far_as_known(
    work_out: Callable[..., "Sequence[AnyFit]"], budgets: "Sequence[Budget]", told: _Told | None
) -> "list[AnyFit]":
    """What is worked out by a function that takes `know`; where somebody is told, what was known when a signal came."""
    known: list[AnyFit] = []

    def know(fits: "Sequence[AnyFit]") -> None:
        known[:] = fits
        if told is not None:
            told.know(fits, several=len(budgets) > 1)

    try:
        return [*work_out(know=know)]
    except KeyboardInterrupt:
        if told is None or len(known) < max(1, len(budgets)):
            raise
        return known


def _worked_out(
    step: Workload,
    budgets: "Sequence[Budget]",
    search: bool,
    tell: Tell | None,
    know: "Callable[[Sequence[AnyFit]], object]",
) -> "list[AnyFit]":
    if isinstance(step, FactoryWorkload):
        from stepscope.questions.fit_apart import fit_apart

        return [*fit_apart(step, budgets, search=search, tell=tell, know=know)]
    from stepscope.allocations.prediction.fit import SymbolicPredictor, judge

    assert isinstance(step, TextbookWorkload)
    if tell is not None and search:
        tell(Stage(name="looking for what would make it fit" if budgets else "predicting"))
    gc.disable()  # a symbolic step makes a million objects, none of them in a cycle
    try:
        predictor = SymbolicPredictor(step)
        fits: list[AnyFit] = []
        for budget in budgets or [None]:
            before = [*fits]
            fits.append(judge(predictor, budget, search=search, know=lambda fit, before=before: know([*before, fit])))
        return fits
    finally:
        gc.enable()


def _predicted_in_turn(steps: Sequence[Workload], budgets: "Sequence[Budget]") -> "list[list[AnyFit]]":
    """The predictions of several steps; of the first ones, where a signal ends it."""
    fits: list[list[AnyFit]] = []
    with patient_progress(_clock_of(steps)) as tell:
        told = _Told(tell)
        for number, step in enumerate(steps):
            try:
                fits.append(_predicted(step, budgets, search=False, told=told, place=number / len(steps)))
                told.ended(step, fits[-1])
            except KeyboardInterrupt:
                if not fits:
                    raise
            if interrupts.received() is not None:
                break
    _say_if_interrupted(f" of {len(steps)} steps")
    return fits


def _clock_of(steps: Sequence[Workload]) -> Callable[[], float]:
    return time.monotonic if isinstance(steps[0], FactoryWorkload) else time.process_time


def _say_if_interrupted(of: str = "") -> None:
    if interrupts.received() is not None:
        warn(f"{interrupts.interruption()}: this is what was known{of}")


def _one_step(steps: Sequence[Workload], flag: str) -> TextbookWorkload:
    """The step that an option looks at. Raises InputError for several, and for one of your own model."""
    if not isinstance(steps[0], TextbookWorkload):
        raise InputError(f"{flag} is for the textbook's model: leave it out")
    if len(steps) > 1:
        raise InputError(f"{flag} looks at one step, and these options name {len(steps)}: give each one value")
    return steps[0]


def _moments(steps: Sequence[Workload], parallel: Sequence[str], ranks: int) -> "Answer":
    """The Answer on what one rank holds of a step, by strategy. Raises InputError for any other step."""
    from stepscope.allocations.prediction.answer import answer_moments

    step = _one_step(steps, "--parallel")
    if step.phase != "train":
        raise InputError(f"--parallel is of training, not of {step.phase}: --phase train")
    if unknown := [name for name in parallel if name.partition(":")[0] not in (NOT_PARALLEL, *STRATEGIES)]:
        choose(unknown[0], (NOT_PARALLEL, *STRATEGIES), "parallel")
    shared = [
        msgspec.structs.replace(step, parallel=name, ranks=1 if name == NOT_PARALLEL else ranks) for name in parallel
    ]
    return answer_moments(shared)


def _of_run(
    name: str,
    runs: Path,
    choices: Mapping[str, tuple[Any, ...]],
    budgets: "Sequence[Budget]",
    told: _Told | None = None,
) -> "list[list[AnyFit]]":
    """The predictions of a stored run's step, of every combination of the choices and for each budget: by its workload,
    where that can be made again, by what its watch has traced, or else by what it measured."""
    from stepscope.allocations.prediction.fit import fit_of_run
    from stepscope.core.run_directory import find_run_path, load_run

    path = find_run_path(name, runs)
    run = load_run(path)
    step = run.workload
    several = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    fits: list[list[AnyFit]] = []
    for changes in several:
        memory = run.evidence.memory
        measured = memory is not None and memory.allocated_peak is not None
        if isinstance(step, TextbookWorkload) and step.parallel == NOT_PARALLEL:
            sized = msgspec.structs.replace(step, **changes)
            fits.append(_predicted(sized, budgets, search=len(several) == 1, told=told if len(several) == 1 else None))
        elif isinstance(step, WatchedWorkload) and (changes or not measured):
            if told is not None:
                told.tell(Stage(name=f"loading what run {run.id} has traced"))
            from stepscope.engine.traced_loop import fit_traced

            directory = path if path.is_dir() else path.parent
            traced = functools.partial(fit_traced, run, directory, changes, budgets, search=len(several) == 1)
            if told is None or len(several) > 1:
                fits.append([*traced()])
            else:
                fits.append(_as_far_as_known(functools.partial(traced, tell=told.tell), budgets, told))
        elif others := [name for name in changes if name != "batch_size"]:
            flags = " and ".join(ManyWorkloads({name: choices[name] for name in others}).flags)
            raise InputError(f"run {run.id} answers for another batch or card: give its factory, --module, for {flags}")
        else:
            fits.append([fit_of_run(run, changes.get("batch_size"), budget) for budget in budgets or [None]])
    return fits


def _refuse_plot(save: Path | None) -> None:
    if save is not None:
        raise InputError("--save draws several steps, or belongs to --against: give an option several values")


def _those_that_can_be(workloads: ManyWorkloads) -> list[TextbookWorkload]:
    """The workload with each model; a model that cannot have the options is left out, which is said.

    Raises InputError where it is none, and for options of several values.
    """
    kept: list[TextbookWorkload] = []
    faults: list[str] = []
    others = {name: values for name, values in workloads.options.items() if name != "model"}
    if several := [name for name, values in others.items() if len(values) > 1]:
        flags = ", ".join(ManyWorkloads({name: others[name] for name in several}).flags)
        raise InputError(f"--sweep takes several models, and of {flags} one value")
    one = {name: values[0] for name, values in others.items()}
    for name in workloads.options.get("model", tuple(PRESETS)):
        try:
            kept.append(OneWorkload({**one, "model": name}).workload(seq_len=512))
        except InputError as error:
            faults.append(f"{name}: {error}")
    if not kept:
        raise InputError(f"no model is left: {'; '.join(faults)}")
    for fault in faults:
        warn(f"left out, {fault}")
    return kept


def _show(
    fits: "Sequence[AnyFit]", second: "FakeEstimate | None", runs: Path, shown: Presentation, limit: int | None
) -> None:
    """Show the predictions of one step, and keep them as forecasts. second: of the textbook's step on fake tensors.
    Raises LimitExceeded where it is larger than the limit."""
    from stepscope.allocations.prediction.answer import answer_fit, answer_second, fit_document
    from stepscope.core.run_directory import FORECASTS_FILE, RUN_FILE

    searched = interrupts.received() is None
    answers = [answer_fit(fit, searched=searched) for fit in fits]
    documents = [{**fit_document(fit, answer), **_over(fit, limit)} for fit, answer in zip(fits, answers, strict=True)]
    if second is not None:
        answers.append(answer_second(fits[0].estimate, second))
        for document in documents:
            document["fake"] = msgspec.to_builtins(second)
    if (runs / FORECASTS_FILE).is_file() and any(runs.glob(f"*/{RUN_FILE}")):
        # How far forecasts that were kept here were off.
        from stepscope.runs.history import error_bars, judged_in

        if bars := error_bars(judged_in(runs)[0]):
            answers[-1] = msgspec.structs.replace(answers[-1], asides=(*answers[-1].asides, bars))
    _keep(fits, runs)
    shown.show(*answers, document=lambda: json_document(documents[0] if len(documents) == 1 else documents))
    _refuse_larger({cell_name(fits[0].workload): fits[0].peak_bytes}, limit, "--fail-if-larger")


def _over(fit: "AnyFit", limit: int | None) -> dict[str, int]:
    """What --fail-if-larger adds to a document."""
    return {} if limit is None else {"limit_bytes": limit, "larger_by_bytes": max(0, fit.peak_bytes - limit)}


def _show_table(
    fits: "Sequence[Sequence[AnyFit]]",
    names: Sequence[str],
    runs: Path,
    save: Path | None,
    shown: Presentation,
    limit: int | None,
) -> None:
    """Show the predictions of several steps as one table, and keep them as forecasts; those of one step by themselves.
    names: those of the budgets."""
    if len(fits) == 1:
        _refuse_plot(save)
        _show(fits[0], None, runs, shown, limit)
        return
    from stepscope.allocations.prediction.answer import answer_fits, fit_document

    every = [fit for of_step in fits for fit in of_step]
    _keep(every, runs)
    documents = [{**fit_document(fit), **_over(fit, limit)} for fit in every]
    shown.show(answer_fits(fits, names), document=lambda: json_document(documents), save=save)
    peaks = {cell_name(of_step[0].workload): of_step[0].peak_bytes for of_step in fits}
    _refuse_larger(peaks, limit, "--fail-if-larger")


def _keep(fits: "Sequence[AnyFit]", runs: Path) -> None:
    """Keep predictions as forecasts, beside the runs that will show how far off they were."""
    from stepscope.core.run_directory import forecast_of_peak, keep_forecasts

    forecasts = [
        forecast_of_peak(
            "fit",
            fit.workload.key,
            fit.peak_bytes,
            budget_bytes=fit.budget.usable_bytes if fit.budget else None,
            fits=fit.fits,
            is_bound=fit.is_bound,
        )
        for fit in fits
    ]
    if fault := keep_forecasts(runs, forecasts):
        warn(fault)


def _list_tensors(workload: Workload, shown: Presentation) -> None:
    if isinstance(workload, FactoryWorkload):
        _list_held(workload, shown)
        return
    assert isinstance(workload, TextbookWorkload)
    if workload.phase == "forward":
        raise InputError("inference keeps nothing for backward: --tensors needs --phase train or forward-backward")
    from stepscope.allocations.prediction.answer import answer_tensors
    from stepscope.allocations.prediction.estimate import kept_by_block

    kept = kept_by_block(workload)
    rows = [
        {**msgspec.to_builtins(tensor), "bytes_each": tensor.bytes_each, "total_bytes": tensor.total_bytes}
        for tensor in kept
    ]
    shown.show(answer_tensors(workload, kept), document=lambda: json_document(rows))


def _list_held(workload: FactoryWorkload, shown: Presentation) -> None:
    from stepscope.allocations.prediction.answer import answer_held
    from stepscope.questions.fit_apart import held_apart

    with patient_progress() as tell:
        held = held_apart(workload, tell)
    shown.show(answer_held(held.fit, held.tensors), document=lambda: json_document(held.tensors))


def _show_largest(workloads: list[TextbookWorkload], budget: "Budget", shown: Presentation) -> None:
    from stepscope.allocations.prediction.answer import answer_largest
    from stepscope.allocations.prediction.fit import largest_that_fits

    with told_where_long("looking for the largest sizes"):
        results = [largest_that_fits(workload, budget) for workload in workloads]
    rows = [
        {"model": largest.workload.model.name, "batch_size": largest.batch_size, "seq_len": largest.seq_len}
        for largest in results
    ]
    shown.show(answer_largest(results, budget.said), document=lambda: json_document(rows))


def _compare(folders: tuple[Path, ...], apart: tuple[Path, ...], save: Path | None, shown: Presentation) -> None:
    from stepscope.allocations.prediction.answer import answer_accuracy, compare
    from stepscope.core.run_directory import load_runs

    runs, faults = load_runs(list(folders))
    others, other_faults = load_runs(list(apart))
    for fault in [*faults, *other_faults]:
        warn(f"left out: {fault}")
    with told_where_long(f"predicting {counted(len(runs) + len(others), 'run')}"):
        accuracy = compare(runs, others)
    if not accuracy.comparisons:
        raise InputError(
            f"no run in {', '.join(map(str, folders))} has measured peaks: measure on a GPU, as `stepscope sweep` does"
        )
    known = {one.run_id for one in (*accuracy.comparisons, *accuracy.apart)}
    if left := [run.id for run in (*runs, *others) if run.status == "done" and run.id not in known]:
        named = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
        warn(f"left out, without a measured peak or not predicted by formulas: {counted(len(left), 'run')}, {named}")
    shown.show(answer_accuracy(accuracy), document=lambda: json_document(accuracy), save=save)
