"""The symbolic step beside the step itself, on the CPU: the same tensors kept, the same bytes at every peak.

A change of models/ that the symbolic model does not follow fails here. All tensors of this step are multiples of the
64 bytes to which PyTorch's CPU allocator aligns, so predictions are exact but for single numbers: the loss, the count
of its targets, a factor or -inf that became a tensor.
"""

import gc
import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stepscope.allocations.prediction.estimate import estimate, symbolic_model
from stepscope.allocations.prediction.symbolic_tensors import Ledger, Node, RoundingAllocator, Storage, Tape
from stepscope.core.errors import InputError
from stepscope.core.formulas.transformer import parameter_count
from stepscope.core.model_config import PRESETS
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.fake_module import estimate_by_running
from stepscope.recording.memory_history import capture_memory
from stepscope.training.training_step import TrainingStep
from tests.conftest import at_length, mini
from tests.cpu_allocations import allocated_bytes

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
NUMBERS = 160
"""Bytes that single numbers may make: some of 4 or 8 that the symbolic model leaves out, some in it that take 64."""
LAYERS = 3


def three(**changes: Any) -> TextbookWorkload:
    return mini(**{"layers": LAYERS, "phase": "forward-backward", **changes})


# ---- tensor by tensor


def kept_by_symbolic_model(workload: TextbookWorkload) -> Counter[int]:
    """Bytes of every storage that the graph of the loss keeps."""
    model = symbolic_model(workload, "cpu")
    tape = Tape(Ledger(RoundingAllocator(1)), recording=True)
    loss = model.loss(tape, model.head(tape, model.run_blocks(tape, model.embedding(tape))))
    seen: dict[int, Node] = {}
    storages: dict[int, Storage] = {}
    waiting = [loss.node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Node) and id(node) not in seen:
            seen[id(node)] = node
            storages |= {id(storage): storage for storage in node.saved}
            waiting += node.inputs
    return Counter(storage.bytes for storage in storages.values())


def kept_in_truth(workload: TextbookWorkload) -> Counter[int]:
    """Bytes of every storage that autograd saves, but for parameters, buffers and batches."""
    step = TrainingStep(workload, CPU)
    resident = [*step.model.parameters(), *step.model.buffers(), *(t for batch in step.batches for t in batch)]
    owned = {tensor.untyped_storage().data_ptr() for tensor in resident}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    step.prepare()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step.phases[0].run()
    return Counter(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in owned)


@pytest.mark.parametrize("attention", ["reference", "sdpa-math", "sdpa"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "bf16-pure", "bf16-master"])
def test_autograd_keeps_the_very_tensors_that_the_symbolic_model_keeps(dtype: str, attention: str):
    """Size by size. Autocast on a CPU leaves exponentials in 16 bits, where a GPU takes them to fp32."""
    workload = three(dtype=dtype, attention=attention)
    truth = kept_in_truth(workload)
    assert truth == kept_by_symbolic_model(workload)
    # The loss, which nothing saves, takes the place of the one before it.
    assert estimate(workload, "cpu").saved_for_backward == sum(-(-size // 64) * 64 * n for size, n in truth.items())


# ---- byte by byte


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_is_set_aside() -> None:
    """Each test collects twice and more, and looking through what other files have left takes long."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_dies_late() -> Iterator[None]:
    """What earlier tests left in cycles must not be freed while this one counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def measured_peaks(workload: TextbookWorkload) -> dict[str, int]:
    """Of the second step, each phase's highest, over what there was before the step; and the largest `saved`."""
    gc.collect()  # what a test before left in circles must not be released meanwhile
    step = TrainingStep(workload, CPU)
    peaks: dict[str, int] = {}
    for _ in range(2):
        step.prepare()
        peaks, alive = {}, 0
        for phase in step.phases:
            left, peak = allocated_bytes(phase.run)
            peaks[phase.name] = max(peaks.get(phase.name, 0), alive + peak)
            alive += left
            if phase.name == "forward":
                peaks["saved"] = max(peaks.get("saved", 0), left)
    return peaks


def predicted_peaks(workload: TextbookWorkload) -> dict[str, int]:
    predicted = estimate(workload, "cpu")
    before = predicted.after_parameters
    peaks = {"forward": predicted.forward_peak - before}
    if predicted.saved_for_backward is not None and predicted.backward_peak is not None:
        peaks |= {"saved": predicted.saved_for_backward, "backward": predicted.backward_peak - before}
    if predicted.optimizer_peak is not None:
        peaks["optimizer"] = predicted.optimizer_peak - before
    return peaks


def assert_alike(workload: TextbookWorkload, bytes_off: int = NUMBERS) -> None:
    # Where the CPU has instructions for fp16, oneDNN lays operands of products out anew. Without it all CPUs are alike.
    with torch.backends.mkldnn.flags(enabled=False):
        measured = measured_peaks(workload)
    predicted = predicted_peaks(workload)
    if workload.phase == "forward":
        measured.pop("saved")  # its logits, which nobody takes
    off = {name: measured[name] - predicted[name] for name in measured}
    assert predicted.keys() == measured.keys()
    assert all(abs(difference) <= bytes_off for difference in off.values()), (workload.key, off)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "every-1", "every-2"])
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_every_phase_has_the_peak_that_is_predicted(dtype: str, attention: str, checkpointing: str):
    assert_alike(three(dtype=dtype, attention=attention, checkpointing=checkpointing))


