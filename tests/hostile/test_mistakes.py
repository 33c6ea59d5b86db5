"""Every mistake that stepscope promises to find, planted; and nothing found where nothing is planted.

Where the mistake can be made for real on a CPU it is: the evidence is then gathered by the instruments themselves.
The numbers are the rows of docs/measuring.md.
"""

import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stepscope.core.device_spec import Ceiling, Ceilings, find_device_spec, overridden_spec
from stepscope.core.environment import Environment, Extent, GpuReading, GpuSamples, HostReading
from stepscope.core.evidence import (
    CompileReport,
    Evidence,
    KernelTotal,
    MeasuredCompilation,
    PhaseMemory,
    Precision,
    ProfiledStep,
    StepObservation,
    StepOperators,
    WatchedLoop,
)
from stepscope.core.formulas import Work
from stepscope.core.model_config import ModelConfig
from stepscope.core.parts import PARTS, Attention
from stepscope.core.run import Run, Settings
from stepscope.core.run_directory import load_run
from stepscope.core.workloads import COMPILES, OF_ONE_LAUNCH, OPTIMIZERS, FactoryWorkload, TextbookWorkload, UserModel
from stepscope.recording.compilation import CompilationWatch, compile_report, reset_compilation
from stepscope.recording.device import HostDevice, HostLoad
from stepscope.recording.driven import observe_step, step_habits, step_operators
from stepscope.recording.precision import with_kernels
from stepscope.recording.step import Phase
from stepscope.recording.timer import measure
from stepscope.recording.updates import applied_updates, read_updates
from stepscope.runs import metrics
from stepscope.runs.checks import CHECKS, check_run
from stepscope.training import training_step
from stepscope.training.attention import implementation
from stepscope.training.scaled_products import plain_products
from stepscope.training.training_step import TrainingStep, block_runner
from stepscope.training.user_module.loading import make_user_step
from stepscope.training.user_module.module_step import UserStep
from tests.conftest import FakeClock, FakeDevice, at_length, make_run, mini, workload
from tests.recording.test_timer import FakeStep

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def kinds(run: Run) -> dict[str, str]:
    """Findings' kinds and severities."""
    return {finding.kind: finding.severity for finding in check_run(run)}


def on_gpu(run: Run, **changes: Any) -> Run:
    """The run as if it came from an H200."""
    assert run.environment is not None
    environment = msgspec.structs.replace(
        run.environment, device_type="cuda", device_name="NVIDIA H200", l2_bytes=60 * 2**20, **changes
    )
    return msgspec.structs.replace(run, environment=environment, device_spec=find_device_spec("NVIDIA H200"))


def observed(step: TrainingStep) -> Run:
    """A run with the evidence that observing this step gives."""
    observation, memory = observe_step(step, CPU)
    operators = step_operators(step, CPU, HostDevice())
    return make_run(step.workload, evidence=Evidence(observation=observation, memory=memory, operators=operators))


def fake_measurement(device_time: Callable[[int], float], synchronizes: bool = True, **settings: Any) -> Run:
    """A run measured by the real loop on a fake device."""
    clock = FakeClock()
    device = FakeDevice(clock, synchronizes=synchronizes)
    step = FakeStep(clock, device, {"forward": (0.001, 1.0), "backward": (0.001, 2.0)})
    step.scale = device_time
    fixed = {"warmup_floor": 5, "warmup_cap": 5, "steps_floor": 20, "steps_cap": 20, "seconds": 0, **settings}
    result = measure({"step": step}, device=device, settings=Settings(**fixed), clock=clock)["step"]
    return make_run(workload(phase="forward-backward"), samples=result.samples, warmup_steady=result.warmup_steady)


def test_a_sound_run_has_no_finding():
    assert kinds(fake_measurement(lambda _: 1.0)) == {}
    for phase in ("forward", "forward-backward", "train"):
        for dtype in ("fp32", "bf16", "fp16", "bf16-pure"):
            assert kinds(observed(TrainingStep(mini(phase=phase, dtype=dtype), CPU))) == {}


def test_1_timer_stopped_before_the_device_finished():
    run = fake_measurement(lambda _: 1.0, synchronizes=False)
    assert kinds(run)["timer-stopped-early"] == "error"
    finding = next(f for f in check_run(run) if f.kind == "timer-stopped-early")
    assert finding.evidence["step_s"] == pytest.approx(0.002)
    assert "2 ms" in finding.sentence and "3.001 s" in finding.sentence


def test_1_one_hiccup_between_two_clocks_is_no_verdict():
    # The medians of phases and step come from different steps: each step by itself is sound.
    forward, backward = [1.0, 1.0, 5.0, 1.0, 1.0], [2.0, 9.0, 2.0, 9.0, 9.0]
    run = make_run(workload(phase="forward-backward"), forward=forward, backward=backward)
    assert "timer-stopped-early" not in kinds(run)
    for factor, found in ((1.04, False), (1.06, True)):
        late = make_run(workload(phase="forward"), forward=[factor] * 8, step=[1.0] * 8)
        assert ("timer-stopped-early" in kinds(late)) is found


def test_17_a_rate_just_above_the_peak():
    for seconds, found in ((1.0, False), (0.97, True)):
        run = on_gpu(make_run(forward=[seconds] * 9, work={"forward": Work(flops=66_900_000_000_000)}))
        assert ("impossible-rate" in kinds(run)) is found


def test_17_devices_that_share_a_step_have_the_peak_of_all():
    for seconds, found in ((0.51, False), (0.48, True)):
        run = make_run(workload(parallel="ddp", ranks=2), forward=[seconds] * 9,
                       work={"forward": Work(flops=66_900_000_000_000)})  # fmt: skip
        assert ("impossible-rate" in kinds(on_gpu(run))) is found


def test_17_a_step_beyond_the_measured_ceiling_doubts_the_ceiling():
    ceilings = Ceilings(
        device_name="a CPU", torch_version="2.13", measured_at="2026-01-01",
        matmul={"bf16": Ceiling(rate=1e9, operation="512", median_s=0.02, samples=9)},
    )  # fmt: skip
    run = make_run(workload(dtype="bf16-pure"), step=[0.001] * 9, ceilings=ceilings)
    assert kinds(run)["beyond-the-ceiling"] == "warning"


def test_1_a_phase_faster_than_the_device():
    run = on_gpu(make_run(workload(model="small", seq_len=512, batch_size=4), forward=[1e-3] * 9, backward=[0.04] * 9))
    assert kinds(run)["impossible-rate"] == "error"


def test_2_not_warmed_up():
    run = fake_measurement(lambda n: 10.0 if n == 1 else 1.0, warmup_floor=0, warmup_cap=0)
    assert kinds(run)["not-steady"] == "warning"
    assert "first step took 30" in check_run(run)[0].sentence


