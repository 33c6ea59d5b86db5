"""What only a GPU can show. Skipped, with the reason, where there is none."""

import gc
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.allocations.prediction.estimate import estimate
from stepscope.core.errors import InputError
from stepscope.core.evidence import Evidence
from stepscope.core.model_config import configure
from stepscope.core.parts import ATTENTIONS, PARTS, Attention
from stepscope.core.run import Run, Settings
from stepscope.core.units import GIB
from stepscope.core.workloads import COMPILES, OF_ONE_LAUNCH, OPTIMIZERS, Dtype
from stepscope.engine.request import StepRequest
from stepscope.engine.step import measure_step
from stepscope.engine.sweep import run_sweep
from stepscope.engine.sweep_plan import Cell, SweepPlan
from stepscope.recording.device import CudaDevice
from stepscope.recording.driven import observe_step, profile_step, step_operators
from stepscope.recording.nvml import nvml_kept_open, read_gpu
from stepscope.recording.precision import matmul_precision, probe_relative_error
from stepscope.recording.step import Phase
from stepscope.recording.timer import measure
from stepscope.runs.checks import check_run
from stepscope.training import training_step
from stepscope.training.attention import implementation
from stepscope.training.training_step import CUDA_GRAPH_MODES, TrainingStep
from tests.conftest import make_run, mini, run_steps, workload

pytestmark = pytest.mark.gpu

QUICK = Settings(warmup_floor=2, warmup_cap=2, steps_floor=5, steps_cap=5, seconds=0)


