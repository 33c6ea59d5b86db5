"""The training step: what is timed is what was chosen."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from stepscope.core.errors import InputError
from stepscope.core.evidence import PhaseMemory
from stepscope.core.workloads import Workload
from stepscope.kernels.parts.projections import joint_projections
from stepscope.recording.capture import covered_length
from stepscope.recording.compilation import compile_report, reset_compilation
from stepscope.recording.device import HostDevice
from stepscope.recording.driven import observe_step, profile_step
from stepscope.training.training_step import (
    AssembledStep,
    Batch,
    Shared,
    StepParts,
    TrainingStep,
    check_supported,
    keep_compiled_functions,
    textbook_parts,
)
from tests.conftest import at_length, mini, run_steps
from tests.training.by_dtype import BY_DTYPE

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("phase", "names"),
    [
        ("forward", ["forward"]),
        ("forward-backward", ["forward", "backward"]),
        ("train", ["forward", "backward", "optimizer"]),
    ],
)
def test_phases_are_those_of_the_workload(phase: str, names: list[str]):
    assert [p.name for p in TrainingStep(mini(phase=phase), CPU).phases] == names


def test_every_micro_batch_has_its_forward_and_backward():
    step = TrainingStep(mini(batch_size=6, accumulation=3), CPU)
    assert [p.name for p in step.phases] == ["forward", "backward"] * 3 + ["optimizer"]
    alone = TrainingStep(mini(batch_size=6, accumulation=2, phase="forward-backward"), CPU)
    assert [p.name for p in alone.phases] == ["forward", "backward"] * 2


def gradients(step: TrainingStep) -> list[torch.Tensor]:
    run_steps(step)
    return [p.grad for p in step.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("accumulation", [2, 3, 6])
@pytest.mark.parametrize("checkpointing", ["none", "every-1"])
def test_accumulated_gradients_are_those_of_the_whole_batch(accumulation: int, checkpointing: str):
    changes = {"batch_size": 6, "phase": "forward-backward", "checkpointing": checkpointing}
    whole = TrainingStep(mini(**changes), CPU)
    split = TrainingStep(mini(**changes, accumulation=accumulation), CPU)
    for step in (whole, split):
        step.model.double()  # in fp32 the order of sums alone would differ by some 1e-6
    expected, found = gradients(whole), gradients(split)
    assert len(found) == len(expected) == len(list(whole.model.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    run_steps(split)  # the next step's gradients are its own
    run_steps(whole)
    for a, b in zip(split.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_accumulation_in_low_precision_agrees_with_the_whole_batch(dtype: str):
    whole, split = (TrainingStep(mini(batch_size=4, dtype=dtype, accumulation=n), CPU) for n in (1, 4))
    for step in (whole, split):
        run_steps(step)
    for a, b in zip(split.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-4)  # one update of lr 1e-4 each


@pytest.mark.long
def test_accumulation_under_compile_compiles_once():
    reset_compilation()
    eager, compiled = (TrainingStep(mini(batch_size=4, accumulation=2, compile=c), CPU) for c in ("eager", "default"))
    for _ in range(2):
        run_steps(eager)
        run_steps(compiled)
    report = compile_report()
    assert (report.graphs, report.graph_breaks, report.recompiles) == (1, 0, 0)
    for a, b in zip(eager.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4)


def test_the_micro_batches_are_the_batch():
    step = TrainingStep(mini(batch_size=4, accumulation=2, phase="forward-backward"), CPU)
    step.prepare()
    seen: list[torch.Tensor] = []
    handle = step.model.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    for phase in step.phases:
        phase.run()
    handle.remove()
    assert torch.equal(torch.cat(seen), step.tokens) and torch.equal(step.tokens, step.batches[0][0])


@pytest.mark.parametrize("dtype", ["fp32", "bf16-pure", *at_length("bf16", "fp16")])
def test_training_learns_in_every_precision(dtype: str):
    step = TrainingStep(mini(dtype=dtype), CPU)
    step.batches = step.batches[:1]
    assert step.optimizer is not None
    step.optimizer.param_groups[0]["lr"] = 1e-3  # at 1e-4 bf16 parameters swallow most updates
    losses = []
    for _ in range(60):
        run_steps(step)
        assert step.loss is not None
        losses.append(float(step.loss))
    assert losses[-1] < losses[0] - 1.0


@BY_DTYPE
def test_precision_is_what_the_dtype_says(dtype: str, parameters: torch.dtype, products: tuple[str, ...]):
    step = TrainingStep(mini(dtype=dtype), CPU)
    assert {p.dtype for p in step.model.parameters()} == {parameters}
    observation, _ = observe_step(step, CPU)
    assert observation.product_dtypes == products


@pytest.mark.parametrize("optimizer", ["adamw-foreach", "adamw-fused", "adamw-loop"])
def test_optimizers_are_the_same_mathematics(optimizer: str):
    ours, plain = (TrainingStep(mini(optimizer=name), CPU) for name in (optimizer, "adamw-loop"))
    for _ in range(3):
        run_steps(ours)
        run_steps(plain)
    for a, b in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_seed_fixes_parameters_and_data():
    a, b, c = (TrainingStep(mini(seed=seed), CPU) for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True))
    assert torch.equal(a.batches[0][0], b.batches[0][0])
    assert not torch.equal(a.batches[0][0], c.batches[0][0])


def test_steps_rotate_through_different_batches():
    step = TrainingStep(mini(), CPU)
    first = [step.batches[i][0] for i in range(len(step.batches))]
    assert len({tuple(batch.flatten().tolist()) for batch in first}) == len(first) == 4


def test_inference_keeps_no_graph_and_takes_no_loss():
    step = TrainingStep(mini(phase="forward"), CPU)
    run_steps(step)
    assert step.loss is None and step.optimizer is None
    _, memory = observe_step(step, CPU)
    assert memory.saved_for_backward is None


def test_saved_for_backward_by_hand():
    """One linear layer of the reference saves its input; the sum counts each storage once, parameters never."""
    step = TrainingStep(mini(phase="forward-backward"), CPU)
    _, small = observe_step(step, CPU)
    _, double = observe_step(TrainingStep(mini(phase="forward-backward", batch_size=4), CPU), CPU)
    assert isinstance(small, PhaseMemory) and small.saved_for_backward and double.saved_for_backward
    # Everything saved grows with the batch but the causal mask and the positions: nearly twice.
    assert 1.9 < double.saved_for_backward / small.saved_for_backward <= 2.0
    assert small.parameter_bytes == 4 * sum(p.numel() for p in step.model.parameters())


def test_of_micro_batches_the_saved_bytes_are_those_of_one():
    """The graph of one micro-batch is gone before the next runs: their saved tensors never live together."""
    alone = TrainingStep(mini(batch_size=2, phase="forward-backward"), CPU)
    split = TrainingStep(mini(batch_size=4, phase="forward-backward", accumulation=2), CPU)
    kept: list[object] = []  # so that the second micro-batch's tensors lie elsewhere than the first one's
    for module in split.model.modules():
        module.register_forward_pre_hook(lambda _module, inputs: kept.append(inputs))
    expected, found = (observe_step(step, CPU)[1].saved_for_backward for step in (alone, split))
    assert expected and found == expected


def test_where_forward_and_backward_take_turns_the_most_that_is_kept_at_a_time_counts():
    """Of four micro-batches a step that runs all forwards first keeps four, and one that takes turns keeps one."""
    of = mini(batch_size=4, phase="forward-backward")

    def most(together: int) -> int:
        def share(parts: StepParts, _: Workload) -> Shared:
            def run(batch: Batch) -> None:
                micro_batches = parts.split(batch, 4)
                for first in range(0, 4, together):
                    losses = [parts.forward(*one) for one in micro_batches[first : first + together]]
                    while losses:
                        losses.pop().backward()

            return Shared(parts=parts, finish=None, local=contextlib.nullcontext, run=run)

        step = AssembledStep(textbook_parts(of, CPU), of, CPU, share)
        assert [phase.name for phase in step.phases] == ["forward-backward"]
        observation, memory = observe_step(step, CPU)
        assert memory.saved_for_backward and observation.product_dtypes == ("float32",)
        return memory.saved_for_backward

    alone = most(1)
    # All forwards share the causal mask and the positions, so that the rest counts two and four times.
    assert most(4) - alone == 3 * (most(2) - alone) > 2 * alone


@pytest.mark.parametrize(
    ("mode", "tuned", "graphs"),
    [
        ("default", False, False),
        ("reduce-overhead", False, True),
        ("max-autotune", True, True),
        ("max-autotune-no-cudagraphs", True, False),
    ],
)
def test_the_mode_of_compilation_is_the_one_asked_for(mode: str, tuned: bool, graphs: bool):
    """What the compiled module itself says that it will be compiled with: a mode that got lost is the default one."""
    module: Any = TrainingStep(mini(compile=mode), CPU).forward_module
    configuration = module.get_compiler_config()
    assert (configuration["max_autotune"], configuration["triton.cudagraphs"]) == (tuned, graphs)


@pytest.mark.long
def test_what_is_timed_under_compile_is_the_compiled_module():
    reset_compilation()
    step = TrainingStep(mini(compile="default"), CPU)
    assert step.forward_module is not step.model
    assert compile_report().frames_compiled == 0
    run_steps(step)
    report = compile_report()
    assert report.frames_compiled >= 1 and report.graph_breaks == 0 and not report.limit_hit
    assert report.compile_s is not None and report.compile_s > 0


@pytest.mark.long
def test_a_graph_with_a_function_of_ours_is_compiled_once_and_found_again_on_disk():
    """PyTorch keeps none with an autograd.Function unless it is asked. One of another backward is not taken for it."""
    x, weights = torch.randn(4, 8), [torch.randn(2, 8), torch.randn(3, 8)]

    def gradient(factor: float) -> Tensor:
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 2.0

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                return gradients[0] * factor

        def calls(x: Tensor) -> Tensor:
            first, second = joint_projections(Scaled.apply(x), weights)  # pyright: ignore[reportArgumentType]
            return first.sum() + second.sum()

        reset_compilation()
        of = x.clone().requires_grad_()
        torch.compile(calls)(of).backward()
        assert of.grad is not None
        return of.grad

    once = sum(weight.sum(0) for weight in weights).expand(4, 8)  # pyright: ignore[reportAttributeAccessIssue]
    keep_compiled_functions()
    with fresh_cache():
        for factor, found in ((1.0, False), (1.0, True), (3.0, False)):
            torch.testing.assert_close(gradient(factor), factor * once)
            of_autograd = counters["aot_autograd"]
            assert (of_autograd["autograd_cache_bypass"], of_autograd["autograd_cache_hit"]) == (0, int(found))


@pytest.mark.long
def test_compiled_step_computes_what_the_eager_one_does():
    eager, compiled = (TrainingStep(mini(compile=mode), CPU) for mode in ("eager", "default"))
    for step in (eager, compiled):
        run_steps(step)
    assert eager.loss is not None and compiled.loss is not None
    torch.testing.assert_close(eager.loss, compiled.loss, rtol=1e-4, atol=1e-5)
    for a, b in zip(eager.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4)


def test_tf32_is_refused_where_there_is_none():
    with pytest.raises(InputError, match="tf32 needs an NVIDIA GPU"):
        check_supported(mini(dtype="tf32"), CPU)


def test_profile_names_the_fused_attention_and_covers_the_step():
    step = TrainingStep(mini(attention="sdpa"), CPU)
    run_steps(step)
    profile = profile_step(step, CPU, HostDevice())
    assert any("_scaled_dot_product" in name for name in profile.attention_operators)
    assert 0 < profile.busy_s <= profile.step_s
    assert profile.kernel_launches == sum(kernel.calls for kernel in profile.kernels)
    totals = [kernel.total_s for kernel in profile.kernels]
    assert totals == sorted(totals, reverse=True)


def test_union_of_intervals_by_hand():
    def length(*intervals: tuple[float, float]) -> float:
        return covered_length(
            SimpleNamespace(time_range=SimpleNamespace(start=start, end=end)) for start, end in intervals
        )

    assert length((0, 2), (1, 3), (5, 6), (5, 6)) == 4
    assert length((0, 10), (2, 3)) == 10
    assert length() == 0