def test_2_slow_steps_behind_the_first_and_too_few_to_tell():
    assert kinds(make_run(step=[1.0, 3.0, 3.0, 3.0] + [1.0] * 12))["not-steady"] == "warning"
    assert kinds(make_run(step=[1.0, 1.3, 1.45]))["few-samples"] == "note"
    unsettled = make_run(step=[1.0] * 9, warmup=[1.0] * 30, warmup_steady=False)
    assert kinds(unsettled)["warm-up-unsettled"] == "note"


@pytest.mark.parametrize(
    ("steps", "found", "said"),
    [
        ([5552.0, 1.0, 1.0, 1.0], True, "The first step took 5552 s, 5,552.0 times the median of the others"),
        ([2.1, 1.0], True, "The first step took 2.1 s, 2.1 times the other"),
        ([1.0, 2.5, 1.0], True, "Step 2 of 3 took 2.5 s"),
        ([1.9, 1.0], False, ""),
        ([1.0, 1.3, 1.45, 1.9], False, ""),
        ([1.0], False, ""),
        ([0.0, 0.0], False, ""),
    ],
)
def test_2_few_steps_are_no_reason_to_keep_silent_about_a_factor_of_two(steps: list[float], found: bool, said: str):
    run = make_run(step=steps)
    assert (kinds(run).get("not-steady") == "warning") is found
    assert kinds(run)["few-samples"] == "note"
    assert said in check_run(run)[0].sentence


def test_25_steps_that_resemble_their_neighbours():
    wandering = make_run(step=[1 + 0.01 * math.sin(i / 8) for i in range(60)])
    assert kinds(wandering)["correlated-samples"] == "note"
    finding = next(f for f in check_run(wandering) if f.kind == "correlated-samples")
    assert "cannot be told" in finding.sentence and finding.evidence["samples"] == 60
    assert "--seconds" in finding.remedy
    assert "correlated-samples" not in kinds(make_run(step=[1.0, 1.01, 0.99] * 10))

    loop = Evidence(loop=WatchedLoop(why="", modules=("Net",)))
    watched = check_run(msgspec.structs.replace(wandering, evidence=loop))
    remedy = next(f.remedy for f in watched if f.kind == "correlated-samples")
    assert remedy == "measure more steps: --steps FIRST:END", "watch has no --seconds"


def test_2_still_drifting():
    run = fake_measurement(lambda n: 1.0 + 0.01 * n)
    assert kinds(run)["not-steady"] == "warning"
    assert "slower" in check_run(run)[0].sentence
    # Significant, and too small to matter: only the interval is missing.
    assert kinds(fake_measurement(lambda n: 1.0 + 0.0001 * n)) == {"correlated-samples": "note"}


@pytest.mark.parametrize(
    ("dtype", "precision", "found"),
    [
        (
            "fp32",
            Precision(float32_matmul="high", probe_relative_error=2e-7, tf32_kernels=("sm80_gemm_tf32_tn",)),
            True,
        ),
        ("fp32", Precision(float32_matmul="high", probe_relative_error=3e-4), True),
        ("tf32", Precision(float32_matmul="high", probe_relative_error=2e-7), True),
        ("fp32", Precision(float32_matmul="highest", probe_relative_error=2e-7), False),
        ("tf32", Precision(float32_matmul="high", probe_relative_error=3e-4, tf32_kernels=("tf32",)), False),
        ("bf16", Precision(float32_matmul="highest", probe_relative_error=2e-7), False),
    ],
)
def test_3_fp32_was_tf32(dtype: str, precision: Precision, found: bool):
    run = make_run(workload(dtype=dtype), evidence=Evidence(precision=precision))
    assert (kinds(run).get("precision-mismatch") == "error") is found


@pytest.mark.parametrize(
    ("dtype", "name", "found"),
    [
        ("fp32", "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_16x6_nt_align4>(P)", True),
        ("fp32", "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize64x64x32_warpgroupsize1x1x1_execute_kernel", True),
        ("fp32", "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(P)", False),
        ("bf16", "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(P)", True),
        ("bf16", "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", False),
        ("bf16", "void dot_kernel<float, 128, 0, cublasDotParams<float> >(P)", False),
    ],
)
def test_3_the_names_of_kernels_are_a_witness(dtype: str, name: str, found: bool):
    """Also of TF32 that is not spelt, and of true fp32 where 16 bits were asked for."""
    precision = Precision(float32_matmul="highest", probe_relative_error=2e-7)
    profile = ProfiledStep(
        step_s=1.0, kernel_launches=1, busy_s=1.0, kernels=(KernelTotal(name=name, calls=1, total_s=1.0),)
    )
    run = on_gpu(make_run(workload(dtype=dtype), evidence=Evidence(precision=precision, profile=profile)))
    assert (kinds(run).get("precision-mismatch") == "error") is found


@pytest.mark.parametrize(("share", "found"), [(0.0001, False), (0.02, True)])
def test_3_angles_in_fp32_are_no_fault_of_a_step_in_16_bits(share: float, found: bool):
    """A Hugging Face model makes them by one product, which a profile of its compiled step shows."""
    names = {"cutlass_80_simt_sgemm_128x32_8x5_nn_align1": share, "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT": 1.0}
    kernels = tuple(KernelTotal(name=name, calls=1, total_s=seconds) for name, seconds in names.items())
    profile = ProfiledStep(step_s=1.0, kernel_launches=2, busy_s=1.0, kernels=kernels)
    precision = Precision(float32_matmul="highest", probe_relative_error=2e-7, fp32_kernels=(kernels[0].name,))
    run = on_gpu(make_run(workload(dtype="bf16"), evidence=Evidence(precision=precision, profile=profile)))
    assert ("precision-mismatch" in kinds(run)) is found
    twice = msgspec.structs.replace(profile, kernels=tuple(
        KernelTotal(name=name, calls=1, total_s=seconds) for name, seconds in (
            (kernels[0].name, 0.008), (kernels[0].name, 0.008), (kernels[1].name, 1.0),
        )
    ))  # fmt: skip
    cut_off = on_gpu(make_run(workload(dtype="bf16"), evidence=Evidence(precision=precision, profile=twice)))
    assert "precision-mismatch" in kinds(cut_off), "of two kernels whose long names were cut off alike, both count"
    unseen = msgspec.structs.replace(precision, fp32_kernels=("cutlass_80_simt_sgemm_64x64_8x5_tn_align1",))
    alone = on_gpu(make_run(workload(dtype="bf16"), evidence=Evidence(precision=unseen, profile=profile)))
    assert "precision-mismatch" in kinds(alone), "of a kernel that the profile has not, nobody knows its time"


def test_3_autocast_that_never_took_effect():
    step = TrainingStep(mini(dtype="bf16"), CPU)
    step._autocast = lambda: torch.autocast("cpu", enabled=False)
    run = observed(step)
    assert kinds(run)["precision-mismatch"] == "error"
    assert "float32 operands" in check_run(run)[0].sentence