@pytest.fixture(autouse=True)
def _clean_gpu() -> None:
    """Each test finds the memory that earlier ones used freed, and no limit on it."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", 0)


def measured(out: Path, settings: Settings = QUICK, limit: int | None = None, **changes: Any) -> Run:
    request = StepRequest(
        workload=workload(**{"seq_len": 64, **changes}), settings=settings, device="cuda", out=str(out),
        memory_limit_bytes=limit,
    )  # fmt: skip
    return measure_step(request)[0]


def kinds(run: Run) -> set[str]:
    return {finding.kind for finding in check_run(run)}


def test_events_and_host_clock_agree(out: Path):
    """Where others use the machine, the host waits between phases in some steps: the phases are then less than them."""
    run = measured(out, model="small", seq_len=256, batch_size=4)
    phases = [run.samples[name].values_s for name in ("forward", "backward", "optimizer")]
    shares = [sum(parts) / step for *parts, step in zip(*phases, run.samples["step"].values_s, strict=True)]
    assert max(shares) == pytest.approx(1, abs=0.05)
    assert run.samples["forward"].clock == "cuda events"
    assert not {"timer-stopped-early", "impossible-rate", "precision-mismatch"} & kinds(run)


def test_memory_is_the_allocators_own_count(out: Path):
    run = measured(out, model="small", seq_len=256, batch_size=4)
    memory = run.evidence.memory
    assert memory is not None
    figures = (
        memory.after_parameters, memory.resident_expected, memory.saved_for_backward, memory.forward_peak,
        memory.backward_peak, memory.optimizer_peak, memory.reserved_peak,
    )  # fmt: skip
    assert None not in figures
    before, expected, saved, forward, _, _, reserved = (figure or 0 for figure in figures)
    assert before >= expected > 3 * memory.parameter_bytes
    assert forward >= before + saved
    assert reserved >= max(figure or 0 for figure in figures[3:6])
    assert "graph-kept-alive" not in kinds(run)


def test_memory_limit_gives_out_of_memory_with_its_module(out: Path):
    run = measured(out, limit=4 * GIB, model="small", seq_len=1024, batch_size=16)
    assert run.status == "out-of-memory" and run.failure is not None
    assert run.failure.phase == "forward" and (run.failure.module or "").startswith("blocks.")


def test_fp32_that_was_tf32_is_found_for_real(gpu: torch.device, out: Path):
    with matmul_precision("fp32"):
        assert probe_relative_error(gpu) < 1e-6
    with matmul_precision("tf32"):
        assert 1e-5 < probe_relative_error(gpu) < 1e-2
    assert "precision-mismatch" not in kinds(measured(out, dtype="tf32"))
    sound = measured(out, dtype="fp32")
    assert "precision-mismatch" not in kinds(sound)


def test_a_step_that_turns_tf32_on_behind_our_back_is_found(out: Path, monkeypatch: pytest.MonkeyPatch):
    forward = TrainingStep._forward

    def sly(step: TrainingStep, micro: int) -> None:
        torch.set_float32_matmul_precision("high")
        forward(step, micro)

    monkeypatch.setattr(TrainingStep, "_forward", sly)
    assert "precision-mismatch" in kinds(measured(out, dtype="fp32", model="small", seq_len=128))


@pytest.mark.parametrize("attention", ["reference", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn"])
@pytest.mark.parametrize("checkpointing", ["every-1", "every-2", "selective", "offload-1", "offload-2"])
def test_checkpointing_gives_the_same_gradients_bit_by_bit(gpu: torch.device, attention: Attention, checkpointing: str):
    assert_same_gradients(gpu, attention, checkpointing)


@pytest.mark.parametrize("attention", ["sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "flash"])
@pytest.mark.parametrize("checkpointing", ["attention", "selective-1"])
def test_kept_attention_gives_the_same_gradients_bit_by_bit(
    gpu: torch.device, attention: Attention, checkpointing: str
):
    assert_same_gradients(gpu, attention, checkpointing)


@pytest.mark.parametrize("parts", ["reference", "fused"])
def test_offloading_spares_the_device_and_changes_no_bit(gpu: torch.device, parts: str):
    """Blocks large enough that copies and kernels run at once, over several steps that use the host's memory again.
    Attention is written out: fused kernels may add up a gradient of queries in any order."""
    choices: dict[str, Any] = {
        "model": configure("tiny", layers=8, d_model=1024, d_ff=4096, heads=8), "batch_size": 2, "seq_len": 2048,
        "dtype": "bf16", "attention": "reference", "phase": "forward-backward", **dict.fromkeys(PARTS, parts),
    }  # fmt: skip
    found: dict[str, tuple[list[torch.Tensor], int]] = {}
    for checkpointing in ("selective", "offload-6"):
        step = TrainingStep(workload(**choices, checkpointing=checkpointing), gpu)
        for _ in range(4):
            torch.cuda.reset_peak_memory_stats()
            run_steps(step)
        peak, predicted = torch.cuda.max_memory_allocated(), estimate(step.workload)
        assert peak == pytest.approx(max(predicted.forward_peak, predicted.backward_peak or 0), rel=0.02)
        found[checkpointing] = [p.grad.cpu() for p in step.model.parameters() if p.grad is not None], peak
        del step
        gc.collect()
        torch.cuda.empty_cache()
    (plain, whole), (ours, spared) = found.values()
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert spared < 0.85 * whole


@pytest.mark.parametrize("attention", ["sdpa-efficient", "sdpa", "flash"])
def test_a_host_that_runs_ahead_offloads_right(gpu: torch.device, attention: Attention):
    """Steps of several micro-batches, for which nobody waits: the next one's copies are queued behind those back. Some
    of PyTorch's kernels return seeds in the host's memory besides."""
    choices: dict[str, Any] = {
        "model": configure("tiny", layers=6, d_model=512, d_ff=2048, heads=8), "batch_size": 8, "accumulation": 4,
        "seq_len": 256, "dtype": "bf16", "attention": attention, "phase": "forward-backward",
    }  # fmt: skip
    found: list[list[torch.Tensor]] = []
    for checkpointing in ("selective", "selective", "offload-4"):
        step = TrainingStep(workload(**choices, checkpointing=checkpointing), gpu)
        for _ in range(4):
            step.prepare()
            for phase in step.phases:
                phase.run()
        found.append([p.grad for p in step.model.parameters() if p.grad is not None])
    plain, again, ours = found

    def apart(other: list[torch.Tensor]) -> float:
        return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(plain, other, strict=True))

    # To the bit where the step repeats itself; else as near as it does.
    assert apart(ours) <= 4 * apart(again)


def assert_same_gradients(gpu: torch.device, attention: Attention, checkpointing: str) -> None:
    plain, ours = (
        TrainingStep(mini(phase="forward-backward", dtype="bf16", attention=attention, checkpointing=c), gpu)
        for c in ("none", checkpointing)
    )
    for step in (plain, ours):
        run_steps(step)
    for a, b in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_accumulation_in_replayed_graphs_gives_the_whole_batchs_gradients(gpu: torch.device, checkpointing: str):
    """Gradients live in the graphs' own memory, which the next micro-batch's replay must not overwrite."""
    sizes: dict[str, Any] = {"model": "tiny", "batch_size": 4, "seq_len": 128, "phase": "forward-backward"}
    whole = TrainingStep(workload(**sizes), gpu)
    split = TrainingStep(workload(**sizes, accumulation=4, checkpointing=checkpointing, compile="reduce-overhead"), gpu)
    for _ in range(4):  # warm-up, recording, replays
        for step in (whole, split):
            run_steps(step)
        for a, b in zip(split.model.parameters(), whole.model.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            assert (a.grad - b.grad).abs().max() < 1e-5 * b.grad.abs().max()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "bf16-pure"])
def test_low_precision_runs_as_asked(out: Path, dtype: str):
    run = measured(out, dtype=dtype, model="small", seq_len=128)
    assert run.status == "done"
    assert not {f.kind for f in run.findings if f.severity == "error"}
    observation = run.evidence.observation
    assert observation is not None
    assert observation.product_dtypes == (("float16",) if dtype == "fp16" else ("bfloat16",))


def test_autocast_round_backward_is_seen_on_autograds_own_thread(gpu: torch.device):
    step = TrainingStep(mini(dtype="bf16", phase="forward-backward"), gpu)
    forward, backward = (phase.run for phase in step.phases)

    def wrapped() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            backward()

    observation, _ = observe_step(step, gpu)
    assert observation.autocast_in_backward is False
    step.phases = (Phase(name="forward", run=forward), Phase(name="backward", run=wrapped))
    observation, _ = observe_step(step, gpu)
    assert observation.autocast_in_backward is True


def test_a_timer_that_does_not_wait_is_found_for_real(gpu: torch.device):
    """The real loop on the real device, with the synchronisation left out where the step ends."""

    class Hasty(CudaDevice):
        calls = 0

        def synchronize(self) -> None:
            self.calls += 1
            if self.calls % 2:  # before a step: wait, so that the steps do not run into each other
                super().synchronize()

        def elapsed_s(self, start: Any, end: Any) -> float:
            super().synchronize()
            return super().elapsed_s(start, end)

    step = TrainingStep(workload(model="medium", seq_len=512, batch_size=8), gpu)
    result = measure({"step": step}, device=Hasty(gpu), settings=QUICK)["step"]
    assert "timer-stopped-early" in kinds(make_run(step.workload, samples=result.samples))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name, record in ATTENTIONS.items() if record.compiler is None])
def test_attention_on_the_gpu_against_float64(name: Attention, dtype: torch.dtype, gpu: torch.device):
    asked: Dtype = "fp32" if dtype == torch.float32 else "bf16"
    if asked not in ATTENTIONS[name].cuda_dtypes:
        pytest.skip(f"{name} does not run in {asked}")
    generator = torch.Generator(device=gpu).manual_seed(0)
    q, k, v = (torch.randn(2, 4, 128, 64, device=gpu, generator=generator).to(dtype) for _ in range(3))
    with matmul_precision("fp32"):
        out = implementation(name)(q, k, v, causal=True)
    exact = implementation("reference")(q.double(), k.double(), v.double(), causal=True)
    error = (out.double() - exact).norm() / exact.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


def test_sdpa_names_the_backend_that_ran(out: Path):
    run = measured(out, dtype="bf16", attention="sdpa-flash", model="small", seq_len=128)
    assert run.evidence.profile is not None
    assert "aten::_scaled_dot_product_flash_attention" in run.evidence.profile.attention_operators


def test_peaks_inside_cuda_graphs_are_absent_not_wrong(out: Path):
    run = measured(out, compile="reduce-overhead", model="tiny")
    memory = run.evidence.memory
    assert run.status == "done" and memory is not None
    assert memory.allocated_peak is None and memory.saved_for_backward is None and memory.reserved_peak
    assert any("CUDA graphs" in note for note in run.evidence.notes)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_step_computes_what_the_eager_one_does(mode: str, gpu: torch.device):
    eager, compiled = (TrainingStep(mini(compile=m), gpu) for m in ("eager", mode))
    for _ in range(4):
        losses = [run_steps(step) for step in (eager, compiled)]
        assert losses[0] is not None
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_profile_finds_the_kernels_and_leaves_annotations_out(gpu: torch.device):
    step = TrainingStep(workload(model="small", seq_len=256), gpu)
    run_steps(step, 2)
    profile = profile_step(step, gpu, CudaDevice(gpu))
    assert 0 < profile.busy_s < profile.step_s
    assert sum(kernel.total_s for kernel in profile.kernels) >= profile.busy_s * 0.999
    assert not any(kernel.name.startswith("Optimizer.step") for kernel in profile.kernels)
    assert any("gemm" in kernel.name.lower() or "nvjet" in kernel.name for kernel in profile.kernels)


def test_nvml_tells_clocks_power_and_company(gpu: torch.device):
    torch.zeros(1, device=gpu)
    reading = read_gpu(gpu)
    assert reading is not None
    assert reading.sm_clock_mhz and reading.power_w and reading.power_limit_w and reading.temperature_c
    if "PYTEST_XDIST_WORKER" not in os.environ:  # side by side, the other workers are the company
        assert reading.other_processes == 0


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi on the PATH")
def test_power_and_limits_are_nvidia_smis_and_physically_possible(gpu: torch.device):
    """A slip by a thousand in a unit (milliwatts, nanoseconds) is out of each of these ranges."""
    query = "power.draw,enforced.power.limit,clocks.max.sm,temperature.gpu,memory.used"
    uuid = f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"
    a = torch.randn(8192, 8192, device=gpu, dtype=torch.bfloat16)
    begin = read_gpu(gpu)
    for _ in range(3000):  # some seconds at the power cap
        torch.mm(a, a)
    torch.cuda.synchronize(gpu)
    reading = read_gpu(gpu)
    told = subprocess.run(
        ["nvidia-smi", f"--id={uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    power_w, limit_w, clock_mhz, temperature_c, used_mib = (float(figure) for figure in told.stdout.split(","))
    assert begin is not None and reading is not None
    assert reading.power_limit_w == pytest.approx(limit_w, abs=1.0)
    assert reading.sm_clock_max_mhz == clock_mhz
    assert reading.power_w is not None and 10 < reading.power_w < 1.5 * limit_w and 10 < power_w < 1.5 * limit_w
    assert reading.temperature_c is not None and abs(reading.temperature_c - temperature_c) < 20
    assert reading.memory_used_bytes == pytest.approx(used_mib * 2**20, rel=0.2, abs=2**30)
    passed_s = (reading.read_at_s or 0) - (begin.read_at_s or 0)
    for before_s, after_s in (
        (begin.power_limited_s, reading.power_limited_s),
        (begin.thermal_limited_s, reading.thermal_limited_s),
    ):
        assert before_s is not None and after_s is not None
        assert 0 <= after_s - before_s <= 1.1 * passed_s + 0.1  # its counter is brought up to date now and then
        assert after_s < 10 * 365 * 86400


@pytest.mark.multigpu
def test_two_gpus_share_a_sweep(out: Path):
    cells = tuple(Cell(workload=mini(seq_len=n), settings=QUICK) for n in (8, 16, 24, 32))
    runs = run_sweep(SweepPlan(cells=cells, devices=("cuda:0", "cuda:1"), out=str(out)))
    assert [run.status for run in runs] == ["done"] * 4
    assert {run.environment.device_index for run in runs if run.environment} == {0, 1}


WHAT_RAN = ("attention-mismatch", "optimizer-mismatch", "compile-mode-mismatch", "accumulation-mismatch",
            "checkpointing-mismatch", "optimizer-skipped", "parameters-not-finite")  # fmt: skip


@pytest.mark.parametrize("profile", [True, False])
@pytest.mark.parametrize(
    "attention",
    ["reference", "sdpa", "sdpa-math", "sdpa-efficient", "sdpa-flash", "sdpa-cudnn", "chunked", "flex", "flash"],
)
def test_the_attention_asked_for_is_the_one_that_ran(out: Path, attention: Attention, profile: bool):
    settings = Settings(warmup_floor=2, warmup_cap=2, steps_floor=5, steps_cap=5, seconds=0, profile=profile)
    run = measured(out, settings, model="tiny", dtype="bf16", attention=attention, seq_len=128)
    assert run.evidence.operators is not None, run.evidence.notes
    assert not {*WHAT_RAN, "compiled-while-measured"} & kinds(run), [f.sentence for f in check_run(run)]


@pytest.mark.parametrize(
    ("asked", "ran"), [("sdpa-flash", "sdpa-cudnn"), ("sdpa-cudnn", "sdpa-efficient"), ("flash", "sdpa-flash")]
)
def test_another_attention_on_a_gpu_is_found(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, asked: Attention, ran: Attention
):
    monkeypatch.setattr(training_step, "attention_for", lambda *_: implementation(ran))
    step = TrainingStep(workload(model="tiny", dtype="bf16", attention=asked, seq_len=128), gpu)
    run_steps(step, 2)
    run = make_run(step.workload, evidence=Evidence(operators=step_operators(step, gpu, CudaDevice(gpu))))
    assert "attention-mismatch" in kinds(run)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_optimizer_asked_for_is_the_one_that_ran(out: Path, optimizer: str, dtype: Dtype):
    if dtype == "fp16" and optimizer in OF_ONE_LAUNCH:
        with pytest.raises(InputError, match="takes no scaled gradients"):
            workload(optimizer=optimizer, dtype=dtype)
        return
    run = measured(out, optimizer=optimizer, dtype=dtype)
    assert run.evidence.updates is not None and run.evidence.updates.applied == run.evidence.updates.steps == 5
    assert not {*WHAT_RAN} & kinds(run), [f.sentence for f in check_run(run)]


@pytest.mark.parametrize("mode", COMPILES[1:])
def test_the_mode_of_torch_compile_is_the_one_that_ran(out: Path, mode: str):
    settings = Settings(warmup_floor=5, warmup_cap=5, steps_floor=5, steps_cap=5, seconds=0)
    phase = "forward" if mode.startswith("max-autotune") else "train"  # to tune backward too takes minutes
    run = measured(out, settings, model="tiny", seq_len=128, compile=mode, phase=phase)
    report = run.evidence.compilation
    assert report is not None and report.options is not None and report.graphs_recorded is not None
    assert (report.graphs_recorded > 0) is (mode in CUDA_GRAPH_MODES)
    assert not {*WHAT_RAN, "compiled-while-measured"} & kinds(run), [f.sentence for f in check_run(run)]


def test_graphs_that_are_never_recorded_are_found(out: Path, monkeypatch: pytest.MonkeyPatch):
    compiled = training_step._compiled
    monkeypatch.setattr(training_step, "_compiled", lambda module, _: compiled(module, "default"))
    assert "compile-mode-mismatch" in kinds(measured(out, compile="reduce-overhead"))


def test_graphs_recorded_in_a_measured_step_are_found(out: Path):
    settings = Settings(warmup_floor=1, warmup_cap=1, steps_floor=3, steps_cap=3, seconds=0)
    run = measured(out, settings, compile="reduce-overhead")
    found = run.evidence.compiled_while_measured
    assert found is not None and found.recordings > 0 and "compiled-while-measured" in kinds(run)


def test_a_triton_kernel_compiled_in_a_measured_step_is_found(out: Path):
    """Its own kernels: no dynamo is in it. Whether the code lies in Triton's cache makes no difference."""
    settings = Settings(warmup_floor=0, warmup_cap=0, steps_floor=1, steps_cap=1, seconds=0)
    run = measured(out, settings, dtype="bf16", attention="flash", seq_len=80, d_model=192, heads=2)
    found = run.evidence.compiled_while_measured
    assert found is not None and found.kernels > 0 and found.frames == 0 and "compiled-while-measured" in kinds(run)


def test_nvml_that_is_kept_open_is_read_again_and_again(gpu: torch.device):
    with nvml_kept_open(gpu):
        first, second = read_gpu(gpu), read_gpu(gpu)
    assert first is not None and second is not None and first.read_at_s and second.read_at_s
    assert second.read_at_s > first.read_at_s
    assert read_gpu(gpu) is not None  # and after it was let go
