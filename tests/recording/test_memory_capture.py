"""The recorded step: its file, its notes, and that recording changes nothing in what is recorded."""

import gzip
import json
import pickle
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stepscope.core.errors import portable_path
from stepscope.core.evidence import NOTES_KEY, SEGMENTS_BEFORE_KEY, MemoryNotes, TensorNote
from stepscope.core.run import Run, Settings
from stepscope.core.run_directory import MEMORY_FILE, load_runs
from stepscope.core.workloads import FactoryWorkload, UserModel
from stepscope.engine.request import MemoryRequest, StepRequest
from stepscope.engine.step import measure_step
from stepscope.recording.driven import observe_step
from stepscope.recording.memory_history import MetadataEmitter, ProfilerRecording, capture_memory, joined_ranges
from stepscope.recording.step import Phase, drive
from stepscope.training.training_step import TrainingStep
from stepscope.training.user_module.loading import make_user_step
from tests.app.cli.test_cli import QUICK, run_until, stepscope
from tests.conftest import at_length, mini

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def warmed(**changes: Any) -> TrainingStep:
    step = TrainingStep(mini(**changes), CPU)
    for _ in range(2):
        step.prepare()
        for phase in step.phases:
            phase.run()
    return step


def recorded(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    step = warmed(**changes)
    capture_memory(step, CPU, tmp_path, workload=step.workload)
    return read(tmp_path)


def read(directory: Path) -> dict[str, Any]:
    with gzip.open(directory / MEMORY_FILE) as file:
        return pickle.load(file)


def notes_of(snapshot: dict[str, Any]) -> MemoryNotes:
    return msgspec.convert(snapshot[NOTES_KEY], MemoryNotes)


def events_of(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    (events,) = snapshot["device_traces"]
    return events


def live_bytes(snapshot: dict[str, Any]) -> Iterator[tuple[dict[str, Any], int]]:
    """Each event that changes it, and the bytes that live after it, noted residents included."""
    notes = notes_of(snapshot)
    live = resident_bytes(notes)
    for event in events_of(snapshot):
        if event["action"] == "alloc":
            live += event["size"]
        elif event["action"] == "free_completed":
            live -= event["size"]
        else:
            continue
        yield event, live


def resident_bytes(notes: MemoryNotes) -> int:
    start = notes.phases[0].start_us
    return sum({note.address: note.bytes for note in notes.tensors if note.at_us <= start}.values())


def phase_of(event: dict[str, Any]) -> str:
    return event["user_metadata"].partition("|")[0]


def storages(notes: Sequence[TensorNote], *categories: str) -> dict[int, int]:
    return {note.address: note.bytes for note in notes if note.category in categories}


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("changes", [{}, {"dtype": "bf16"}, {"attention": "sdpa"}, {"compile": "default", "layers": 1}])
def test_what_forward_leaves_is_what_autograd_saved(changes: dict[str, Any], tmp_path: Path):
    check_what_forward_leaves(recorded(tmp_path, **changes))


FEW_KERNELS = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8))
    return model, torch.randn(32, 64), lambda out: out.square().mean()
"""


def test_what_forward_leaves_in_the_memory_that_inductor_allocates(tmp_path: Path):
    """A model of few kernels: its compiler in C++ takes half a second for each."""
    (tmp_path / "few.py").write_text(FEW_KERNELS)
    own = FactoryWorkload(model=UserModel(name="few"), factory=f"{tmp_path}/few.py:make", compile="default")
    step, own = make_user_step(own, CPU)
    for _ in range(2):
        step.prepare()
        drive(step)
    capture_memory(step, CPU, tmp_path, workload=own)
    check_what_forward_leaves(read(tmp_path))


def check_what_forward_leaves(snapshot: dict[str, Any]) -> None:
    notes = notes_of(snapshot)
    live = [bytes_ for event, bytes_ in live_bytes(snapshot) if phase_of(event) == "forward"]
    loss = 4
    saved = sum(storages(notes.tensors, "saved for backward", "cast copies").values())
    assert live[-1] - resident_bytes(notes) == saved + loss
    assert notes.measured and notes.measured.saved_for_backward == saved + loss
    assert notes.measured.forward_peak == max(live)


def test_saved_tensors_are_those_that_hooks_see(tmp_path: Path):
    """Two ways to the same bytes: the graph's attributes, and a hook at the moment of saving."""
    step = warmed()
    capture_memory(step, CPU, tmp_path, workload=step.workload)
    notes = notes_of(read(tmp_path))
    _, observed = observe_step(step, CPU)
    wrapped = [n.bytes for n in notes.tensors if n.shape == () and n.dtype == "float64"]  # hooks do not see numbers
    assert sum(wrapped) == 2 * 8  # the scale of the scores of two layers
    assert sum(storages(notes.tensors, "saved for backward").values()) - sum(wrapped) == observed.saved_for_backward