@pytest.mark.parametrize(("other", "found"), [("complex64", False), ("complex128", True)])
def test_3_complex_numbers_of_two_in_fp32_are_fp32(other: str, found: bool):
    """What layers in the space of frequencies multiply, as those of Fourier neural operators."""
    run = observed(TrainingStep(mini(), CPU))
    seen = run.evidence.observation
    assert seen is not None
    seen = msgspec.structs.replace(seen, product_dtypes=(other, "float32"))
    changed = msgspec.structs.replace(run, evidence=msgspec.structs.replace(run.evidence, observation=seen))
    assert ("precision-mismatch" in kinds(changed)) is found


@pytest.mark.parametrize("dtype", ["bf16", "bf16-pure", "fp16"])
def test_3_pytorchs_math_kernel_leaves_16_bits_by_design(dtype: str):
    """It multiplies in fp32 all the same, which is said; a product elsewhere would still be of the wrong dtype."""
    run = observed(TrainingStep(mini(dtype=dtype, attention="sdpa-math"), CPU))
    found = kinds(run)
    assert found["attention-in-fp32"] == "note" and "precision-mismatch" not in found
    assert "attention-in-fp32" not in kinds(observed(TrainingStep(mini(dtype=dtype), CPU)))


@pytest.mark.parametrize("others", [True, False])
def test_3_attention_in_fp32_excuses_no_step_that_is_fp32_throughout(others: bool):
    """Autocast that never took effect, by the operands and by the kernels of a GPU."""
    step = TrainingStep(mini(dtype="bf16", attention="sdpa-math"), CPU)
    if not others:
        step._autocast = lambda: torch.autocast("cpu", enabled=False)
    assert ("precision-mismatch" in kinds(observed(step))) is not others

    names = ["ampere_sgemm_128x64_tn", *(["nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN"] if others else [])]
    kernels = tuple(KernelTotal(name=name, calls=1, total_s=1.0) for name in names)
    profile = ProfiledStep(step_s=1.0, kernel_launches=len(names), busy_s=1.0, kernels=kernels)
    precision = Precision(float32_matmul="highest", probe_relative_error=2e-7)
    run = on_gpu(
        make_run(workload(dtype="bf16", attention="sdpa-math"), evidence=Evidence(precision=precision, profile=profile))
    )
    assert ("precision-mismatch" in kinds(run)) is not others


@pytest.mark.parametrize("others", [("bfloat16",), ()])
def test_3_a_module_of_ones_own_may_get_pytorchs_math_kernel(others: tuple[str, ...]):
    """PyTorch takes it for dropout on a CPU, for instance. A step that is fp32 throughout is not excused."""
    seen = observed(TrainingStep(mini(dtype="bf16"), CPU)).evidence.observation
    assert seen is not None
    seen = msgspec.structs.replace(seen, product_dtypes=(*others, "float32"))
    ran = ProfiledStep(
        step_s=1.0, kernel_launches=1, busy_s=1.0, kernels=(),
        attention_operators=("aten::_scaled_dot_product_attention_math",),
    )  # fmt: skip
    precision = Precision(float32_matmul="highest", probe_relative_error=2e-7)
    own = FactoryWorkload(factory="Net", code="", model=UserModel(name="Net"), dtype="bf16")
    run = msgspec.structs.replace(
        make_run(evidence=Evidence(precision=precision, observation=seen, profile=ran)), workload=own
    )
    found = kinds(run)
    assert ("precision-mismatch" in found) is not bool(others) and "attention-in-fp32" in found


