"""The two predictions beside each other, event by event: what is allocated and released, in which order.

Peaks agree where sizes do; what the allocator takes from the device depends on the order too. For the steps that were
recorded on an H200, both are compared with the GPU's own events.
"""

import random
from pathlib import Path

import msgspec
import pytest

from stepscope.allocations.prediction.estimate import STEPS, SymbolicStep, estimate
from stepscope.allocations.snapshot import read_snapshot
from stepscope.core.model_config import ModelConfig
from stepscope.core.precisions import Dtype
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.fake_module import estimate_by_running, watch_fake_step
from tests.conftest import at_length

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parents[3] / "results" / "h200" / "memory-recorded"
NUMBERS = 16
"""Bytes up to which an allocation is a number or two: factors of fp16's scaling, the state of a random generator."""
SEMAPHORES = 1024
"""Bytes that the semaphores of a sum shared by thread blocks take at most."""

Events = dict[str, list[int]]
"""Of each phase of the last step, the last of its name: bytes allocated, and negative where they are released."""


class Recorder:
    """An allocator with memory without end, which writes down what it is asked for."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.sizes: list[int] = []

    def allocate(self, size: int) -> tuple[int, int]:
        self.events.append(size)
        self.sizes.append(size)
        return len(self.sizes) - 1, size

    def free(self, block: int) -> None:
        self.events.append(-self.sizes[block])


class SymbolicPhases(SymbolicStep):
    """A symbolic step that notes where each phase begins and ends among the events."""

    def __init__(self, workload: TextbookWorkload) -> None:
        self.recorder = Recorder()
        self.events: Events = {}
        self._start = 0
        super().__init__(workload, "cuda", self.recorder)

    def _begin(self, phase: str) -> None:
        self._start = len(self.recorder.events)
        super()._begin(phase)

    def _end(self) -> None:
        self.events[self.phase] = self.recorder.events[self._start :]
        super()._end()


def on_symbolic_tensors(workload: TextbookWorkload) -> Events:
    step = SymbolicPhases(workload)
    step.run(STEPS)
    return {name: in_order(events) for name, events in step.events.items()}


def on_fake_tensors(workload: TextbookWorkload) -> Events:
    watch = watch_fake_step(workload).watch
    found: Events = {}
    for phase in watch.phases:
        events = [(watch.allocations[max(e, ~e)], 1 if e >= 0 else -1) for e in watch.events[phase.start : phase.end]]
        found[phase.name] = in_order([sign * tensor.nbytes for tensor, sign in events if tensor.on_device])
    return found


def in_order(events: list[int]) -> list[int]:
    """Without single numbers, and releases between two allocations sorted: autocast gives its copies up in the order
    of their addresses, which no two processes have alike.
    """
    found: list[int] = []
    released: list[int] = []
    for event in events:
        if abs(event) <= NUMBERS:
            continue
        if event < 0:
            released.append(event)
        else:
            found += [*sorted(released), event]
            released = []
    return found + sorted(released)


def drawn(seed: int) -> TextbookWorkload:
    """Sizes of all kinds, and choices of attention whose kernels allocate nothing for themselves."""
    draw = random.Random(seed)
    heads, layers = draw.choice([2, 3, 4]), draw.randint(1, 5)
    d_model = heads * draw.choice([8, 30, 36, 64])
    accumulation = draw.choice([1, 1, 2])
    return TextbookWorkload(
        model=ModelConfig(
            name="drawn", d_model=d_model, d_ff=draw.randint(16, 1500), layers=layers, heads=heads,
            vocabulary=draw.choice([97, 1000, 50257]),
        ),
        batch_size=accumulation * draw.randint(2, 4), seq_len=draw.choice([64, 333, draw.randint(5, 400)]),
        dtype=draw.choice(["fp32", "bf16", "fp16", "tf32"]), phase=draw.choice(["train", "train", "forward"]),
        attention=draw.choice(["reference", "unsafe"]),
        optimizer=draw.choice(["adamw-foreach", "adamw-fused", "adamw-loop", "adamw-bf16-state"]),
        checkpointing=draw.choice(["none", "selective", f"every-{draw.randint(1, layers)}"]), accumulation=accumulation,
    )  # fmt: skip


@pytest.mark.parametrize("seed", [*range(3), *at_length(*range(3, 12))])
def test_the_symbolic_model_allocates_and_releases_what_the_step_does(seed: int):
    workload = drawn(seed)
    symbolic, fake = on_symbolic_tensors(workload), on_fake_tensors(workload)
    assert symbolic.keys() == fake.keys()
    for phase in fake:
        assert symbolic[phase] == fake[phase], (workload, phase)


@pytest.mark.parametrize("checkpointing", ["none", *at_length("selective", "every-2")])
@pytest.mark.parametrize("dtype", ["fp8-row", *at_length("fp8")])
@pytest.mark.parametrize("d_ff", [208, pytest.param(200, marks=pytest.mark.long)])
def test_so_do_steps_of_8_bits(d_ff: int, dtype: Dtype, checkpointing: str):
    """What makes the operands of each product, too. Layers of 200 columns stay in 16 bits."""
    workload = TextbookWorkload(
        model=ModelConfig(name="eight", d_model=96, d_ff=d_ff, layers=3, heads=3, vocabulary=997),
        batch_size=4, seq_len=56, dtype=dtype, attention="reference", optimizer="adamw-fused", accumulation=2,
        checkpointing=checkpointing,
    )  # fmt: skip
    symbolic, fake = on_symbolic_tensors(workload), on_fake_tensors(workload)
    for phase in fake:
        assert symbolic[phase] == fake[phase], phase


@pytest.mark.parametrize(
    ("checkpointing", "layers", "dtype"),
    [
        ("nested-1", 5, "bf16"),
        *at_length(("nested-2", 8, "fp32"), ("nested-3", 7, "bf16"), ("nested-4", 9, "fp32")),
    ],
)
def test_so_do_calls_that_hold_calls(checkpointing: str, layers: int, dtype: Dtype):
    workload = TextbookWorkload(
        model=ModelConfig(name="nested", d_model=96, d_ff=208, layers=layers, heads=3, vocabulary=997),
        batch_size=4, seq_len=56, dtype=dtype, accumulation=2, checkpointing=checkpointing,
    )  # fmt: skip
    symbolic, fake = on_symbolic_tensors(workload), on_fake_tensors(workload)
    for phase in fake:
        assert symbolic[phase] == fake[phase], phase


def test_inputs_that_are_there_grow_with_the_logarithm_of_nested_halves():
    """16 MiB each, in blocks that hold little else: N with every-1; about one more for twice the blocks with halves;
    none more in a chain. Beside them are parameters and gradients."""

    def peak(checkpointing: str, layers: int) -> int:
        model = ModelConfig(name="thin", d_model=64, d_ff=64, layers=layers, heads=1, vocabulary=16)
        workload = TextbookWorkload(
            model=model, seq_len=16384, attention="sdpa", phase="forward-backward", checkpointing=checkpointing
        )
        found = estimate(workload)
        return found.peak_bytes - sum(found.categories.get(name, 0) for name in ("parameters", "gradients", "rounding"))

    each = 4 * 16384 * 64 * 4
    assert peak("every-1", 32) - peak("every-1", 16) == 16 * each
    assert peak("nested-2", 32) - peak("nested-2", 16) == each
    assert peak("nested-1", 32) == peak("nested-1", 16)


@pytest.mark.parametrize(
    "checkpointing",
    ["none", "selective-2", "every-3", "offload-2", *at_length("selective", "attention", "offload-1", "offload-4")],
)
@pytest.mark.parametrize("d_ff", [960, pytest.param(1440, marks=pytest.mark.long)])
def test_what_is_taken_from_the_device_is_alike_for_odd_sizes_and_a_large_vocabulary(checkpointing: str, d_ff: int):
    """cuBLAS gets its workspace after the first product's output is there: so it is decided which blocks are left for
    the optimizer. The other order predicted 4 % less here."""
    workload = TextbookWorkload(
        model=ModelConfig(name="odd", d_model=360, d_ff=d_ff, layers=5, heads=4, vocabulary=50257),
        batch_size=3, seq_len=333, dtype="bf16", attention="sdpa", checkpointing=checkpointing,
    )  # fmt: skip
    symbolic, fake = estimate(workload), estimate_by_running(workload).memory
    assert symbolic.reserved_peak == pytest.approx(fake.reserved_peak, rel=0.002)
    for name in ("forward_peak", "saved_for_backward", "backward_peak", "optimizer_peak"):
        assert getattr(symbolic, name) == pytest.approx(getattr(fake, name), rel=0.01), name


@pytest.mark.parametrize("seed", [4, *at_length(0, 1, 2, 3, 5, 6, 7)])
def test_both_have_the_peaks_of_joint_projections(seed: int):
    """Fake tensors count what a product has beside its operands, and show no allocation of it."""
    workload = msgspec.structs.replace(drawn(seed), projections="joint")
    symbolic, fake = estimate(workload), estimate_by_running(workload).memory
    for name in ("after_parameters", "forward_peak", "saved_for_backward", "backward_peak", "optimizer_peak"):
        assert getattr(symbolic, name) == pytest.approx(getattr(fake, name), abs=512), name


@pytest.mark.parametrize(
    "cell", ["small-b4-s512-bf16-train", *at_length("tiny-b4-s128-fp32-train", "small-b4-s512-fp32-forward")]
)
def test_both_are_what_a_gpu_recorded(cell: str):
    """To the event, with the buffers in which blocks of the H200 leave their parts of a sum over many rows. The
    symbolic model leaves those out: no peak of the textbook's stands there."""
    (file,) = RECORDED.glob(f"*-{cell}-*/memory.pickle.gz")
    snapshot = read_snapshot(file)
    assert snapshot.notes is not None and isinstance(snapshot.notes.workload, TextbookWorkload)
    workload = snapshot.notes.workload
    symbolic, fake = on_symbolic_tensors(workload), on_fake_tensors(workload)
    for span in snapshot.notes.phases:
        sign = {"alloc": 1, "free_requested": -1}
        recorded = [
            sign[event.action] * event.size
            for event in snapshot.events
            if event.action in sign and span.start_us <= event.time_us < span.end_us
        ]
        assert symbolic[span.name] == in_order(without_sums(recorded)), span.name
        assert fake[span.name] == in_order(without_sums(recorded, keep=True)), span.name


def without_sums(events: list[int], *, keep: bool = False) -> list[int]:
    """Without the buffers of shared sums: one for partial sums, one for semaphores, there and gone at once. With `keep`
    without the semaphores alone."""
    found: list[int] = []
    i = 0
    while i < len(events):
        partial, semaphores = events[i], events[i + 1] if i + 1 < len(events) else 0
        if NUMBERS < semaphores <= SEMAPHORES and events[i + 2 : i + 4] == [-semaphores, -partial]:
            found += [partial, -partial] if keep else []
            i += 4
            continue
        found.append(partial)
        i += 1
    return found
