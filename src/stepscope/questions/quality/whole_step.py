"""Trains by a whole step, made of the choices that `run` has: does the fast step train as the textbook's does?

A variant of `training.py` is a precision, in the plainest code. Here forward, backward and the update are those that
`run` measures, with their kernels, compiler, optimizer and CUDA graphs; start, batches and learning rates are those of
every other run. Under a graph the learning rate is a tensor, which each replay reads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from stepscope.core.errors import InputError
from stepscope.core.workload import Workload
from stepscope.questions.quality.bundled_text import BundledText
from stepscope.questions.quality.runs import PlannedRun
from stepscope.questions.quality.training import (
    REFERENCE,
    VARIANTS,
    Batches,
    Trained,
    TrainingSize,
    batches,
    held_out_loss,
    initial_model,
    losses_in_turn,
    own_randomness,
    rate_at,
)
from stepscope.recording.compilation import reset_compilation
from stepscope.recording.precision import matmul_precision
from stepscope.recording.step import drive
from stepscope.training.scaled_products import plain_products
from stepscope.training.training_step import AssembledStep, Batch, check_supported, textbook_parts

FIXED = ("model", "batch_size", "seq_len", "seed", "phase", "parallel", "ranks")
"""What the study says itself: a step that differs in it trains something else."""
_FIELDS = frozenset(Workload.__struct_fields__)
"""What a step may say; the sizes of a model are none of it."""


def whole_steps(
    changes: Sequence[Mapping[str, Any]], size: TrainingSize, device: torch.device, seed: int
) -> list[PlannedRun]:
    """A run for each step that differs from the plain one in fp32 by these fields.

    Raises InputError for one that trains something else, or that cannot run here.
    """
    base = Workload(model=size.model, batch_size=size.batch_size, seq_len=size.seq_len, dtype="fp32", seed=seed)
    found: dict[str, PlannedRun] = {}
    for change in changes:
        fixed = [f"--{field.replace('_', '-')}" for field in change if field in FIXED or field not in _FIELDS]
        if fixed:
            raise InputError(f"--against has {', '.join(fixed)}, which every run of this study shares: leave it out")
        step = msgspec.structs.replace(base, **change)
        check_supported(step, device)
        name = f"step {' '.join(step.words(*FIXED))}"
        found[name] = PlannedRun(name=name, variant=VARIANTS[REFERENCE], start_seed=seed, step=step)
    return list(found.values())


class _Given(Sequence[Batch]):
    """The batches of all steps, each made when it is asked for."""

    def __init__(self, data: Batches) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data.places)

    def __getitem__(self, index: int) -> Batch:  # pyright: ignore[reportIncompatibleMethodOverride]  (no slices)
        return self._data.at(index + 1)


def train_whole_step(
    workload: Workload, size: TrainingSize, text: BundledText, *, device: torch.device, seed: int,
    tell_step: Callable[[int], None] = lambda _step: None,
) -> Trained:  # fmt: skip
    """Train on the seed's batches from the seed's start, and judge what came out as every run is judged."""
    start, given = initial_model(size, seed), _Given(batches(size, text.train, device, seed))
    if workload.compile != "eager":
        reset_compilation()
    with own_randomness(device), matmul_precision(workload.dtype):
        step = AssembledStep(textbook_parts(workload, device, start.state_dict(), given), workload, device)
        step.keep_losses()
        torch.manual_seed(seed)
        trained = Trained(skipped_steps=0 if step.scaler.is_enabled() else None)
        trained.losses = losses_in_turn(_taken(step, size, trained), size.steps, tell_step)
    plain_products(step.model)
    used = {name: tensor.detach().float() for name, tensor in step.model.state_dict().items()}
    trained.parameters = [used[name].clone() for name, _ in start.named_parameters()]
    with matmul_precision("fp32"):
        judge = start.to(device)
        judge.load_state_dict(used)
        trained.final_loss = held_out_loss(judge, text, size.seq_len)
    return trained


def _taken(step: AssembledStep, size: TrainingSize, trained: Trained) -> Callable[[int], Tensor]:
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
