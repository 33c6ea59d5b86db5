"""Drafts the run of a watched loop: its workload as it was seen, and what the stages add."""

import math
import os
import statistics
import sys
import weakref
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch

from stepscope.core.device_spec import find_device_spec
from stepscope.core.errors import named_line
from stepscope.core.evidence import Capture, Evaluated, Evidence, Habits, PhaseMemory, Saved, WatchedLoop
from stepscope.core.own_workload import Input, OwnModel, WatchedWorkload
from stepscope.core.precisions import Dtype
from stepscope.core.run import Run
from stepscope.core.run_directory import KINETO_FILE, MEMORY_FILE, create_run_directory, save_run
from stepscope.core.work import Work
from stepscope.engine.draft import RunDraft
from stepscope.engine.watch.request import WatchRequest
from stepscope.recording.environment import read_environment
from stepscope.recording.watch.found import Found, class_name, models_of
from stepscope.recording.watch.seen import CallSeen, ModuleSeen
from stepscope.training.own.identity import source_digest, structure_digest


class WatchedDraft(RunDraft):
    """The draft of a watched loop's run. When it is made, it makes the directory and writes the first record."""

    def __init__(self, request: WatchRequest, found: Found, device: torch.device) -> None:
        self.device, self._request = device, request
        self._model = weakref.ref(found.model)
        self.loop = _loop(found)
        workload = watched_workload(found, self.loop, request.program)
        directory = create_run_directory(request.runs, workload)
        environment = read_environment(device, own_code=True)
        run = Run(
            id=directory.name,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            tag=request.tag,
            status="unfinished",
            workload=workload,
            settings=request.settings,
            environment=environment,
            device_spec=find_device_spec(environment.device_name),
            evidence=Evidence(loop=self.loop),
        )
        super().__init__(run, directory)
        save_run(run, directory, rescue=False)

    @property
    def model(self) -> torch.nn.Module | None:
        return self._model()

    @property
    def device_name(self) -> str:
        return self.run.environment.device_name if self.run.environment else ""

    def say_timed_steps(
        self,
        spans: tuple[tuple[int, int], ...],
        *,
        forwards: Sequence[int],
        backwards: Sequence[int],
        evaluated: Evaluated | None,
        saved: Saved | None,
    ) -> None:
        """Keep the numbers of the timed steps, how many forwards and backwards each ran, what they evaluate and what
        they save."""
        usual = max((forwards.count(count) for count in set(forwards)), default=0)
        vary = bool(forwards) and 10 * usual < 9 * len(forwards)
        loop = msgspec.structs.replace(
            self.loop,
            first_step=spans[0][0] if spans else None,
            timed_steps=spans,
            backwards_between=_extremes(backwards),
            forwards_between=_extremes(forwards),
            forwards_mean=statistics.fmean(forwards) if vary else None,
            evaluated=evaluated,
            saved=saved,
        )
        self.set_evidence(loop=loop)

    def say_ended_by(self, error: Exception) -> None:
        """Keep what ended the loop after its steps were timed."""
        loop = self.run.evidence.loop or self.loop
        self.set_evidence(loop=msgspec.structs.replace(loop, ended_by=named_line(error)))

    def keep_memory(self, memory: PhaseMemory) -> None:
        """Keep a step's memory figures, unless those of a recorded step say more."""
        if memory.forward_peak is not None or self.run.evidence.memory is None:
            self.set_evidence(memory=memory)

    def keep_habits(self, habits: Habits) -> None:
        self.set_evidence(habits=habits)

    def keep_work(self, work: dict[str, Work], unknown: dict[str, int]) -> None:
        """Keep a step's FLOPs. Without a forward, those that were counted are no step's."""
        if not self.loop.modules:
            return
        self.set(work=work)
        self.set_evidence(uncounted=unknown)

    def keep_recorded_memory(self, memory: PhaseMemory) -> None:
        """Keep the recorded step's memory figures on a CPU, where nothing else counts allocations."""
        self.keep_files(memory=MEMORY_FILE)
        counted = self.run.evidence.memory
        if counted is None or counted.allocated_peak is None:
            self.set_evidence(memory=memory)
        if self._request.memory is not None and self._request.memory.steps > 1:
            self.keep_growth()

    def keep_capture(self, capture: Capture) -> None:
        self.set_evidence(captures=(*self.run.evidence.captures, capture))

    def keep_trace(self, capture: Capture) -> None:
        self.keep_capture(capture)
        self.keep_files(kineto=KINETO_FILE)


