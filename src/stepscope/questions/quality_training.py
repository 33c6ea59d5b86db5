"""Training in every precision from the same initial parameters, with the same batches and the same learning rates.

`train` is of the textbook's model; `OwnTraining` gives the same loop a module of the user's own.

fp32, tf32, bf16 and fp16 have parameters in fp32; the latter two run forward under autocast. fp16's loss is scaled by a
DynamicLossScaler; fp16-unscaled's is not. fp8 and fp8-row are as bf16, with products of 8 bits in the blocks. bf16-pure
has everything that forward and backward see in bf16, from the rounded fp32 parameters on; its moments and its
optimizer's arithmetic are fp32 (`training/optimizer.py`). Formats of blocks are simulated: they are fp32, and the
products of linear layers take operands in blocks; `-recipe` is what papers train with in 4 bits (arXiv:2509.25149).
"""

import contextlib
import gc
import gzip
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stepscope.core.errors import DeviceError, InputError, choose, one_line
from stepscope.core.float_formats import BLOCK_FORMATS, BlockFormat
from stepscope.core.model_config import LARGEST, ModelConfig, whole_number
from stepscope.core.precisions import PRECISIONS, Dtype
from stepscope.core.workloads import TextbookWorkload
from stepscope.questions import quality_answer
from stepscope.questions.scaling import DynamicLossScaler
from stepscope.questions.steps import elements_of, factory_workload, in_fp32, step_of, trained_parameters
from stepscope.recording.compilation import reset_compilation
from stepscope.recording.precision import matmul_precision
from stepscope.recording.step import drive
from stepscope.training import training_step
from stepscope.training.half_optimizers import AdamWBf16Parameters, Keeping
from stepscope.training.scaled_products import Recipe, block_products, first_and_last, plain_products, scale_products
from stepscope.training.transformer import Transformer
from stepscope.training.user_module.module_step import ModuleStep
from stepscope.training.user_module.user_code import moved, user_errors

# The text that is trained on, as bytes: `text/README.md` says whose it is and under what licence.


WORKS = {"alice.txt.gz": "Carroll, Alice in Wonderland", "paradise_lost.txt.gz": "Milton, Paradise Lost"}
LICENCE = "public domain"
BYTE_VALUES = 256
_HELD_OUT = 10
"""One part in so many of each work, its last, is for validation."""


@dataclass(frozen=True)
class BundledText:
    """The text that is trained on, and the text that is held out."""

    train: bytes
    held_out: bytes

    @property
    def unigram_loss(self) -> float:
        """The loss on held-out text, in nats a byte, of a model that knows only how often each byte is in the other.

        Every count is one more than it is, so that no byte is impossible.
        """
        counts, total = Counter(self.train), len(self.train) + BYTE_VALUES
        held_out = Counter(self.held_out)
        return -sum(n * math.log((counts[byte] + 1) / total) for byte, n in held_out.items()) / len(self.held_out)