def test_4_compile_fell_back_to_eager():
    reset_compilation()
    compiled = torch.compile(lambda x: x * x.shape[0], backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for n in range(2, 8):
            compiled(torch.ones(n))
    report = compile_report()
    assert report.limit_hit and report.recompiles >= 1
    run = make_run(workload(compile="default"), step=[1.0] * 9, evidence=Evidence(compilation=report))
    assert kinds(run)["compile-fallback"] == "error"


def test_4_graph_breaks_are_counted():
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    reset_compilation()
    torch.compile(broken, backend="eager")(torch.ones(3))
    report = compile_report()
    assert report.graph_breaks == 1
    run = make_run(workload(compile="default"), step=[1.0] * 9, evidence=Evidence(compilation=report))
    assert kinds(run)["compile-fallback"] == "warning"


def test_4_frames_left_out_are_counted():
    report = CompileReport(frames_total=3, frames_compiled=1, graphs=1, graph_breaks=0, recompiles=0, limit_hit=False)
    run = make_run(workload(compile="default"), step=[1.0] * 9, evidence=Evidence(compilation=report))
    assert kinds(run)["compile-fallback"] == "warning"
    assert "1 of 3 frames" in check_run(run)[0].sentence


def test_3_a_compiled_bf16_step_that_ran_in_fp32():
    step = ProfiledStep(
        step_s=1.0, kernel_launches=1, busy_s=1.0,
        kernels=(KernelTotal(name="ampere_sgemm_128x64_tn", calls=9, total_s=1.0),),
    )  # fmt: skip
    precision = with_kernels(Precision(float32_matmul="highest", probe_relative_error=2e-7), step)
    run = make_run(workload(dtype="bf16", compile="default"), evidence=Evidence(precision=precision))
    assert kinds(run)["precision-mismatch"] == "error"


def test_4_recompilations_of_fixed_shapes_are_said():
    report = CompileReport(frames_total=3, frames_compiled=3, graphs=3, graph_breaks=0, recompiles=2, limit_hit=False)
    run = make_run(workload(compile="default"), step=[1.0] * 9, evidence=Evidence(compilation=report))
    assert kinds(run)["compile-fallback"] == "warning"


def test_5_compiled_object_made_another_called():
    reset_compilation()
    step = TrainingStep(mini(compile="default", phase="forward"), CPU)
    step.forward_module = step.model
    for phase in step.phases:
        phase.run()
    run = make_run(step.workload, step=[1.0] * 9, evidence=Evidence(compilation=compile_report()))
    assert kinds(run)["compile-not-used"] == "error"


def test_5_an_interrupted_compilation_is_no_mistake():
    report = CompileReport(frames_total=1, frames_compiled=0, graphs=0, graph_breaks=0, recompiles=0, limit_hit=False)
    run = make_run(workload(compile="default"), status="interrupted", evidence=Evidence(compilation=report))
    assert kinds(run) == {}


def test_6_backward_includes_the_forward():
    step = TrainingStep(mini(phase="forward-backward"), CPU)
    forward, backward = (phase.run for phase in step.phases)

    def both() -> None:
        forward()
        backward()

    step.phases = (Phase(name="forward", run=forward), Phase(name="backward", run=both))
    run = observed(step)
    assert kinds(run)["phase-includes-forward"] == "error"
    assert "'backward'" in check_run(run)[0].sentence


def test_6_a_forward_that_goes_round_the_loss():
    step = TrainingStep(mini(phase="forward-backward"), CPU)
    forward, backward = (phase.run for phase in step.phases)

    def both() -> None:
        step.model(step.tokens)
        backward()

    step.phases = (Phase(name="forward", run=forward), Phase(name="backward", run=both))
    assert kinds(observed(step))["phase-includes-forward"] == "error"


def test_7_autocast_round_backward_and_optimizer():
    step = TrainingStep(mini(dtype="bf16"), CPU)
    forward, backward, optimizer = (phase.run for phase in step.phases)

    def under(run: Callable[[], object]) -> Callable[[], None]:
        def wrapped() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                run()

        return wrapped

    step.phases = (
        Phase(name="forward", run=forward),
        Phase(name="backward", run=under(backward)),
        Phase(name="optimizer", run=under(optimizer)),
    )
    run = observed(step)
    assert kinds(run)["autocast-scope"] == "error"
    assert "backward and the optimizer" in check_run(run)[0].sentence


def test_7_one_autocast_for_all_iterations():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = observed(TrainingStep(mini(dtype="bf16"), CPU))
    assert kinds(run)["autocast-scope"] == "error"
    assert "the whole step" in check_run(run)[0].sentence


def test_8_two_graphs_alive():
    step = TrainingStep(mini(phase="forward-backward"), CPU)
    kept: list[torch.Tensor | None] = []

    def forward_and_keep() -> None:
        step._forward(0)
        kept.append(step.loss)

    def backward() -> None:
        assert step.loss is not None
        step.loss.backward(retain_graph=True)

    step.phases = (Phase(name="forward", run=forward_and_keep), Phase(name="backward", run=backward))
    assert kinds(observed(step))["graph-kept-alive"] == "error"


def test_8_two_graphs_alive_by_the_allocators_count():
    gib = 2**30
    memory = PhaseMemory(
        parameter_bytes=gib, after_parameters=9 * gib, resident_expected=4 * gib, saved_for_backward=5 * gib,
    )  # fmt: skip
    assert kinds(make_run(evidence=Evidence(memory=memory)))["graph-kept-alive"] == "error"
    fine = msgspec.structs.replace(memory, after_parameters=4 * gib + 180 * 2**20)
    assert kinds(make_run(evidence=Evidence(memory=fine))) == {}


def test_8_what_the_allocator_rounds_up_is_no_graph():
    gib = 2**30
    memory = PhaseMemory(
        parameter_bytes=gib, after_parameters=5 * gib, requested_before=4 * gib + 64 * 2**20 + 4,
        resident_expected=4 * gib, saved_for_backward=2**20,
    )  # fmt: skip
    assert kinds(make_run(evidence=Evidence(memory=memory))) == {}
    held = msgspec.structs.replace(memory, requested_before=4 * gib + 200 * 2**20)
    assert kinds(make_run(evidence=Evidence(memory=held)))["graph-kept-alive"] == "error"


def test_17_unknown_peak_gives_no_mfu():
    run = on_gpu(make_run(forward=[0.1] * 9, backward=[0.2] * 9, optimizer=[0.01] * 9))
    assert metrics.mfu_datasheet(run) is not None
    unknown = msgspec.structs.replace(run, device_spec=None)
    assert metrics.mfu_datasheet(unknown) is None
    assert kinds(unknown)["peak-unknown"] == "note"
    assert "--peak-flops" in check_run(unknown)[0].remedy
    stated = msgspec.structs.replace(unknown, device_spec=overridden_spec("Another GPU", "fp32", 1e12))
    assert metrics.mfu_datasheet(stated) is not None and "peak-unknown" not in kinds(stated)


def test_17_utilisation_beyond_the_peak_is_an_error():
    run = on_gpu(make_run(forward=[1e-9] * 9, backward=[2e-9] * 9, optimizer=[1e-9] * 9))
    assert kinds(run)["impossible-rate"] == "error"


def test_17_both_denominators_by_hand():
    run = on_gpu(make_run(forward=[1.0] * 5, work={"forward": Work(flops=6_690_000_000_000)}))
    ceilings = Ceilings(
        device_name="NVIDIA H200", torch_version="2.13", measured_at="2026-01-01",
        matmul={"fp32": Ceiling(rate=50e12, operation="8192", median_s=0.02, samples=9)},
    )  # fmt: skip
    run = msgspec.structs.replace(run, ceilings=ceilings)
    assert metrics.mfu_datasheet(run) == pytest.approx(0.1)
    assert metrics.mfu_measured(run) == pytest.approx(0.1338)


def test_19_zeros_as_input():
    step = TrainingStep(mini(), CPU)
    for tokens, _ in step.batches:
        tokens.zero_()
    assert kinds(observed(step))["unvaried-input"] == "error"


def test_19_one_batch_over_and_over():
    step = TrainingStep(mini(), CPU)
    step.batches = [step.batches[0]] * 4
    assert kinds(observed(step))["unvaried-input"] == "warning"


def test_19_a_rotation_that_stands_still():
    step = TrainingStep(mini(), CPU)
    prepare = step.prepare

    def stuck() -> None:
        step._next_batch = 0
        prepare()

    step.prepare = stuck
    assert kinds(observed(step))["unvaried-input"] == "warning"


def test_19_a_batch_of_zeros_among_others():
    step = TrainingStep(mini(), CPU)
    step.batches[2][0].zero_()
    assert kinds(observed(step))["unvaried-input"] == "error"


def test_19_a_step_that_fits_the_cache():
    small = PhaseMemory(parameter_bytes=2**20, forward_peak=20 * 2**20, optimizer_peak=59 * 2**20)
    run = on_gpu(make_run(evidence=Evidence(memory=small)))
    assert kinds(run)["cache-resident"] == "note"
    large = msgspec.structs.replace(small, optimizer_peak=61 * 2**20)  # gradients and optimizer state count
    assert "cache-resident" not in kinds(on_gpu(make_run(evidence=Evidence(memory=large))))


def test_20_clocks_power_and_company():
    run = on_gpu(make_run(step=[0.1] * 10))
    cool = GpuReading(sm_clock_mhz=1980, sm_clock_max_mhz=1980, power_limited_s=3.0, other_processes=0, read_at_s=100.0)
    assert run.environment is not None
    seen = run.environment

    def with_readings(after: GpuReading) -> Run:
        environment = msgspec.structs.replace(seen, before=cool, after=msgspec.structs.replace(after, read_at_s=101.0))
        return msgspec.structs.replace(run, environment=environment)

    assert kinds(with_readings(cool)) == {}
    capped = msgspec.structs.replace(cool, power_limited_s=3.4, sm_clock_mhz=1500)
    finding = check_run(with_readings(capped))[0]
    assert finding.kind == "clocks-held-down" and "40.0 %" in finding.sentence and "1500 of 1980" in finding.sentence
    low = msgspec.structs.replace(cool, sm_clock_mhz=900)
    assert kinds(with_readings(low))["clocks-held-down"] == "note"
    # What was read while the steps ran counts before the reading at the end, when the GPU may idle at any clock.
    run_at = {mhz: Extent(lowest=mhz - 30, median=mhz, highest=1980) for mhz in (900, 1965)}
    during = {mhz: GpuSamples(count=9, period_s=0.1, sm_clock_mhz=extent) for mhz, extent in run_at.items()}
    for after, mhz, held in ((cool, 900, True), (low, 1965, False)):
        seen = msgspec.structs.replace(seen, during=during[mhz])
        found = [f for f in check_run(with_readings(after)) if f.kind == "clocks-held-down"]
        assert bool(found) is held
        assert not held or "900 of 1980 MHz while the steps ran (870 to 1980)" in found[0].sentence
    seen = msgspec.structs.replace(seen, during=None)
    hot = msgspec.structs.replace(cool, slowdown_reasons=("hardware thermal slowdown",))
    assert kinds(with_readings(hot))["clocks-held-down"] == "warning"
    shared = msgspec.structs.replace(cool, other_processes=2)
    assert kinds(with_readings(shared))["gpu-shared"] == "warning"


def test_20_a_cache_that_is_given_back_in_each_step():
    """Of 8 billion parameters on two H200, with 21 blocks that keep their products, and with 11."""
    for name, found in (("selective-21", True), ("selective-11", False)):
        (place,) = Path("results/h200-x2/long-step").glob(f"*-{name}-*")
        run = load_run(place)
        said = {finding.kind: finding.sentence for finding in check_run(run)}
        assert ("cache-given-back" in said) is found
        assert not found or "took 71.27 GiB from the device in a step like those before" in said["cache-given-back"]
    memory = PhaseMemory(parameter_bytes=1, reserved_before=100, reserved_peak=200)
    seen = make_run(step=[0.1] * 10, evidence=Evidence(memory=memory))
    assert kinds(seen) == {"cache-given-back": "warning"}
    assert kinds(make_run(step=[0.1] * 3, evidence=Evidence(memory=memory))).get("cache-given-back") is None
    settled = msgspec.structs.replace(memory, reserved_before=200)
    assert kinds(make_run(step=[0.1] * 10, evidence=Evidence(memory=settled))) == {}


def test_20_a_busy_host_is_seen_for_real():
    """Processes that burn CPU beside us, and the instrument that must see them."""
    if not sys.platform.startswith("linux"):
        pytest.skip("this system does not tell its load")
    burn = [sys.executable, "-c", "while True: pass"]
    burners = [subprocess.Popen(burn) for _ in range(2)]
    try:
        time.sleep(0.3)
        load = HostLoad()
        time.sleep(1.0)
        reading = load.read()
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert reading is not None and reading.other_cores is not None and reading.other_cores > 0.8
    run = make_run()
    assert run.environment is not None
    environment = msgspec.structs.replace(run.environment, host=reading, cpu_cores=2)
    assert kinds(msgspec.structs.replace(run, environment=environment))["host-busy"] == "warning"
    idle = msgspec.structs.replace(environment, host=HostReading(own_cores=2.0, other_cores=0.05))
    assert kinds(msgspec.structs.replace(run, environment=idle)) == {}


def test_20_spread_and_outliers_are_said():
    steps = [1.0, 1.0, 1.3, 0.7, 1.4, 0.8, 1.0, 1.2, 0.6, 5.0]
    run = make_run(step=steps)
    assert kinds(run)["wide-spread"] == "warning"
    assert "1 of 10 are outliers" in check_run(run)[0].sentence
    assert "wide-spread" not in kinds(make_run(step=[1.0, 1.5, 1.0, 1.5])), "four steps have no middle half to judge"


def test_a_watched_loop_is_told_of_no_option_that_watch_does_not_have():
    run = make_run(step=[1.0, 1.3, 1.45])
    assert run.environment is not None
    gpu = msgspec.structs.replace(run.environment, device_type="cuda", device_name="a new GPU")
    loop = Evidence(loop=WatchedLoop(why="", modules=("Net",)))
    watched = msgspec.structs.replace(run, environment=gpu, evidence=loop, device_spec=None)
    remedies = {found.kind: found.remedy for found in check_run(watched)}
    assert {"few-samples", "peak-unknown"} <= {*remedies}
    assert not any(word in remedy for remedy in remedies.values() for word in ("--peak-flops", "raise --steps"))


def test_20_a_quiet_machine_is_told_of_no_noise():
    """Steps may differ by themselves, and their median is known all the same."""
    steps = [1.0 + 0.01 * ((i * 37) % 23) for i in range(100)]
    run = make_run(step=steps)
    assert run.environment is not None and "wide-spread" in kinds(run), "where nobody knows what else ran"
    reading = HostReading(own_cores=1.0, other_cores=0.05)
    quiet = msgspec.structs.replace(run, environment=msgspec.structs.replace(run.environment, host=reading))
    assert kinds(quiet) == {}
    few = msgspec.structs.replace(quiet, samples=make_run(step=[1.0, 1.4, 0.7, 1.5, 0.9, 1.2, 0.6, 1.3] * 3).samples)
    finding = next(found for found in check_run(few) if found.kind == "wide-spread")
    assert "quieter" not in finding.remedy, "that would not help"


def test_a_busy_host_and_steps_that_spread_are_one_finding():
    run = make_run(step=[1.0, 1.4, 0.7, 1.5, 0.9, 1.2, 0.6, 1.3] * 3)
    assert "wide-spread" in kinds(run) and run.environment is not None
    busy = msgspec.structs.replace(run.environment, cpu_cores=8, host=HostReading(own_cores=1.0, other_cores=5.0))
    finding = next(f for f in check_run(msgspec.structs.replace(run, environment=busy)) if f.kind == "host-busy")
    assert "The middle half of the steps" in finding.sentence and finding.evidence["spread"]
    assert "wide-spread" not in kinds(msgspec.structs.replace(run, environment=busy))


def test_20_a_launch_bound_step_is_named():
    profile = ProfiledStep(
        step_s=0.03, kernel_launches=1890, busy_s=0.008, kernels=(KernelTotal(name="k", calls=1890, total_s=0.008),)
    )
    run = on_gpu(make_run(step=[0.028] * 10, evidence=Evidence(profile=profile)))
    finding = next(f for f in check_run(run) if f.kind == "launch-bound")
    assert "71.4 %" in finding.sentence and "1890 kernels" in finding.sentence
    assert "launch-bound" not in kinds(make_run(step=[0.028] * 10, evidence=Evidence(profile=profile)))


def test_22_profiler_overhead_is_not_the_step():
    profile = ProfiledStep(step_s=0.036, kernel_launches=9, busy_s=0.02, kernels=())
    run = make_run(step=[0.02] * 10, evidence=Evidence(profile=profile))
    assert kinds(run)["profiler-overhead"] == "note"
    assert "1.8 times" in check_run(run)[0].sentence
    assert kinds(make_run(step=[0.035] * 10, evidence=Evidence(profile=profile))) == {}


def test_23_a_presets_name_on_other_sizes():
    other = ModelConfig(name="xl", d_model=2560, d_ff=10240, layers=32, heads=32)
    run = make_run(TextbookWorkload(model=other))
    assert kinds(run)["preset-changed"] == "warning"
    sentence = check_run(run)[0].sentence
    assert "3,406,809,600" in sentence and "1,998,235,200" in sentence and "d_model 2560 (preset: 1600)" in sentence


def test_26_what_is_compiled_while_steps_are_measured_is_counted_for_real():
    """A step that meets its compiled forward for the first time, and one that has met it before."""
    reset_compilation()
    model = torch.nn.Linear(3, 3)
    compiled = torch.compile(model, backend="aot_eager")
    watch = CompilationWatch(CPU)

    def steps(count: int, size: int = 2) -> MeasuredCompilation:
        watch.start()
        for _ in range(count):
            compiled(torch.ones(size, 3)).sum().backward()
        found = watch.read()
        assert found is not None
        return found

    cold, warm, again = steps(1), steps(3), steps(3, size=5)
    assert cold.frames == 1 and cold.graphs >= 1 and cold.compile_s > 0
    assert warm == MeasuredCompilation()
    assert again.frames == 1  # another shape compiles anew
    for found, wrong in ((cold, True), (warm, False), (again, True)):
        for values in ([1.0], [1.0] * 9):
            run = make_run(workload(compile="default"), step=values, evidence=Evidence(compiled_while_measured=found))
            assert (kinds(run).get("compiled-while-measured") == "error") is wrong
    eager = make_run(step=[12.1], evidence=Evidence(compiled_while_measured=MeasuredCompilation(kernels=2)))
    assert "2 Triton kernels" in check_run(eager)[0].sentence and "12.1 s" in check_run(eager)[0].sentence


def test_26_a_watch_that_never_started_says_nothing():
    assert CompilationWatch(CPU).read() is None
    assert kinds(make_run(evidence=Evidence(compiled_while_measured=MeasuredCompilation(frames=1)))) == {}  # no step


@pytest.mark.parametrize(
    ("asked", "ran", "said"),
    [
        ("sdpa", "reference", "it ran 0 times where the step has 2 calls"),
        ("sdpa-math", "sdpa-flash", "sdpa-flash ran"),
        ("sdpa-flash", "sdpa-math", "sdpa-math ran"),
        ("reference", "sdpa", "sdpa-flash ran"),
        ("reference", "unsafe", "unsafe ran"),
        ("unsafe", "reference", "reference ran"),
        ("chunked", "reference", "reference ran"),
        ("flash-tiled", "reference", "it ran 0 times"),
    ],
)
@pytest.mark.parametrize("phase", ["forward", "train"])
def test_27_another_attention_ran(
    monkeypatch: pytest.MonkeyPatch, asked: Attention, ran: Attention, said: str, phase: str
):
    monkeypatch.setattr(training_step, "attention_for", lambda *_: implementation(ran))
    run = observed(TrainingStep(mini(attention=asked, phase=phase), CPU))
    assert kinds(run) == {"attention-mismatch": "error"}
    assert f"Attention {asked} was asked for, but {said}" in check_run(run)[0].sentence


def test_27_one_layer_with_another_attention():
    step = TrainingStep(mini(attention="sdpa"), CPU)
    setattr(step.blocks[1].attention, "attention", implementation("reference"))  # noqa: B010
    assert "it ran 1 times where the step has 2 calls" in check_run(observed(step))[0].sentence


@pytest.mark.parametrize("part", PARTS)
def test_27_another_implementation_of_a_part_ran(monkeypatch: pytest.MonkeyPatch, part: str):
    pytest.importorskip("triton", reason="the fused parts are written in Triton, which is not installed")
    few = {"batch_size": 1, "seq_len": 4}  # Triton's interpreter takes time by the token
    fused, reference = mini(**few, **{part: "fused"}), mini(**few)
    made = training_step.parts_for
    assert kinds(observed(TrainingStep(fused, CPU))) == {}
    monkeypatch.setattr(training_step, "parts_for", lambda *_: made(reference, "cpu"))
    times = {"norm": 5, "rope": 2, "mlp": 2, "loss": 1}[part]
    missing = observed(TrainingStep(fused, CPU))
    assert kinds(missing) == {"part-mismatch": "error"}
    said = f"{part} fused was asked for, but it ran 0 times where the step has {times} calls"
    assert said in check_run(missing)[0].sentence
    monkeypatch.setattr(training_step, "parts_for", lambda *_: made(fused, "cpu"))
    strange = observed(TrainingStep(reference, CPU))
    assert kinds(strange) == {"part-mismatch": "error"}
    assert f"{part} reference was asked for, but fused ran" in check_run(strange)[0].sentence


def test_27_parts_by_the_names_of_kernels():
    """Liger's kernels are no operators: where a profile was taken, their names tell."""
    kernel = KernelTotal(name="_rms_norm_forward_kernel", calls=2, total_s=1.0)
    profile = ProfiledStep(step_s=1.0, kernel_launches=2, busy_s=1.0, kernels=(kernel,))
    operators = StepOperators(calls={"forward": {"aten::exp": 2}, "optimizer": {"aten::_foreach_addcdiv_": 1}})
    evidence = Evidence(operators=operators, profile=profile)
    said = {
        name: kinds(make_run(workload(norm=name), step=[1.0] * 9, evidence=evidence)).get("part-mismatch")
        for name in ("reference", "fused", "liger")
    }
    assert said == {"reference": "error", "fused": "error", "liger": None}


def test_27_attention_by_the_names_of_kernels():
    """Inside replayed CUDA graphs no operator is called: the kernels' names tell."""
    kernel = KernelTotal(name="fmha_cutlassF_f32_aligned_64x64_rf_sm80(P)", calls=2, total_s=1.0)
    profile = ProfiledStep(step_s=1.0, kernel_launches=2, busy_s=1.0, kernels=(kernel,))
    report = CompileReport(
        frames_total=1, frames_compiled=1, graphs=1, graph_breaks=0, recompiles=0, limit_hit=False, graphs_recorded=2
    )
    for asked, wrong in (("sdpa-flash", True), ("sdpa-efficient", False), ("sdpa", False)):
        evidence = Evidence(
            operators=StepOperators(calls={"forward": {}, "optimizer": {"aten::_foreach_addcdiv_": 1}}),
            profile=profile, compilation=report,
        )  # fmt: skip
        run = make_run(workload(attention=asked, compile="reduce-overhead"), step=[1.0] * 9, evidence=evidence)
        assert (kinds(run).get("attention-mismatch") == "error") is wrong


@pytest.mark.parametrize("dtype", ["fp8", "fp8-row"])
def test_3_products_of_16_bits_where_8_were_asked_for(dtype: str):
    step = TrainingStep(mini(dtype=dtype, optimizer="adamw-fused"), CPU)
    assert kinds(observed(step)) == {}
    plain_products(step.model)
    run = observed(step)
    assert kinds(run) == {"precision-mismatch": "error"}
    assert (
        f"{dtype} was asked for, but matrix products took bfloat16"
        in check_run(run)[0].sentence[:1].lower() + (check_run(run)[0].sentence[1:])
    )


@pytest.mark.parametrize(
    ("asked", "ran"),
    # Each is asked for where the one before it ran, and where those ran that cannot be told from it.
    [
        case
        for at, asked in enumerate(OPTIMIZERS)
        for ran in OPTIMIZERS
        for case in at_length(
            (asked, ran),
            long=ran not in (asked, OPTIMIZERS[at - 1]) and not {asked, ran} <= set(OF_ONE_LAUNCH),
        )
    ],
)
def test_27_another_implementation_of_the_optimizer_ran(monkeypatch: pytest.MonkeyPatch, asked: str, ran: str):
    make = training_step.optimizer_for
    monkeypatch.setattr(
        training_step,
        "optimizer_for",
        lambda trained, _, *rest, **options: make(trained, mini(optimizer=ran), *rest, **options),
    )
    run = observed(TrainingStep(mini(optimizer=asked), CPU))
    # Without streams, the optimizer under backward updates after it, as the one that it is made of; and moments of 8
    # bits are updated by the same operators.
    same = asked == ran or {asked, ran} <= set(OF_ONE_LAUNCH)
    ran = OF_ONE_LAUNCH[0] if ran in OF_ONE_LAUNCH else ran
    assert kinds(run) == ({} if same else {"optimizer-mismatch": "error"})
    assert same or f"Optimizer {asked} was asked for, but {ran} ran" in check_run(run)[0].sentence


def test_27_an_optimizer_that_never_steps():
    step = TrainingStep(mini(), CPU)
    assert step.optimizer is not None
    step.scaler.step = lambda optimizer: None
    run = observed(step)
    assert kinds(run) == {"optimizer-mismatch": "error"} and "updated nothing" in check_run(run)[0].sentence


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_27_gradients_that_nobody_clips(optimizer: str):
    step = TrainingStep(mini(optimizer=optimizer, clip=1.0), CPU)
    after = {"update-after-backward": "note"} if optimizer == "adamw-under-backward" else {}
    assert kinds(observed(step)) == after
    step._max_norm = None
    step.optimizer.__dict__.update(max_norm=None)
    run = observed(step)
    kernels = (KernelTotal(name="adamw_update", calls=1, total_s=1.0),)
    profile = ProfiledStep(step_s=1.0, kernel_launches=1, busy_s=1.0, kernels=kernels)
    run = msgspec.structs.replace(run, evidence=msgspec.structs.replace(run.evidence, profile=profile))
    found = {finding.kind: finding for finding in check_run(run)}
    assert "clip-mismatch" in found and "clipped to a norm of 1, but nothing took" in found["clip-mismatch"].sentence
    assert ("update-after-backward" in found) == bool(after)


@pytest.mark.parametrize("optimizer", ["torchao.AdamW8bit", "adamw-fused"])
def test_27_an_optimizer_whose_moments_share_a_scale(optimizer: Any):
    run = observed(TrainingStep(mini(), CPU))
    own = FactoryWorkload(factory="own.py:make", model=UserModel(name="Own"), optimizer=optimizer)
    run = msgspec.structs.replace(run, workload=own)
    found = kinds(run).get("moments-in-blocks")
    assert found == (None if optimizer == "adamw-fused" else "note")


def overflows(step: TrainingStep) -> None:
    """A gradient of this step is beyond fp16."""
    gradient = next(step.model.parameters()).grad
    assert gradient is not None
    gradient.fill_(float("inf"))


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name not in OF_ONE_LAUNCH])
def test_27_updates_that_the_scaler_skipped_are_counted_for_real(optimizer: str):
    step = TrainingStep(mini(dtype="fp16", optimizer=optimizer), CPU)
    assert step.optimizer is not None

    def steps(count: int, overflow: int = 0) -> Run:
        before = applied_updates(step.optimizer)
        assert before is not None and step.optimizer is not None
        for n in range(count):
            step.prepare()
            for phase in step.phases:
                if phase.name == "optimizer" and n < overflow:
                    overflows(step)
                phase.run()
        updates = read_updates(step.optimizer, step.scaler, steps=count, before=before)
        return make_run(step.workload, step=[1.0] * 9, evidence=Evidence(updates=updates))

    first, sound, one, most = steps(1, overflow=1), steps(4), steps(4, overflow=1), steps(4, overflow=2)
    assert kinds(first) == {"optimizer-skipped": "error"}
    assert kinds(sound) == {}
    assert kinds(one) == {"optimizer-skipped": "warning"}
    assert kinds(most) == {"optimizer-skipped": "error"}
    assert "in 2 of 4 measured steps" in check_run(most)[0].sentence
    updates = most.evidence.updates
    assert updates is not None and updates.parameters_finite and updates.loss_scale == 65536 / 2**4