@pytest.mark.parametrize("dtype", ["fp32", *at_length("fp16")])
@pytest.mark.parametrize(
    "changes",
    [{}, {"seq_len": 64}, {"d_ff": 512}, {"vocabulary": 16}, {"d_model": 64, "heads": 4, "kv_heads": 2}, *at_length(
        {"batch_size": 4, "accumulation": 2}, {"d_model": 64, "heads": 1}, {"phase": "train", "tied": True},
    )],
)  # fmt: skip
def test_a_step_that_keeps_attentions_output_is_predicted_to_the_byte(dtype: str, changes: dict[str, Any]):
    assert_alike(three(dtype=dtype, attention="sdpa", checkpointing="attention", **changes))
    for last in (1, 2):
        assert_alike(three(dtype=dtype, attention="sdpa", checkpointing=f"selective-{last}", **changes))


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("attention", ["reference", "sdpa", *at_length("sdpa-math")])
@pytest.mark.parametrize("dtype", ["fp32", *at_length("bf16")])
def test_a_step_with_shared_keys_is_predicted_to_the_byte(dtype: str, attention: str, kv_heads: int):
    shared = {"d_model": 64, "heads": 4, "kv_heads": kv_heads, "dtype": dtype, "attention": attention}
    assert kept_in_truth(three(**shared)) == kept_by_symbolic_model(three(**shared))
    for checkpointing in ("none", "selective", "every-2"):
        assert_alike(three(checkpointing=checkpointing, **shared))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("phase", ["forward-backward", "train"])
@pytest.mark.parametrize("dtype", ["bf16", *at_length("fp32", "bf16-pure")])
def test_a_step_with_a_tied_head_is_predicted_to_the_byte(dtype: str, phase: str, accumulation: int):
    """With a vocabulary so large that the weight's two gradients and their sum are the peak of backward."""
    tied = {"tied": True, "vocabulary": 512, "dtype": dtype, "phase": phase, "accumulation": accumulation}
    assert kept_in_truth(three(**tied)) == kept_by_symbolic_model(three(**tied))
    for checkpointing in ("none", "every-1"):
        assert_alike(three(checkpointing=checkpointing, attention="sdpa", **tied))


@pytest.mark.parametrize("changes", [{"seq_len": 64}, {"d_ff": 512}, {"vocabulary": 16}, {"d_model": 64, "heads": 1}])
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_wherever_the_peak_lies(attention: str, changes: dict[str, int]):
    """In attention, in the feed-forward, at the loss: shapes move it."""
    for checkpointing in ("none", "every-1"):
        assert_alike(three(attention=attention, checkpointing=checkpointing, **changes))
        assert_alike(three(attention=attention, phase="forward", dtype="fp16", **changes))