def bundled_text() -> BundledText:
    """The text, read from the installed package: nothing is downloaded."""
    works = [gzip.decompress(files("stepscope.questions").joinpath("text", name).read_bytes()) for name in WORKS]
    cuts = [len(work) - len(work) // _HELD_OUT for work in works]
    return BundledText(
        train=b"".join(work[:cut] for work, cut in zip(works, cuts, strict=True)),
        held_out=b"".join(work[cut:] for work, cut in zip(works, cuts, strict=True)),
    )


# One run.


WATCHED_STEPS = 10
"""The last steps of a run, in which zero gradients and swallowed updates are counted."""
_FETCHED_EVERY = 50
"""Steps between two readings of the losses, as on a GPU each reading waits for the device."""
_JUDGED_AT_ONCE = 64
"""Held-out sequences in one forward pass."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to train: its dtypes, its loss scale, and how it keeps its parameters."""

    dtype: Dtype
    autocast: torch.dtype | None = None
    scaled: bool = False
    keeping: Keeping | None = None
    """How parameters in bf16 are kept; None for parameters in fp32."""
    blocks: BlockFormat | None = None
    """The format of blocks that products of linear layers take."""
    recipe: bool = False
    """Whether gradients are then rounded by chance, those of weights rotated, and the first and last layers left."""

    @contextlib.contextmanager
    def products(self, model: nn.Module) -> Iterator[None]:
        """While open, the linear layers of a model take operands in the blocks, if any. The first forward raises
        InputError where none does."""
        if self.blocks is None:
            yield
            return
        recipe = Recipe(form=self.blocks, stochastic=self.recipe, rotate=self.recipe)
        # Others than nn.Linear multiply, too, as PyTorch's attention and the Conv1D of transformers.
        paths = [path for path, module in model.named_modules() if _has_matrix(module)]
        left = first_and_last(paths) if self.recipe and paths else set[str]()
        taken = False

        def recipe_of(path: str) -> Recipe | None:
            nonlocal taken
            taken = taken or path not in left
            return None if path in left else recipe

        def check(*_: object) -> None:
            hook.remove()
            if not taken:
                why = (
                    "the recipe leaves the first and the last alone" if self.recipe else "it has none of plain numbers"
                )
                raise InputError(f"no linear layer of the model takes operands in {recipe.form.name}: {why}")

        hook = model.register_forward_hook(check)
        try:
            with block_products(model, recipe_of):
                yield
        finally:
            hook.remove()


def _has_matrix(module: nn.Module) -> bool:
    """Whether a module has a matrix of its own that is no table of embeddings."""
    of_its_own = module.parameters(recurse=False)
    return not isinstance(module, nn.Embedding) and any(each.dim() == 2 for each in of_its_own)


REFERENCE = "fp32"
VARIANTS: dict[str, Variant] = {
    REFERENCE: Variant(dtype="fp32"),
    "tf32": Variant(dtype="tf32"),
    "bf16": Variant(dtype="bf16", autocast=torch.bfloat16),
    "fp16": Variant(dtype="fp16", autocast=torch.float16, scaled=True),
    "fp16-unscaled": Variant(dtype="fp16", autocast=torch.float16),
    "fp8": Variant(dtype="fp8", autocast=torch.bfloat16),
    "fp8-row": Variant(dtype="fp8-row", autocast=torch.bfloat16),
    "bf16-pure": Variant(dtype="bf16-pure", keeping="nearest"),
    "bf16-pure-stochastic": Variant(dtype="bf16-pure", keeping="stochastic"),
    "bf16-pure-kahan": Variant(dtype="bf16-pure", keeping="kahan"),
    "bf16-pure-master": Variant(dtype="bf16-pure", keeping="master"),
}
BLOCK_VARIANTS: dict[str, Variant] = {
    **{name: Variant(dtype="fp32", blocks=form) for name, form in BLOCK_FORMATS.items() if name not in VARIANTS},
    **{f"{name}-recipe": Variant(dtype="fp32", blocks=BLOCK_FORMATS[name], recipe=True) for name in ("mxfp4", "nvfp4")},
}
"""Runs of formats of blocks, which are trained where they are asked for."""
_EVERY = VARIANTS | BLOCK_VARIANTS


@dataclass(frozen=True, kw_only=True)
class TrainingSize:
    """The model, the batch, and the length of a training run."""

    model: ModelConfig
    batch_size: int
    seq_len: int
    steps: int
    learning_rate: float
    """The highest learning rate of the run; `rate_at` gives that of a step."""


SIZES: dict[str, TrainingSize] = {
    # fp16 products are slow on a CPU without instructions for them (five times fp32's step): two runs of ten have them.
    "cpu": TrainingSize(
        model=ModelConfig(name="quality-cpu", d_model=64, d_ff=128, layers=2, heads=2, vocabulary=BYTE_VALUES),
        batch_size=8, seq_len=32, steps=600, learning_rate=3e-3,
    ),
    "gpu": TrainingSize(
        model=ModelConfig(name="quality-gpu", d_model=384, d_ff=1024, layers=6, heads=6, vocabulary=BYTE_VALUES),
        batch_size=16, seq_len=256, steps=1000, learning_rate=1e-3,
    ),
}  # fmt: skip


@dataclass
class Trained:
    """The results of one training run."""

    losses: list[float] = field(default_factory=list)
    """The loss of each step before its update, in the run's own arithmetic; ends early if nothing is finite then."""
    final_loss: float = math.nan
    """The loss by which the run is judged after its last step, of the parameters that forward uses, in fp32 arithmetic:
    of the textbook's model in nats a byte over the whole held-out text."""
    skipped_steps: int | None = None
    """How many steps the loss scaler skipped; None without a loss scale."""
    zero_gradients: float | None = None
    """Share of the elements of gradients, embeddings' left out, that are zero, over the last WATCHED_STEPS."""
    swallowed: float | None = None
    """Share of the updates of bf16 parameters that changed nothing, over the same steps."""
    parameters: list[Tensor] = field(default_factory=list)
    """The parameters that forward uses, in fp32."""


def rate_at(step: int, steps: int, highest: float) -> float:
    """The learning rate of a step: linear warm-up over a tenth of the steps, then half a cosine down to a tenth."""
    warmup = max(1, steps // 10)
    if step <= warmup:
        return highest * step / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def initial_model(size: TrainingSize, seed: int) -> Transformer:
    """The model at the start, on the CPU and in fp32: the same for every variant and every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(size.model, max_seq_len=size.seq_len)
        model.initialise()
    return model


@dataclass(frozen=True)
class Batches:
    """The order of data: where in a text each sequence of each step begins."""

    text: Tensor
    """Bytes, on the device."""
    places: Tensor
    """(steps, batch_size)"""
    positions: Tensor
    """0 to seq_len, on the device."""

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets (B, S) of a step, counted from 1."""
        sequences = self.text[self.places[step - 1, :, None] + self.positions].long()
        return sequences[:, :-1], sequences[:, 1:]


def batches(size: TrainingSize, text: bytes, device: torch.device, seed: int) -> Batches:
    """Batches from random places of the text, the same for every variant and every device."""
    places = torch.randint(
        len(text) - size.seq_len, (size.steps, size.batch_size), generator=torch.Generator().manual_seed(seed)
    )
    on_device = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    return Batches(on_device, places.to(device), torch.arange(size.seq_len + 1, device=device))


def train(
    variant: Variant,
    size: TrainingSize,
    text: BundledText,
    *,
    device: torch.device,
    seed: int,
    start_seed: int | None = None,
    tell_step: Callable[[int], None] = lambda _step: None,
) -> Trained:
    """Train on the seed's batches, and judge what came out by the held-out text.

    start_seed: of the parameters at the start; the same if None.
    """
    model = initial_model(size, seed if start_seed is None else start_seed).to(device)
    if variant.keeping is not None:
        model = model.to(torch.bfloat16)
    if scaled := PRECISIONS[variant.dtype].scaled:
        scale_products(tuple(model.blocks), scaled, variant.dtype)
    data = batches(size, text.train, device, seed)
    forward = training_step.ForwardLoss(model)

    def loss(step: int) -> Tensor:
        with torch.autocast(device.type, dtype=variant.autocast, enabled=variant.autocast is not None):
            return forward(*data.at(step))

    # So that rounding at random is the same whatever ran before, and leaves no trace.
    with own_randomness(device), matmul_precision(variant.dtype), variant.products(model):
        torch.manual_seed(seed)
        trainee = Trainee(
            loss=loss,
            optimizer=adamw(list(model.parameters()), variant, device),
            rate=lambda step: rate_at(step, size.steps, size.learning_rate),
            # Bytes that a batch lacks have rows of zeros in the embedding's gradient.
            counted=[parameter for parameter in model.parameters() if parameter is not model.embedding.weight],
        )
        trained = train_steps(trainee, size.steps, variant.scaled, tell_step)
    trained.parameters = [parameter.detach().float().clone() for parameter in model.parameters()]
    plain_products(model)
    with matmul_precision("fp32"):
        trained.final_loss = held_out_loss(model.float(), text, size.seq_len)
    return trained


def own_randomness(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """While open, random numbers of the CPU and of the device are drawn apart from those of the caller."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """What one run trains, on its device and in its dtype."""

    loss: Callable[[int], Tensor]
    """The loss of a step's batch. Forward runs in the variant's precision; steps count from 1."""
    optimizer: torch.optim.Optimizer
    rate: Callable[[int], float] | None
    """The learning rate of a step; None where the optimizer has its own."""
    counted: Sequence[Tensor]
    """The parameters of which gradients of zero are counted."""


def train_steps(trainee: Trainee, steps: int, scaled: bool, tell_step: Callable[[int], None]) -> Trained:
    """Train for so many steps, fewer if nothing is finite any more. scaled: whether a DynamicLossScaler scales the
    loss."""
    trained = Trained(skipped_steps=0 if scaled else None)
    optimizer = trainee.optimizer
    scaler = DynamicLossScaler() if scaled else None
    zeros: list[Tensor] = []
    lost_updates: list[tuple[Tensor, Tensor]] = []

    def watch(_parameter: Tensor, _before: Tensor, wanted: Tensor, change: Tensor) -> None:
        lost_updates.append((((change == 0) & (wanted != 0)).sum(), (wanted != 0).sum()))

    def take(step: int) -> Tensor:
        if trainee.rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = trainee.rate(step)
        loss = trainee.loss(step)
        (loss if scaler is None else scaler.scaled(loss)).backward()
        if step > steps - WATCHED_STEPS:
            gradients = [parameter.grad for parameter in trainee.counted if parameter.grad is not None]
            if elements := sum(gradient.numel() for gradient in gradients):
                zeros.append(torch.stack([(gradient == 0).sum() for gradient in gradients]).sum() / elements)
            if isinstance(optimizer, AdamWBf16Parameters):
                optimizer.watch = watch
        if scaler is None:
            optimizer.step()
        else:
            trained.skipped_steps = (trained.skipped_steps or 0) + (not scaler.step(optimizer))
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    trained.losses = losses_in_turn(take, steps, tell_step)
    if zeros:
        trained.zero_gradients = float(torch.stack(zeros).mean())
    if lost_updates:
        lost, wanted = (float(torch.stack(counts).sum()) for counts in zip(*lost_updates, strict=True))
        trained.swallowed = lost / wanted if wanted else 0.0
    return trained


def losses_in_turn(take: Callable[[int], Tensor], steps: int, tell_step: Callable[[int], None]) -> list[float]:
    """The losses of so many steps, counted from 1, taken one after another; of fewer, if nothing is finite any more."""
    losses: list[float] = []
    waiting: list[Tensor] = []
    for step in range(1, steps + 1):
        waiting.append(take(step))
        if step % _FETCHED_EVERY == 0 or step == steps:
            fetched = torch.stack(waiting).tolist()
            waiting.clear()
            losses += fetched
            tell_step(step)
            if not any(map(math.isfinite, fetched)):
                break
    return losses


def adamw(parameters: Sequence[Tensor], variant: Variant, device: torch.device) -> torch.optim.Optimizer:
    """AdamW with PyTorch's defaults, which keeps parameters as the variant says. Each step sets its learning rate."""
    if variant.keeping is not None:
        return AdamWBf16Parameters(parameters, keeping=variant.keeping)
    return torch.optim.AdamW(parameters, fused=device.type == "cuda")


@torch.no_grad()
def held_out_loss(model: Transformer, text: BundledText, seq_len: int) -> float:
    """The mean loss over the held-out text in sequences of seq_len predictions; a rest at its end is not counted."""
    held_out = torch.frombuffer(bytearray(text.held_out), dtype=torch.uint8).to(next(model.parameters()).device)
    forward = training_step.ForwardLoss(model)
    count = len(held_out) // (seq_len + 1)
    sequences = held_out[: count * (seq_len + 1)].view(count, seq_len + 1)
    total = sum(
        (
            forward(part[:, :-1].long(), part[:, 1:].long()).double() * len(part)
            for part in sequences.split(_JUDGED_AT_ONCE)
        ),
        start=torch.zeros((), dtype=torch.float64, device=held_out.device),
    )
    return float(total) / count


# The runs of the study: which there are, one after another, and what each is judged by.


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of the study. Its parameters begin as those of `start_seed`."""

    name: str
    variant: Variant
    start_seed: int
    of_starts: bool = False
    """Whether it is fp32 from the parameters of another seed: a yardstick."""
    step: TextbookWorkload | None = None
    """The whole step that it trains by, in place of a variant's; the variant then says nothing."""

    @property
    def kind(self) -> quality_answer.Kind:
        if self.step is not None:
            return "whole steps"
        return "parameters in fp32" if self.variant.keeping is None else "parameters in bf16"


OTHER_STARTS = 2  # More runs of fp32, each from the parameters of the next seed.


def planned_runs(
    requested: Sequence[str] | None, check: Callable[[str, Variant], None], seed: int
) -> tuple[list[PlannedRun], dict[str, str]]:
    """fp32, fp32 from OTHER_STARTS other starts, and each variant, all if none is asked for; and why each other variant
    is left out.

    check: raises InputError for a variant that cannot run. So does this function, for one that was asked for.
    """
    if requested is not None and not requested:
        raise InputError(f"no variant is given: choose of {', '.join(_EVERY)}")
    for name in requested or ():
        choose(name, tuple(_EVERY), "variant")
    names: list[str] = []
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(requested or VARIANTS):
        try:
            check(name, _EVERY[name])
        except InputError as error:
            if requested is not None:
                raise
            left_out[name] = str(error).partition(":")[0]
        else:
            names.append(name)
    reference = VARIANTS[REFERENCE]
    starts = [
        PlannedRun(name=f"fp32, start of seed {start}", variant=reference, start_seed=start, of_starts=True)
        for start in range(seed + 1, seed + OTHER_STARTS + 1)
    ]
    others = [PlannedRun(name=name, variant=_EVERY[name], start_seed=seed) for name in names if name != REFERENCE]
    return [PlannedRun(name=REFERENCE, variant=reference, start_seed=seed), *starts, *others], left_out


LEAST_STEPS = 20
Told = Callable[[str, float], None]
"""A function that is called with the name of the run and the share of the study that is done."""


def check_training(steps: int, learning_rate: float, seed: int) -> None:
    """Raise InputError for a length, a learning rate or a seed that cannot be."""
    whole_number(steps, "steps", LEAST_STEPS, 1_000_000)
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise InputError(f"the learning rate {learning_rate!r} is not a positive number: choose one as 1e-3")
    whole_number(seed, "seed", 0, LARGEST)


def run_in_turn(
    planned: Sequence[PlannedRun],
    train: Callable[[PlannedRun, Callable[[int], None]], Trained | None],
    steps: int,
    tell: Told | None,
) -> tuple[dict[str, Trained], str | None]:
    """The results of the runs by name, and the name of the run in which the user stopped the study.

    train: returns None for a run that is left out. Raises KeyboardInterrupt where not even the first run has ended, and
    DeviceError where a GPU lacks memory.
    """
    runs: dict[str, Trained] = {}
    for i, each in enumerate(planned):

        def tell_step(step: int, place: int = i, name: str = each.name) -> None:
            if tell is not None:
                tell(f"{name} ({place + 1} of {len(planned)})", (place + step / steps) / len(planned))

        try:
            tell_step(0)
            trained = train(each, tell_step)
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"the GPU has too little memory for this size: {one_line(error)}") from error
        except KeyboardInterrupt:
            if not runs:
                raise
            return runs, each.name
        if trained is not None:
            runs[each.name] = trained
    return runs, None


def judged_runs(
    runs: Mapping[str, Trained], planned: Sequence[PlannedRun], steps: int, final: quality_answer.FinalLoss, bar: float,
    *, same_starts: bool = False,
) -> quality_answer.RunsJudged:  # fmt: skip
    """Judge each run beside fp32, the first, by what other starts change."""
    window, reach = quality_answer.window_of(steps), quality_answer.reach_of(steps)
    there = [each for each in planned if each.name in runs]
    curves = {each.name: quality_answer.smoothed(runs[each.name].losses, window) for each in there}
    started = [curves[each.name] for each in there if each.name == REFERENCE or each.of_starts]
    whole = all(len(curve) == steps and quality_answer.not_finite_from(curve) is None for curve in started)
    apart = quality_answer.starts_apart(started, reach) if whole and len(started) > 1 else None
    judged: list[quality_answer.RunJudged] = []
    for each in there:
        run, departs = runs[each.name], None
        if apart is not None and each.name != REFERENCE and not each.of_starts:
            departs = quality_answer.departure(run.losses, curves[REFERENCE], apart, window=window, reach=reach)
        judged.append(
            quality_answer.RunJudged(
                name=each.name,
                of_starts=each.of_starts,
                kind=each.kind,
                losses=curves[each.name],
                final_loss=run.final_loss,
                departs=departs,
                not_finite_from=quality_answer.not_finite_from(run.losses),
                skipped_steps=run.skipped_steps,
                zero_gradients=run.zero_gradients,
                swallowed=run.swallowed,
            )
        )
    return quality_answer.RunsJudged(
        reference=judged[0], others=tuple(judged[1:]), apart=apart, steps=steps, window=window, reach=reach,
        seed=planned[0].start_seed, final=final, bar=bar, same_starts=same_starts,
    )  # fmt: skip


# Trains by a whole step, made of the choices that `run` has: does the fast step train as the textbook's does?
#
# A Variant is a precision, in the plainest code. Here forward, backward and the update are those that
# `run` measures, with their kernels, compiler, optimizer and CUDA graphs; start, batches and learning rates are those
# of every other run. Under a graph the learning rate is a tensor, which each replay reads.


FIXED = ("model", "batch_size", "seq_len", "seed", "phase", "parallel", "ranks")
"""What the study says itself: a step that differs in it trains something else."""
_FIELDS = frozenset(TextbookWorkload.__struct_fields__)
"""What a step may say; the sizes of a model are none of it."""


def whole_steps(
    changes: Sequence[Mapping[str, Any]], size: TrainingSize, device: torch.device, seed: int
) -> list[PlannedRun]:
    """A run for each step that differs from the plain one in fp32 by these fields.

    Raises InputError for one that trains something else, or that cannot run here.
    """
    base = TextbookWorkload(model=size.model, batch_size=size.batch_size, seq_len=size.seq_len, dtype="fp32", seed=seed)
    planned: dict[str, PlannedRun] = {}
    for change in changes:
        fixed = [f"--{field.replace('_', '-')}" for field in change if field in FIXED or field not in _FIELDS]
        if fixed:
            raise InputError(f"--against has {', '.join(fixed)}, which every run of this study shares: leave it out")
        step = msgspec.structs.replace(base, **change)
        training_step.check_supported(step, device)
        name = f"step {' '.join(step.words(*FIXED))}"
        planned[name] = PlannedRun(name=name, variant=VARIANTS[REFERENCE], start_seed=seed, step=step)
    return list(planned.values())


@dataclass(eq=False)
class _Given(Sequence[training_step.Batch]):
    """The batches of all steps, each made when it is asked for."""

    data: Batches

    def __len__(self) -> int:
        return len(self.data.places)

    def __getitem__(self, index: int) -> training_step.Batch:  # pyright: ignore[reportIncompatibleMethodOverride]  (no slices)
        return self.data.at(index + 1)


def train_whole_step(
    workload: TextbookWorkload, size: TrainingSize, text: BundledText, *, device: torch.device, seed: int,
    tell_step: Callable[[int], None] = lambda _step: None,
) -> Trained:  # fmt: skip
    """Train on the seed's batches from the seed's start, and judge what came out as every run is judged."""
    start, data = initial_model(size, seed), _Given(batches(size, text.train, device, seed))
    if workload.compile != "eager":
        reset_compilation()
    with own_randomness(device), matmul_precision(workload.dtype):
        step = training_step.AssembledStep(
            training_step.textbook_parts(workload, device, start.state_dict(), data), workload, device
        )
        step.keep_losses()
        torch.manual_seed(seed)
        trained = Trained(skipped_steps=0 if step.scaler.is_enabled() else None)
        trained.losses = losses_in_turn(_stepper(step, size, trained), size.steps, tell_step)
    plain_products(step.model)
    used = {name: tensor.detach().float() for name, tensor in step.model.state_dict().items()}
    trained.parameters = [used[name].clone() for name, _ in start.named_parameters()]
    with matmul_precision("fp32"):
        judge = start.to(device)
        judge.load_state_dict(used)
        trained.final_loss = held_out_loss(judge, text, size.seq_len)
    return trained


def _stepper(step: training_step.AssembledStep, size: TrainingSize, trained: Trained) -> Callable[[int], Tensor]:
    """Take a step, counted from 1, at its learning rate; its loss before the update."""
    optimizer = step.optimizer
    assert optimizer is not None
    replayed = step.workload.graph == "step"
    if replayed:
        rate = torch.zeros((), device=step.device)
        for group in optimizer.param_groups:
            group["lr"] = rate

    def take(number: int) -> Tensor:
        for group in optimizer.param_groups:
            if replayed:
                group["lr"].fill_(rate_at(number, size.steps, size.learning_rate))
            else:
                group["lr"] = rate_at(number, size.steps, size.learning_rate)
        scale = step.scaler.get_scale() if trained.skipped_steps is not None else 0.0
        step.prepare()
        drive(step)
        if trained.skipped_steps is not None and step.scaler.get_scale() < scale:
            trained.skipped_steps += 1  # PyTorch lowers the scale after a step that it skipped
        assert step.mean_loss is not None
        return step.mean_loss

    return take


# A user's module, made anew for each run, and its runs.


class Subject:
    """A user's own module, made anew for each run, with the batches and the start that all runs share."""

    def __init__(self, factory: str, arguments: Mapping[str, Any] | None, device: torch.device, seed: int) -> None:
        self.workload = factory_workload(factory, arguments, phase="forward-backward", seed=seed)
        self.device = device
        step = self._step_of(VARIANTS[REFERENCE], seed)
        self.name = step.user_module.name
        self.optimizer = None if step.user_module.optimizer is None else type(step.user_module.optimizer).__name__
        self.batches: Sequence[Any] = [_copied(batch) for batch in step.batches]
        self.elements = elements_of(step)
        with user_errors(f"{self.name} has parameters that cannot be copied"):
            self.start = [tensor.detach().clone() for tensor in _state(step.model)]
        self.untrained_loss = self.judged(step)

    def check(self, name: str, variant: Variant) -> None:
        """Raise InputError for a variant that cannot run here, or of this module."""
        training_step.check_choices(msgspec.structs.replace(self.workload, dtype=variant.dtype), self.device)
        if variant.keeping not in (None, "nearest") and self.optimizer is not None:
            raise InputError(
                f"the parameters of {name} are kept by an AdamW of stepscope's, and the factory gives an optimizer of "
                f"its own, {self.optimizer}: leave out {name}"
            )

    def step(self, variant: Variant, start_seed: int) -> ModuleStep:
        """The step of a run, in the variant's dtype, with the shared batches; and with the shared start, unless it has
        the start of another seed."""
        step = self._step_of(variant, start_seed)
        if start_seed == self.workload.seed:
            with user_errors(f"{self.name} makes another module each time that it is called"), torch.no_grad():
                for tensor, start in zip(_state(step.model), self.start, strict=True):
                    tensor.copy_(start)
        dtype = torch.float32 if variant.keeping is None else torch.bfloat16
        step.batches = [moved(_copied(batch), self.device, dtype, self.name) for batch in self.batches]
        return step

    def judged(self, step: ModuleStep) -> float:
        """The mean loss over the shared batches of a module that is trained no more, in fp32 and eval mode."""
        step.model.float().eval()
        plain_products(step.model)
        losses: list[Tensor] = []
        with torch.no_grad(), matmul_precision("fp32"), user_errors(f"{self.name} fails in eval mode, which judges it"):
            for batch in self.batches:
                try:
                    losses.append(step.forward_module(*_copied(batch)).double().reshape(()))
                except InputError as error:
                    raise InputError(f"in eval mode, which judges it, {error}") from error
        return float(torch.stack(losses).mean())

    def _step_of(self, variant: Variant, seed: int) -> ModuleStep:
        step = step_of(msgspec.structs.replace(self.workload, dtype=variant.dtype, seed=seed), self.device)
        assert isinstance(step, ModuleStep)
        if variant.keeping is None:
            in_fp32(step)
        return step


class OwnTraining:
    """Runs of a subject, and what was learned of them on the way."""

    def __init__(self, subject: Subject, steps: int, learning_rate: float, left_out: dict[str, str]) -> None:
        self._subject, self._steps, self._learning_rate, self._left_out = subject, steps, learning_rate, left_out
        self.same_starts = False
        """Whether the factory makes the same parameters with another seed."""

    def run(self, planned: PlannedRun, tell_step: Callable[[int], None]) -> Trained | None:
        """Train and judge; None for a run that fails or has no start of its own. Raises InputError where fp32 fails."""
        gc.collect()  # A step and its phases refer to each other, and the run before may still hold its memory.
        try:
            step = self._subject.step(planned.variant, planned.start_seed)
            # The start ends with buffers, which do not tell.
            if planned.of_starts and all(map(torch.equal, step.model.parameters(), self._subject.start)):
                self.same_starts = True
                return None
            subject, variant = self._subject, planned.variant
            # So that dropout, and rounding at random, are the same whatever ran before.
            torch.manual_seed(subject.workload.seed)
            fails = user_errors(f"{subject.name} fails in training")
            with matmul_precision(variant.dtype), fails, variant.products(step.model):
                trained = train_steps(self._trainee(step, variant), self._steps, variant.scaled, tell_step)
            trained.final_loss = subject.judged(step)
            return trained
        except InputError as error:
            if planned.name == REFERENCE:
                raise
            self._left_out[planned.name] = str(error)
            return None

    def _trainee(self, step: ModuleStep, variant: Variant) -> Trainee:
        def loss(_: int) -> Tensor:
            step.prepare()
            step.phases[0].run()
            assert step.loss is not None
            return step.loss.float().reshape(())  # A loss scale would overflow in a loss of fp16.

        parameters = trained_parameters(step.model).values()
        embeddings = {
            id(parameter)
            for module in step.model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            for parameter in module.parameters()
        }
        optimizer = step.user_module.optimizer
        return Trainee(
            loss=loss,
            optimizer=optimizer or adamw(list(parameters), variant, step.device),
            rate=None if optimizer else lambda number: rate_at(number, self._steps, self._learning_rate),
            counted=[parameter for parameter in parameters if id(parameter) not in embeddings],
        )


def _state(model: nn.Module) -> list[Tensor]:
    """The tensors of a module that a start is made of: its parameters, then its buffers."""
    return [*model.parameters(), *model.buffers()]


def _copied(batch: Any) -> Any:
    """A copy of a batch, so that a module that writes into its inputs changes no batch of another run."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, batch)