def test_27_fp16_without_a_scaler_trains_nothing():
    step = TrainingStep(mini(dtype="fp16"), CPU)
    step.scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert step.optimizer is not None
    step.prepare()
    for phase in step.phases:
        if phase.name == "optimizer":
            overflows(step)
        phase.run()
    updates = read_updates(step.optimizer, step.scaler, steps=1, before=0)
    run = make_run(step.workload, evidence=Evidence(updates=updates))
    assert kinds(run) == {"parameters-not-finite": "warning"}
    assert updates is not None and updates.loss_scale is None


@pytest.mark.parametrize("asked", COMPILES[1:])
@pytest.mark.parametrize("made", COMPILES[1:])
def test_27_another_mode_of_torch_compile(monkeypatch: pytest.MonkeyPatch, asked: str, made: str):
    """What the compiled module says of itself is read: nothing needs to be compiled for it."""
    compiled = training_step._compiled
    monkeypatch.setattr(training_step, "_compiled", lambda module, _: compiled(module, made))
    step = TrainingStep(mini(compile=asked), CPU)
    reset_compilation()
    report = msgspec.structs.replace(compile_report(step.forward_module), frames_total=1, frames_compiled=1)
    run = make_run(step.workload, step=[1.0] * 9, evidence=Evidence(compilation=report))
    assert kinds(run) == ({} if asked == made else {"compile-mode-mismatch": "error"})