def test_the_notes_say_what_every_tensor_is(tmp_path: Path):
    step = warmed()
    capture_memory(step, CPU, tmp_path, workload=step.workload, device_name="a CPU")
    notes = notes_of(read(tmp_path))
    names = {name for name, _ in step.model.named_parameters()}
    of = {category: [n for n in notes.tensors if n.category == category] for category in ("parameters", "gradients")}
    assert {note.name for note in of["gradients"]} == names
    assert {note.name for note in of["parameters"]} == names | {"rotary.cos_SD", "rotary.sin_SD"}
    # What is there before the step is noted after it again.
    once = {(note.category, note.name, note.address) for note in notes.tensors}
    states = Counter(name.rpartition(".")[2] for category, name, _ in once if category == "optimizer state")
    assert states == {"exp_avg": len(names), "exp_avg_sq": len(names), "step": len(names)}
    assert sum(category == "inputs" for category, _, _ in once) == 8
    # The largest of one block, each by the operator that saves it and what that operator calls it.
    saved = {(n.module, n.operator, n.name): n.bytes for n in notes.tensors if n.category == "saved for backward"}
    assert saved["blocks.1.attention", "Exp", "result"] == 2 * 2 * 16 * 16 * 4
    # The division keeps the exponentials too, which are there already: a storage is noted once, with its first keeper.
    assert ("blocks.1.attention", "Div", "self") not in saved
    assert saved["blocks.1.attention", "Div", "other"] == 2 * 2 * 16 * 1 * 4
    assert saved["blocks.1.feed_forward", "Silu", "self"] == 2 * 16 * 64 * 4
    assert notes.workload == step.workload and notes.device_name == "a CPU"
    assert [span.name for span in notes.phases] == ["forward", "backward", "optimizer"]


def test_autocast_copies_are_found_in_training_and_inference(tmp_path: Path):
    cast = {f"blocks.{i}.{part}.weight" for i in range(2) for part in (
        "attention.query", "attention.key", "attention.value", "attention.output",
        "feed_forward.gate", "feed_forward.up", "feed_forward.down",
    )} | {"head.weight"}  # fmt: skip
    for phase in ("train", "forward"):
        snapshot = recorded(tmp_path, dtype="bf16", phase=phase)
        notes = [n for n in notes_of(snapshot).tensors if n.category == "cast copies"]
        assert {note.name for note in notes} == cast and {note.dtype for note in notes} == {"bfloat16"}
        # Each is a copy that the step allocated, in two bytes a number.
        for note in notes:
            at = [e for e in events_of(snapshot) if e["addr"] == note.address and e["time_us"] <= note.at_us]
            assert (at[-1]["action"], at[-1]["size"]) == ("alloc", note.bytes)
        assert len({note.address for note in notes}) == len(cast)