def test_a_windows_mask_and_the_distances_it_is_made_from():
    """With one head of one sequence in 16 bits the distances, in int64, are the peak of forward."""
    one_head = three(window=3, batch_size=1, d_model=32, heads=1, seq_len=128, dtype="fp16", phase="forward")
    plain = msgspec.structs.replace(one_head, model=msgspec.structs.replace(one_head.model, window=None))
    assert predicted_peaks(one_head)["forward"] > predicted_peaks(plain)["forward"]
    assert_alike(one_head)
    assert_alike(three(window=3, checkpointing="every-1"))
    kept = three(window=3, attention="unsafe", seq_len=64)
    assert kept_in_truth(kept) == kept_by_symbolic_model(kept)
    windowed = three(window=3)
    by_running = estimate_by_running(windowed).memory
    assert by_running.saved_for_backward == estimate(windowed, "cuda").saved_for_backward


@pytest.mark.parametrize("checkpointing", ["none", "selective", "every-1"])
def test_the_math_backend_of_fused_attention(checkpointing: str):
    for seq_len in (16, 64):
        assert_alike(three(attention="sdpa-math", checkpointing=checkpointing, seq_len=seq_len))
        assert_alike(three(attention="sdpa-math", phase="forward", dtype="fp16", seq_len=seq_len))