def test_27_cuda_graphs_that_were_recorded_or_not():
    report = CompileReport(frames_total=1, frames_compiled=1, graphs=1, graph_breaks=0, recompiles=0, limit_hit=False)
    for asked, recorded, wrong in (
        ("reduce-overhead", 2, False), ("reduce-overhead", 0, True), ("reduce-overhead", None, False),
        ("default", 0, False), ("default", 2, True), ("max-autotune-no-cudagraphs", 2, True),
    ):  # fmt: skip
        counted = msgspec.structs.replace(report, graphs_recorded=recorded)
        run = on_gpu(make_run(workload(compile=asked), step=[1.0] * 9, evidence=Evidence(compilation=counted)))
        assert (kinds(run).get("compile-mode-mismatch") == "error") is wrong


def test_27_a_replayed_step_calls_no_module_and_that_is_no_mistake():
    """What was seen of a real step whose phases did nothing, as those of a replayed graph do to the hooks."""
    step = TrainingStep(mini(checkpointing="every-1"), CPU)
    step.phases = tuple(Phase(name=phase.name, run=lambda: None) for phase in step.phases)
    run = observed(step)
    assert kinds(run).keys() >= {"accumulation-mismatch", "checkpointing-mismatch"}
    replayed = mini(checkpointing="every-1", graph="step")
    assert not kinds(make_run(replayed, step=[1.0] * 9, evidence=run.evidence))


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ((0, 1, -1), "forward ran 1 times in a step, where 2 belong"),
        ((0, 1, 2, -1), "backward reached the loss 1 times in a step, where 2 belong"),
        ((0, 1, 0, 1, -1), "what forward took is not the step's batch"),
    ],
)
def test_27_micro_batches_that_are_left_out(kept: tuple[int, ...], said: str):
    step = TrainingStep(mini(batch_size=4, accumulation=2), CPU)
    step.phases = tuple(step.phases[i] for i in kept)
    run = observed(step)
    assert kinds(run)["accumulation-mismatch"] == "error"
    assert any(said in finding.sentence for finding in check_run(run))


