"""Calls of functions, measured: the memory of a pass, then times in turns, pass by pass, by the only loop that times.

On a GPU the L2 cache is overwritten before each pass, for as long as the host needs to issue it (`recording/leads.py`),
so that times are the device's own. Both `bench` and the study of attention measure by this.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepscope.core.errors import one_line
from stepscope.core.range_names import BACKWARD, FORWARD
from stepscope.core.run import Settings
from stepscope.recording.device import let_go, timing_device
from stepscope.recording.keepers import saved_tensors
from stepscope.recording.leads import Leads, overwrite_cache, with_lead
from stepscope.recording.step import Phase
from stepscope.recording.timer import Measurement, StepFailed, measure
from stepscope.training.judging import Call, Function, results_of


class CallPass:
    """Forward, and backward where inputs ask for a gradient, of one call, as a subject of `measure`.

    call: inputs that are leaves (`Call.ready`). upstream: the outputs' gradients; None: random ones.
    """

    def __init__(self, function: Function, call: Call, upstream: Sequence[Tensor] | None = None) -> None:
        self.call = call
        self._function, self._upstream = function, upstream
        self.leaves = [tensor for tensor in call.tensors if tensor.requires_grad]
        self._made: Any = None
        self._gradients: tuple[Tensor | None, ...] = ()
        self.lead: Callable[[], object] | None = None

    @property
    def phases(self) -> Sequence[Phase]:
        backward = (Phase(name=BACKWARD, run=self.backward),) if self.leaves else ()
        return with_lead(self.lead, Phase(name=FORWARD, run=self.forward), *backward)

    def prepare(self) -> None:
        self._made, self._gradients = None, ()

    def forward(self) -> None:
        if self.leaves:
            self._made = self._function(*self.call.args, **self.call.kwargs)
        else:
            with torch.no_grad():
                self._made = self._function(*self.call.args, **self.call.kwargs)

    def backward(self) -> None:
        outs = [self._made] if isinstance(self._made, Tensor) else self.outs
        asked = [out for out in outs if out.requires_grad]
        if self._upstream is None:
            self._upstream = [torch.randn_like(out) for out in asked]
        # Not `.backward()`, which would add to what a pass before left, or copy.
        self._gradients = torch.autograd.grad(asked, self.leaves, self._upstream, allow_unused=True)

    @property
    def outs(self) -> list[Tensor]:
        """The outputs that are alive."""
        return [*results_of(self._made).values()]

    @property
    def result_bytes(self) -> int:
        """Bytes of the outputs and of the gradients that are alive."""
        kept = [*self.outs, *(gradient for gradient in self._gradients if gradient is not None)]
        return sum(storages_of(kept).values())

    def saved_storages(self) -> dict[int, int]:
        """Bytes of every storage, by its address, that autograd keeps for backward.

        Numbers that autograd wraps as tensors without a dimension (a scale, say) are left out: they lie on the host.
        """
        functions = [out.grad_fn for out in self.outs if out.grad_fn is not None]
        return storages_of([s.tensor for function in functions for s in saved_tensors(function) if s.tensor.ndim])


def storages_of(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Bytes of each storage of the tensors, by its address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@dataclass(frozen=True, kw_only=True)
class PassMemory:
    """What a pass takes beside the call's tensors."""

    saved: Mapping[int, int]
    """Bytes of what autograd keeps for backward, by address."""
    outs: Mapping[int, int]
    """Bytes of the outputs, by address."""
    alive_bytes: int
    """What is alive when forward is over."""
    peak_bytes: int | None
    """None on a CPU, where nobody counts."""
    result_bytes: int
    """Outputs and gradients."""


Failed = Callable[[str, BaseException, str], object]
"""Told of a pass that raised an error: its name, the error, and during what."""


class FunctionCalls:
    """Measures passes on one device. hidden: times are the device's own, without launches and with a cold cache."""

    def __init__(self, device: torch.device, settings: Settings, *, hidden: bool) -> None:
        self.device = device
        self.timing = timing_device(device)
        self.broken = ""
        """The device's error when it failed for good; empty while it works."""
        self.hidden = hidden and device.type == "cuda"
        self._settings = settings
        self._leads: Leads | None = None

    def memory(self, one: CallPass) -> PassMemory:
        """A pass that compiles, chooses kernels and makes what is made once, then one whose memory is looked at."""
        on_gpu = self.device.type == "cuda"
        one.prepare()
        one.forward()
        if one.leaves:
            one.backward()
        one.prepare()
        gc.collect()
        self.timing.synchronize()
        before = 0
        if on_gpu:
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        one.forward()
        inputs, outs = storages_of(one.call.tensors), storages_of(one.outs)
        saved = {pointer: nbytes for pointer, nbytes in one.saved_storages().items() if pointer not in inputs}
        alive = torch.cuda.memory_allocated(self.device) - before if on_gpu else sum({**saved, **outs}.values())
        if one.leaves:
            one.backward()
        self.timing.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device) - before if on_gpu else None
        found = PassMemory(saved=saved, outs=outs, alive_bytes=alive, peak_bytes=peak, result_bytes=one.result_bytes)
        one.prepare()
        return found

    def memories(
        self, passes: dict[str, CallPass], failed: Failed, over: Callable[[], bool] = lambda: False
    ) -> dict[str, PassMemory]:
        """The memory of each. One that fails is told and leaves `passes`, as do those that are left when it is over."""
        found: dict[str, PassMemory] = {}
        for name, one in list(passes.items()):
            if over():
                del passes[name]
                continue
            try:
                found[name] = self.memory(one)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # whatever it raises is its own
                failed(name, error, "a first pass")
                self._drop(name, passes, error)
        return found

    def in_turns(self, passes: dict[str, CallPass], failed: Failed) -> dict[str, Measurement]:
        """Times of the passes, taken in turns. One that fails is told and leaves `passes`; the others start again."""
        while passes:
            try:
                if self.hidden:
                    self._leads = self._leads or Leads(self.timing, overwrite_cache(self.device))
                    for name, one in passes.items():
                        self._leads.give(name, one)
                return measure(passes, device=self.timing, settings=self._settings)
            except StepFailed as failure:
                failed(failure.subject, failure.__cause__ or failure, f"{failure.stage}, {failure.phase or 'step'}")
                self._drop(failure.subject, passes, failure)
        return {}

    def _drop(self, name: str, passes: dict[str, CallPass], error: BaseException) -> None:
        passes.pop(name).prepare()
        let_go(error)
        self.clean_up()

    def clean_up(self) -> None:
        """Give back memory that nobody uses."""
        gc.collect()
        if self.device.type == "cuda" and not self.broken:
            try:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
            except RuntimeError as error:  # an illegal access, say: nothing runs any more in this process
                self.broken = one_line(error)


def settings_for(seconds: float, steps: int | None = None, *, most: int = 10_000) -> Settings:
    """How a call is timed: for about so long, or exactly so many passes, and at most so many."""
    return Settings(
        warmup_floor=2,
        warmup_cap=20,
        warmup_seconds=min(0.5, seconds),
        steps_floor=5 if steps is None else steps,
        steps_cap=most if steps is None else steps,
        seconds=seconds,
    )