@pytest.mark.parametrize("checkpointing", ["none", "every-2"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_micro_batches(dtype: str, checkpointing: str):
    assert_alike(three(dtype=dtype, checkpointing=checkpointing, batch_size=4, accumulation=2))


@pytest.mark.parametrize("optimizer", ["adamw-foreach", "adamw-fused", "adamw-loop", "adamw-bf16-state"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_optimizers(dtype: str, optimizer: str):
    """The count of steps, a number for each parameter, is on the host, but for the fused one."""
    assert_alike(three(dtype=dtype, optimizer=optimizer, phase="train"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16-master"])
def test_clipping(dtype: str):
    """By PyTorch a norm for each tensor; in one launch a number for each chunk, and two."""
    workload = three(dtype=dtype, optimizer="adamw-fused", phase="train")
    clipped = msgspec.structs.replace(workload, clip=1.0)
    found, plain = ({**measured_peaks(each)} for each in (clipped, workload))
    wanted, before = predicted_peaks(clipped), predicted_peaks(workload)
    assert abs((found["optimizer"] - plain["optimizer"]) - (wanted["optimizer"] - before["optimizer"])) <= NUMBERS
    assert found["optimizer"] - plain["optimizer"] >= 0
    launch, without = (estimate(three(optimizer="adamw-one-launch", phase="train", clip=clip)) for clip in (1.0, None))
    assert launch.after_parameters - without.after_parameters == 1024


def test_moments_of_8_bits_are_a_quarter_and_a_scale_for_256():
    workload = TextbookWorkload(model=PRESETS["small"], phase="train", dtype="bf16", optimizer="adamw-one-launch")
    full = estimate(workload).after_parameters
    eight = estimate(msgspec.structs.replace(workload, optimizer="adamw-8bit")).after_parameters
    saved = parameter_count(workload.model) * (6 - 8 / 256)
    assert full - eight == pytest.approx(saved, rel=0.01)


@pytest.mark.parametrize("dtype", ["bf16", "bf16-pure"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "every-1"])
def test_in_bf16_a_cpus_products_take_scratch_memory_besides(dtype: str, checkpointing: str):
    """oneDNN lays operands out anew: what is saved is exact, the peaks are what is predicted or more."""
    workload = three(dtype=dtype, checkpointing=checkpointing)
    measured, predicted = measured_peaks(workload), predicted_peaks(workload)
    assert abs(measured["saved"] - predicted["saved"]) <= NUMBERS
    for phase in ("forward", "backward"):
        assert -NUMBERS <= measured[phase] - predicted[phase] <= 0.2 * predicted[phase]


@pytest.mark.parametrize("changes", [{}, {"checkpointing": "every-1"}, {"batch_size": 4, "accumulation": 2}])
def test_a_recorded_step_shows_the_same_peaks(tmp_path: Path, changes: dict[str, Any]):
    """What `run --memory` measures, and `fit` predicts."""
    workload = three(phase="train", **changes)
    step = TrainingStep(workload, CPU)
    for _ in range(2):
        step.prepare()
        for phase in step.phases:
            phase.run()
    measured = capture_memory(step, CPU, tmp_path, workload=workload).measured
    predicted = estimate(workload, "cpu")
    for name in ("after_parameters", "forward_peak", "saved_for_backward", "backward_peak", "optimizer_peak"):
        assert abs(getattr(measured, name) - getattr(predicted, name)) <= NUMBERS, name
    parameters = sum(tensor.nbytes for tensor in step.model.parameters())
    assert measured.gradient_bytes == predicted.by_phase["optimizer"]["gradients"] == parameters


# ---- products of 8 bits

SCALES = 2 * NUMBERS
"""Bytes that single numbers may make where the scales of two operands are among them."""


@pytest.mark.parametrize("attention", ["reference", *at_length("sdpa-math", "sdpa")])
@pytest.mark.parametrize("dtype", ["fp8", "fp8-row"])
def test_a_step_of_8_bits_keeps_its_operands_in_16(dtype: str, attention: str):
    workload = three(dtype=dtype, attention=attention)
    assert kept_in_truth(workload) == kept_by_symbolic_model(workload)
    assert_alike(workload, SCALES)


@pytest.mark.parametrize("dtype", ["fp8", "fp8-row"])
@pytest.mark.parametrize(
    "changes",
    [
        {"checkpointing": "every-1"},
        {"checkpointing": "selective"},
        {"phase": "train", "batch_size": 4, "accumulation": 2, "optimizer": "adamw-fused"},
        *at_length(
            {"checkpointing": "every-2"}, {"checkpointing": "attention", "attention": "sdpa"}, {"phase": "forward"},
            {"d_ff": 512}, {"seq_len": 64}, {"vocabulary": 16}, {"d_model": 64, "heads": 4, "kv_heads": 2},
            {"tied": True}, {"d_ff": 72}, {"d_ff": 72, "checkpointing": "every-1"},
        ),
    ],
)  # fmt: skip
def test_a_step_of_8_bits_is_predicted_to_the_byte(changes: dict[str, Any], dtype: str):
    """Of 72 columns the linear layers stay in 16 bits."""
    assert_alike(three(**{"attention": "sdpa", "dtype": dtype, **changes}), SCALES)


def test_what_is_not_predicted_of_8_bits_is_refused_in_one_line():
    with pytest.raises(InputError, match=r"^the memory of a compiled step in fp8 is not predicted: ask for --compile"):
        estimate(three(dtype="fp8", compile="default"))
    with pytest.raises(InputError, match="products of 8 bits take rows in multiples of 16, and a layer was given 18"):
        estimate(three(dtype="fp8", seq_len=9))
    with pytest.raises(InputError, match="dtype fp8-row needs linear layers whose sizes are multiples of 16"):
        estimate(three(dtype="fp8-row", d_model=24, heads=2))


# ---- fused parts

FUSED = {"norm": "fused", "rope": "fused", "mlp": "fused", "loss": "fused"}


@pytest.fixture
def no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are not run, since Triton's interpreter makes copies of what they take. Their results are any numbers."""
    pytest.importorskip("triton", reason="the fused parts are written in Triton, which is not installed")
    for part in ("norm", "rope", "mlp", "loss"):
        module = importlib.import_module(f"stepscope.kernels.parts.{part}")
        monkeypatch.setattr(module, "launch_at", lambda *_, **__: None)


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize(
    ("parts", "choices"),
    [
        (FUSED, {"attention": "sdpa"}),
        (FUSED, {"dtype": "fp16", "checkpointing": "selective"}),
        (FUSED, {"dtype": "fp16", "checkpointing": "selective-1", "attention": "sdpa"}),
        (FUSED, {"tied": True, "vocabulary": 512, "accumulation": 2, "phase": "train"}),
        *at_length(
            *(({part: "fused"}, {"dtype": dtype}) for part in FUSED for dtype in ("fp32", "fp16")),
            *(
                ({**FUSED, part: "reference"}, {"attention": attention, "checkpointing": checkpointing})
                for part in FUSED
                for attention in ("reference", "sdpa")
                for checkpointing in ("selective", "every-1", "every-2", *(("selective-2",) * (attention == "sdpa")))
            ),
            (FUSED, {"d_model": 64, "heads": 4, "kv_heads": 2, "attention": "sdpa"}),
            (FUSED, {"phase": "forward", "dtype": "fp16", "vocabulary": 512}),
        ),
    ],
)
def test_a_step_of_fused_parts_is_predicted_to_the_byte(parts: dict[str, Any], choices: dict[str, Any]):
    workload = three(**parts, **choices)
    if workload.phase != "forward" and workload.checkpointing == "none":
        assert kept_in_truth(workload) == kept_by_symbolic_model(workload)
    assert_alike(workload)


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize("dtype", ["bf16-master", *at_length("bf16", "bf16-pure")])
def test_fused_parts_keep_in_16_bits_what_is_predicted(dtype: str):
    workload = three(dtype=dtype, **FUSED)
    assert kept_in_truth(workload) == kept_by_symbolic_model(workload)
    measured, predicted = measured_peaks(workload), predicted_peaks(workload)
    assert abs(measured["saved"] - predicted["saved"]) <= NUMBERS


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize("dtype", ["fp8", "fp8-row"])
@pytest.mark.parametrize("checkpointing", ["none", "every-1", *at_length("selective")])
def test_fused_parts_with_products_of_8_bits(checkpointing: str, dtype: str):
    assert_alike(three(dtype=dtype, attention="sdpa", checkpointing=checkpointing, **FUSED), SCALES)


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", ["fp32", *at_length("fp16")])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"checkpointing": "selective", "d_model": 64, "heads": 4, "kv_heads": 2},
        {"checkpointing": "every-2", "d_ff": 512},
        FUSED,
        *at_length(
            {"seq_len": 64},
            {"phase": "forward"},
            {"d_model": 64, "heads": 4, "kv_heads": 1},
            {"d_model": 64, "heads": 1},
            {"phase": "train", "batch_size": 4, "accumulation": 2},
            {**FUSED, "checkpointing": "every-1"},
            {"mlp": "fused", "checkpointing": "selective"},
            {"rope": "fused", "d_model": 64, "heads": 4, "kv_heads": 2},
        ),
    ],
    ids=lambda choices: " ".join(map(str, choices.values())) or "as it is",
)
def test_joint_projections_are_predicted_to_the_byte(choices: dict[str, Any], dtype: str, attention: str):
    """What is kept of one of them keeps them all, and so do the gradients of their weights."""
    workload = three(projections="joint", dtype=dtype, attention=attention, **choices)
    if workload.phase != "forward" and workload.checkpointing == "none":
        assert kept_in_truth(workload) == kept_by_symbolic_model(workload)
    assert_alike(workload)


def test_what_is_not_predicted_of_parts_is_refused_in_one_line():
    with pytest.raises(
        InputError, match=r"^the memory of a step with loss liger is not predicted: choose --loss refer"
    ):
        estimate(three(loss="liger"), "cpu")
    with pytest.raises(InputError, match="a compiled step with norm fused, rope fused, mlp fused, loss fused is not"):
        estimate(three(compile="default", **FUSED), "cpu")
    with pytest.raises(InputError, match="compiled step with projections joint is not predicted: choose --proj"):
        estimate(three(compile="default", projections="joint"), "cpu")
    with pytest.raises(InputError, match="norm fused cannot be run on fake tensors"):
        estimate_by_running(three(norm="fused"))
