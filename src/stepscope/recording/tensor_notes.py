"""Which tensor lies at which address, noted while a step runs: what a snapshot of the allocator cannot know.

To note a tensor is to read its address and size. Nothing here allocates on the device, and nothing is kept alive.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from stepscope.core.memory_notes import MemoryCategory, TensorNote
from stepscope.recording.held_tensors import local_part, model_tensors, optimizer_tensors, plain_parts, saved_tensors
from stepscope.recording.precision import cast_copy
from stepscope.recording.step import Step, optimizers_of


def now_us() -> int:
    """Microseconds since the epoch, by the clock that PyTorch's allocator and profiler use for their events."""
    return time.time_ns() // 1000


class _Owners(Protocol):
    def owner(self, sequence_nr: int) -> tuple[str, ...]: ...


class TensorNotes:
    """The notes of one step. Its methods are called in the order of the step, `resident` first."""

    def __init__(self, step: Step, device: torch.device) -> None:
        self._step, self._device = step, device
        self._names = {id(parameter): name for name, parameter in step.model.named_parameters()}
        self._notes: list[TensorNote] = []
        self._before: dict[int, int] | None = None
        self._casts: set[int] = set()

    @property
    def notes(self) -> tuple[TensorNote, ...]:
        return tuple(self._notes)

    @property
    def resident_sizes(self) -> dict[int, int]:
        """Address and bytes of every storage that was noted before the first step began."""
        return self._before or {}

    def resident(self) -> None:
        """Note everything that exists before a step: parameters, buffers, gradients, optimizer state, batches."""
        already = len(self._notes)
        for tensor, category, name in self._residents():
            self._note(tensor, category, name)
        found = self._notes[already:]
        if self._before is None:
            self._before = {note.address: note.bytes for note in found}

    def _residents(self) -> Iterator[tuple[object, MemoryCategory, str]]:
        """What outlives a phase, each with its category and name."""
        model = self._step.model
        for category, name, tensor in model_tensors(model):
            yield tensor, category, name
        for name, parameter in model.named_parameters():
            yield parameter.grad, "gradients", name
        for optimizer in optimizers_of(self._step):
            for name, tensor in optimizer_tensors(optimizer, model, self._names):
                yield tensor, "optimizer state", name
        for i, batch in enumerate(self._step.batches):
            for what, tensor in self._step.named_tensors(batch):
                yield tensor, "inputs", f"batch {i} {what}"

    def resident_parts(self) -> Iterator[torch.Tensor]:
        """The tensors with memory on the device that exist now and outlive a phase."""
        for tensor, _, _ in self._residents():
            if isinstance(tensor, torch.Tensor) and tensor.device == self._device:
                yield from plain_parts(tensor)

    def gradients(self) -> None:
        """Note the gradients that backward left on the parameters."""
        for name, parameter in self._step.model.named_parameters():
            self._note(parameter.grad, "gradients", name)

    def left(self, tensors: Iterable[torch.Tensor], saved: Iterable[torch.Tensor]) -> None:
        """Note what steps left behind, and of it what graphs keep. What was noted as something else stays that."""
        for tensor in tensors:
            self._note(tensor, "temporaries", "")
        for tensor in saved:
            self._note(tensor, "saved for backward", "")

    def saved(self, owners: _Owners) -> None:
        """Note the loss and the tensors that its graph keeps for backward: a storage once, by its first node."""
        loss = self._step.loss
        self._note(loss, "temporaries", "loss")
        if loss is None or loss.grad_fn is None:
            return
        # Read anew: an activation may lie where a gradient lay that the loop freed since.
        seen = self._casts | {part.untyped_storage().data_ptr() for part in self.resident_parts()}
        for saved in saved_tensors(loss.grad_fn):
            address = local_part(saved.tensor).untyped_storage().data_ptr()
            if address not in seen:
                seen.add(address)
                module = next(iter(owners.owner(saved.sequence_nr)), "")
                self._note(saved.tensor, "saved for backward", saved.name, operator=saved.operator, module=module)

    @contextlib.contextmanager
    def watch_cast_copies(self) -> Iterator[None]:
        """A context in which each module, as its forward ends, notes autocast's 16-bit copies of its parameters.

        A forward that runs again for backward (activation checkpointing) makes copies of its own, which are noted too.
        """
        handles = [
            module.register_forward_hook(lambda module, _args, _output, path=path: self._note_casts(module, path))
            for path, module in self._step.model.named_modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def start_forward(self) -> None:
        """Forget the copies of an earlier forward, whose addresses may be anything now."""
        self._casts.clear()

    def _note_casts(self, module: torch.nn.Module, path: str) -> None:
        for parameter in module.parameters(recurse=False):
            copy = cast_copy(parameter)
            if copy is not None:
                self._casts.add(local_part(copy).untyped_storage().data_ptr())
                self._note(copy, "cast copies", self._names.get(id(parameter), "?"), module=path)

    def _note(
        self, tensor: object, category: MemoryCategory, name: str, *, operator: str = "", module: str = ""
    ) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.device != self._device:
            return
        parts = plain_parts(tensor)
        for part in parts:
            storage = part.untyped_storage()
            if storage.nbytes() == 0:
                continue
            # A tensor made of others has their bytes; any other has its own shape, of which a rank holds a part.
            told = tensor if len(parts) == 1 else part
            self._notes.append(
                TensorNote(
                    address=storage.data_ptr(),
                    at_us=now_us(),
                    bytes=storage.nbytes(),
                    category=category,
                    name=name,
                    shape=tuple(told.shape),
                    dtype=str(told.dtype).removeprefix("torch."),
                    operator=operator,
                    module=module,
                )
            )