@pytest.mark.parametrize("hooks_on_nodes", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recording_changes_nothing_that_is_recorded(
    dtype: str, hooks_on_nodes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The same allocations in the same order, whether anything is noted or not; with the hooks that a GPU's recording
    gives the nodes of backward too."""

    def plain_sizes(step: TrainingStep) -> list[int]:
        from torch._C._profiler import _ExtraFields_Allocation

        step.prepare()
        step.loss = None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            for phase in step.phases:
                phase.run()
        assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
        waiting, found = list(profiler.profiler.kineto_results.experimental_event_tree()), []
        while waiting:
            event = waiting.pop()
            waiting += event.children
            if isinstance(event.extra_fields, _ExtraFields_Allocation):
                found.append((event.start_time_ns, event.extra_fields.alloc_size))
        return [size for _, size in sorted(found)]

    told: list[str] = []
    if hooks_on_nodes:
        monkeypatch.setattr(ProfilerRecording, "node_emitters", (MetadataEmitter(told.append),))
    step = warmed(dtype=dtype)
    expected = plain_sizes(step)
    capture_memory(step, CPU, tmp_path, workload=step.workload)
    actions = [e for e in events_of(read(tmp_path)) if e["action"] in ("alloc", "free_completed")]
    assert [e["size"] if e["action"] == "alloc" else -e["size"] for e in actions] == expected
    assert ("blocks.1.attention|softmax|ExpBackward0" in told) == hooks_on_nodes


def test_events_carry_module_part_and_the_line_of_code(tmp_path: Path):
    events = events_of(recorded(tmp_path))
    scores = [
        e for e in events if e["user_metadata"] == "forward|blocks.1.attention|softmax" and e["action"] == "alloc"
    ]
    exponentials = next(e for e in scores if e["frames"][0]["name"] == "aten::exp")
    line = exponentials["frames"][1]
    assert (line["filename"], line["name"]) == ("stepscope/training/attention/written_out.py", "reference")
    source = Path(__file__).parents[2] / "src" / line["filename"]
    assert "torch.exp(" in source.read_text().splitlines()[line["line"] - 1]
    in_backward = [e for e in events if e["user_metadata"] == "backward|blocks.1.attention|softmax"]
    assert any("ExpBackward0" in [f["name"] for f in e["frames"]] for e in in_backward)
    spans = {span.name: span for span in notes_of(read(tmp_path)).phases}
    assert all(spans[phase_of(e)].start_us <= e["time_us"] <= spans[phase_of(e)].end_us for e in events)
    assert [e["time_us"] for e in events] == sorted(e["time_us"] for e in events)


def test_the_file_holds_plain_data_and_no_place_of_this_machine(tmp_path: Path):
    class PlainOnly(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str) -> Any:
            raise AssertionError(f"{module_name}.{global_name}")

    recorded(tmp_path)
    with gzip.open(tmp_path / MEMORY_FILE) as file:
        snapshot = PlainOnly(file).load()
    assert set(snapshot) == {"segments", "device_traces", SEGMENTS_BEFORE_KEY, NOTES_KEY}
    files = {frame["filename"] for event in events_of(snapshot) for frame in event["frames"]}
    assert not any(name.startswith("/") for name in files)
    assert {"torch/nn/functional.py", "stepscope/training/transformer.py", ""} <= files
    assert [path.name for path in tmp_path.iterdir()] == [MEMORY_FILE]


@pytest.mark.parametrize("checkpointing", ["every-1", "selective", *at_length("every-2")])
def test_checkpointed_tensors_are_not_asked_for(checkpointing: str, tmp_path: Path):
    """To read them would run the forward again, in the middle of nowhere: no allocation lies outside the phases."""
    snapshot = recorded(tmp_path, checkpointing=checkpointing, dtype="bf16")
    notes = notes_of(snapshot)
    assert all(phase_of(event) for event in events_of(snapshot))
    assert notes.measured and notes.measured.saved_for_backward
    whole = notes_of(recorded(tmp_path, dtype="bf16")).measured
    assert whole and whole.saved_for_backward and notes.measured.saved_for_backward < whole.saved_for_backward


def test_of_several_forwards_the_figures_are_the_largest(tmp_path: Path):
    two = notes_of(recorded(tmp_path, accumulation=2, batch_size=4))
    one = notes_of(recorded(tmp_path, batch_size=2))
    assert [span.name for span in two.phases] == ["forward", "backward"] * 2 + ["optimizer"]
    assert two.measured and one.measured
    assert two.measured.saved_for_backward == one.measured.saved_for_backward
    assert two.measured.gradient_bytes == one.measured.gradient_bytes == one.measured.parameter_bytes
    # The second forward stands beside the gradients of the first.
    resident = resident_bytes(two) - resident_bytes(one)
    assert one.measured.forward_peak and two.measured.forward_peak and one.measured.gradient_bytes
    assert two.measured.forward_peak == one.measured.forward_peak + resident + one.measured.gradient_bytes + 4


class Handmade:
    """Three allocations: a weight of 1000 numbers, twice itself, and the gradient."""

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        self.weight = torch.nn.Parameter(torch.ones(1000))
        self.model.register_parameter("weight", self.weight)
        self.forward_module: torch.nn.Module = self.model
        self.optimizer: torch.optim.Optimizer | None = None
        self.scaler = None
        self.batches = ((torch.ones(10),),)
        self.batch: Any = self.batches[0]
        self.loss: torch.Tensor | None = None
        self.blocks: tuple[torch.nn.Module, ...] = ()
        self.compiled = self.compiles_parts = self.cuda_graphs = False
        self.phases = (Phase(name="forward", run=self._forward), Phase(name="backward", run=self._backward))

    def named_tensors(self, batch: tuple[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        return [("ones", batch[0])]

    def prepare(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def _forward(self) -> None:
        self.loss = self.weight.exp().sum()

    def _backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()
        self.loss = self.loss.detach()


def test_peaks_by_hand(tmp_path: Path):
    capture = capture_memory(Handmade(), CPU, tmp_path, workload=mini())
    measured = capture.measured
    assert measured.parameter_bytes == 4000 and measured.after_parameters == 4040
    assert measured.forward_peak == 4040 + 4000 + 4  # exp(w), kept for backward, and the loss
    assert measured.saved_for_backward == 4004
    # Backward adds its seed, 4 bytes; the gradient of the sum is a view of it, and the gradient is exp(w) times that.
    assert measured.backward_peak == 4040 + 4004 + 4 + 4000
    assert measured.gradient_bytes == 4000 and measured.optimizer_peak is None
    (saved,) = [note for note in notes_of(read(tmp_path)).tensors if note.category == "saved for backward"]
    assert (saved.operator, saved.name, saved.shape, saved.bytes) == ("Exp", "result", (1000,), 4000)


def test_metadata_of_another_thread_stands_behind_that_of_the_one_that_waits():
    import threading

    told: list[str] = []
    emitter = MetadataEmitter(told.append)
    for name in ("backward", "blocks.3"):
        emitter.push(name)
    emitter.pop()

    def engine() -> None:
        emitter.push("blocks.3.attention")
        emitter.push("softmax")
        emitter.pop()
        emitter.pop()

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    emitter.pop()
    inside = "backward|blocks.3.attention"
    assert told == ["backward", "backward|blocks.3", "backward", inside, f"{inside}|softmax", inside, "backward", ""]


def test_ranges_are_joined_without_modules_that_the_inner_path_tells():
    assert joined_ranges(()) == ""
    assert (
        joined_ranges(("forward", "blocks.3", "blocks.3.attention", "softmax")) == "forward|blocks.3.attention|softmax"
    )
    assert joined_ranges(("forward", "blocks.1", "blocks.10")) == "forward|blocks.1|blocks.10"


def test_files_are_named_without_their_place():
    assert portable_path(torch.nn.modules.module.__file__) == "torch/nn/modules/module.py"
    assert portable_path("/tmp/torchinductor_someone/ab/cabc.py") == "ab/cabc.py"
    assert (portable_path("/train.py"), portable_path("<string>"), portable_path("")) == ("train.py", "<string>", "")


def measured_run(out: Path, **changes: Any) -> Run:
    settings = Settings(warmup_floor=1, warmup_cap=1, steps_floor=3, steps_cap=3, profile=False)
    request = StepRequest(
        workload=mini(**changes), settings=settings, device="cpu", out=str(out), memory=MemoryRequest()
    )
    return measure_step(request)[0]


def test_the_run_lists_the_snapshot_and_has_its_figures(out: Path):
    run = measured_run(out)
    assert run.status == "done" and run.artifacts["memory"] == MEMORY_FILE
    assert run.evidence.memory == notes_of(read(out / run.id)).measured
    assert run.evidence.memory and run.evidence.memory.allocated_peak == max(
        live for _, live in live_bytes(read(out / run.id))
    )


def test_a_history_that_fails_is_a_note_and_the_run_is_done(out: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pickle, "dump", full)
    run = measured_run(out)
    assert run.status == "done" and run.failure is None and "memory" not in run.artifacts
    assert any(note.startswith("no memory history: ") and "No space left" in note for note in run.evidence.notes)
    assert [path.name for path in (out / run.id).iterdir()] == ["run.json"]
    assert not torch.is_grad_enabled() or not any(m._forward_hooks for m in warmed().model.modules())


@pytest.mark.long
def test_ctrl_c_while_recording_keeps_the_times(tmp_path: Path):
    process = run_until(("stepscope: memory",), *QUICK, "--no-profile", "--record", "memory", "--runs", str(tmp_path))
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert "Traceback" not in stderr
    (run,), _ = load_runs([tmp_path])
    assert run.status == "done" and run.samples["step"].count == 60
    if process.returncode == 130:  # it came in time
        assert run.failure and run.failure.during in ("memory", "ceiling")


@pytest.mark.long
def test_the_run_prints_what_filled_its_memory(tmp_path: Path):
    small = ("run", *QUICK, "--steps", "3", "--no-profile", "--record", "memory", "--runs", str(tmp_path))
    result = stepscope(*small)
    assert result.returncode == 0, result.stderr
    assert "The peak: in backward" in result.stdout and "saved for backward by" in result.stdout
    fields = json.loads(stepscope(*small, "--json").stdout)
    assert fields["memory"]["peak_bytes"] == fields["evidence"]["memory"]["backward_peak"]
    assert sum(fields["memory"]["categories"].values()) == fields["memory"]["peak_bytes"]


def test_stacks_without_memory_are_refused():
    result = stepscope("run", "--memory-stacks", "all")
    assert result.returncode == 2 and "--memory-stacks belongs to --record memory" in result.stderr
    result = stepscope("run", *QUICK, "--record", "memory", "--memory-stacks", "c")
    assert result.returncode == 2 and "unknown memory-stacks 'c': choose one of python, all" in result.stderr