def test_27_a_batch_cut_short():
    step = TrainingStep(mini(batch_size=4), CPU)
    take = step._take

    def shorter(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        take(batch)
        step._micro_batches = [(tokens[:2], targets[:2]) for tokens, targets in step._micro_batches]

    step._take = shorter
    assert "took 32 tokens in a step of 64" in check_run(observed(step))[0].sentence


@pytest.mark.parametrize("asked", ["none", "selective", "every-1", "every-2"])
@pytest.mark.parametrize("done", ["none", "every-1"])
def test_27_checkpointing_that_runs_other_blocks_again(monkeypatch: pytest.MonkeyPatch, asked: str, done: str):
    monkeypatch.setattr(training_step, "block_runner", lambda _: block_runner(mini(checkpointing=done)))
    run = observed(TrainingStep(mini(checkpointing=asked), CPU))
    wrong = (asked == "none") is not (done == "none")
    assert kinds(run) == ({"checkpointing-mismatch": "error"} if wrong else {})


@pytest.mark.parametrize(("done", "wrong"), [("nested-2", False), ("every-1", True)])
def test_27_calls_that_hold_calls_run_blocks_again_more_than_once(
    monkeypatch: pytest.MonkeyPatch, done: str, wrong: bool
):
    asked = mini(checkpointing="nested-2", layers=4)  # six runs of a block: each call of two runs its first twice
    monkeypatch.setattr(
        training_step, "block_runner", lambda _: block_runner(msgspec.structs.replace(asked, checkpointing=done))
    )
    assert kinds(observed(TrainingStep(asked, CPU))) == ({"checkpointing-mismatch": "error"} if wrong else {})


@pytest.mark.parametrize("checkpointing", ["attention", "selective-1"])
@pytest.mark.parametrize("done", ["none", "attention", "selective-1"])
def test_27_checkpointing_that_keeps_attention_runs_each_block_again(
    monkeypatch: pytest.MonkeyPatch, done: str, checkpointing: str
):
    asked = mini(checkpointing=checkpointing, attention="sdpa")
    monkeypatch.setattr(
        training_step, "block_runner", lambda _: block_runner(msgspec.structs.replace(asked, checkpointing=done))
    )
    assert kinds(observed(TrainingStep(asked, CPU))) == ({"checkpointing-mismatch": "error"} if done == "none" else {})


def test_27_what_older_runs_did_not_observe_is_not_judged():
    observation = StepObservation(
        model_forwards={"forward": 1, "backward": 0, "optimizer": 0}, autocast_outside=False,
        autocast_in_backward=False, autocast_in_optimizer=False, distinct_tokens=32, distinct_batches=4,
        graphs_alive_before=False,
    )  # fmt: skip
    report = CompileReport(frames_total=1, frames_compiled=1, graphs=1, graph_breaks=0, recompiles=0, limit_hit=False)
    evidence = Evidence(observation=observation, compilation=report)
    assert kinds(make_run(workload(compile="max-autotune"), step=[1.0] * 9, evidence=evidence)) == {}


_TRAINS = """
import torch
from torch import nn

def make(dtype="float32", rate=0.1, last=0.1):
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(getattr(torch, dtype))
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": last}]
    batch = torch.randn(4, 8).to(getattr(torch, dtype))
    return net, batch, lambda out: out.float().square().mean(), torch.optim.SGD(groups, lr=rate)
"""


@pytest.mark.parametrize(
    ("arguments", "unchanged", "said"),
    [
        ({}, 0, ""),
        ({"last": 0.0}, 2, "2.weight, 2.bias. 2 of them are in a group with lr=0."),
        ({"dtype": "bfloat16", "rate": 1e-12, "last": 1e-12}, 4, "An update that is small beside a number in bfloat16"),
        ({"rate": 1e-20, "last": 0.1}, 2, "0.weight, 0.bias."),
    ],
    ids=["nothing is planted", "a rate of 0", "rounded away in bf16", "rounded away in fp32"],
)
def test_43_parameters_that_get_gradients_and_do_not_change(
    tmp_path: Path, arguments: dict[str, Any], unchanged: int, said: str
):
    (tmp_path / "mine.py").write_text(_TRAINS)
    own = FactoryWorkload(model=UserModel(name=""), factory=f"{tmp_path}/mine.py:make", arguments=arguments)
    step, _ = make_user_step(own, CPU)
    assert not isinstance(step, UserStep)
    run = make_run(evidence=Evidence(habits=step_habits(step, CPU)))
    found = run.evidence.habits.unchanged if run.evidence.habits else None
    assert (found.count if found else 0) == unchanged
    sentences = [finding.sentence for finding in check_run(run) if finding.kind == "parameters-unchanged"]
    assert [said in sentence for sentence in sentences] == [True] * bool(unchanged)


def test_findings_come_gravest_first_and_every_check_bears_an_empty_run():
    empty = make_run(environment=None, work={}, samples={})
    assert all(not list(check(empty)) for check in CHECKS)
    step = TrainingStep(mini(), CPU)
    for tokens, _ in step.batches:
        tokens.zero_()
    run = msgspec.structs.replace(observed(step), samples=make_run(step=[9.0] + [1.0] * 9).samples)
    assert [finding.severity for finding in check_run(run)] == ["error", "warning"]


def test_environments_differ_by_what_moves_figures():
    run = make_run()
    assert run.environment is not None
    other: Environment = msgspec.structs.replace(
        run.environment, versions={**run.environment.versions, "torch": "2.11.0"}, threads=4, host=HostReading()
    )
    assert run.environment.differences(other) == {"torch": ("2.13.0", "2.11.0"), "threads": (8, 4)}
    assert run.environment.differences(run.environment) == {}


def test_observation_type_is_complete():
    """Nothing observed is left at a default: every field of a real observation of an eager step is filled."""
    observation, _ = observe_step(TrainingStep(mini(), CPU), CPU)
    assert isinstance(observation, StepObservation)
    assert all(value is not None for value in msgspec.structs.asdict(observation).values())