def watched_workload(found: Found, loop: WatchedLoop, program: str) -> WatchedWorkload:
    """The loop as an experiment, described by one of its steps."""
    model = found.model
    world = int(os.environ.get("WORLD_SIZE", "1") or 1)
    return WatchedWorkload(
        model=OwnModel(
            name=found.name,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            inputs=_inputs(found.roots[0], found.batches) if found.roots else {},
            structure=structure_digest(model),
            source=source_digest(model, [_script()]),
        ),
        dtype=_dtype(loop),
        compile="default" if found.compiled else "eager",
        optimizer=class_name(found.optimizer) if found.optimizer is not None else None,
        accumulation=found.micro_batches,
        program=program,
        rank=int(os.environ.get("RANK", "0")) if world > 1 else None,
        world_size=world,
    )


def _extremes(counts: Sequence[int]) -> tuple[int, int] | None:
    return (min(counts), max(counts)) if counts else None


def _script() -> Path | None:
    """The file that this process runs; None in a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file) if file is not None else None


def _loop(found: Found) -> WatchedLoop:
    dtypes: dict[str, int] = {}
    for parameter in found.model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + parameter.numel()
    return WatchedLoop(
        why=found.why,
        modules=tuple(class_name(root.module) for root in found.roots),
        optimizers=tuple(class_name(optimizer) for optimizer in found.optimizers),
        forwards=found.forwards,
        backwards=found.backwards,
        evaluations=found.evaluations,
        autocast=next((root.autocast for root in found.roots if root.autocast), None),
        parameter_dtype=max(dtypes, key=lambda name: dtypes[name], default=""),
        module_forwards=tuple(root.calls for root in found.roots),
        optimizer_models=tuple(" and ".join(models_of(optimizer, found)) for optimizer in found.optimizers),
        optimizer_steps=tuple(found.steps_of(optimizer) for optimizer in found.optimizers),
        trainable=found.trainable,
        tokens=_tokens(found.batches),
        in_backward=found.in_backward,
    )


def _dtype(loop: WatchedLoop) -> Dtype:
    if loop.autocast is not None:
        return "fp16" if loop.autocast == "float16" else "bf16"
    if loop.parameter_dtype == "bfloat16":
        return "bf16-pure"
    return "tf32" if torch.get_float32_matmul_precision() != "highest" and torch.cuda.is_available() else "fp32"


def _tokens(calls: Sequence[CallSeen]) -> int | None:
    """The token ids that these calls took, where they differ in length."""
    ids = [
        next((t.shape for t in call.inputs.values() if len(t.shape) == 2 and t.dtype in ("int64", "int32")), None)
        for call in calls
    ]
    shapes = [shape for shape in ids if shape is not None]
    return sum(map(math.prod, shapes)) if len({length for _, length in shapes}) > 1 else None


def _inputs(root: ModuleSeen, calls: Sequence[CallSeen]) -> dict[str, Input]:
    """The tensors of a whole step, in which the root is called on samples that differ: the samples of all these calls,
    each as large as the largest. A call that takes one sample without a dimension for the batch counts as one."""
    largest = {name: max(seen, key=lambda tensor: tensor.shape) for name, seen in root.inputs.items()}
    first = next((tensor.shape[0] for tensor in largest.values() if tensor.shape), None)
    inputs: dict[str, Input] = {}
    for name, tensor in largest.items():
        shape = tensor.shape
        if root.takes_one_sample:
            shape = (max(1, len(calls)), *shape)
        elif shape and shape[0] == first:
            took = [call.inputs[name].shape[0] for call in calls if name in call.inputs and call.inputs[name].shape]
            shape = (sum(took) or shape[0], *shape[1:])
        inputs[name] = Input(shape, tensor.dtype)
    return inputs
