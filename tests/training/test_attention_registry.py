"""Attention by name: values and gradients of each, what it refuses, what `auto` picks, what it keeps for backward."""

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.allocations.prediction.estimate import estimate
from stepscope.allocations.prediction.fit import budget_of_memory
from stepscope.core import attention_support
from stepscope.core.attention_support import attention_of, is_predicted, predicted_attention, resolve_attention
from stepscope.core.errors import InputError
from stepscope.core.parts import ATTENTIONS, Attention, AttentionCall, attention_names, is_kept
from stepscope.core.run import Settings
from stepscope.engine.fake_module import estimate_by_running
from stepscope.engine.request import StepRequest
from stepscope.engine.step import measure_step
from stepscope.engine.sweep import cells_that_will_not_fit
from stepscope.engine.sweep_plan import Cell, SweepPlan
from stepscope.runs.answer import answer_run
from stepscope.training.attention import attention_for, implementation, written_out
from stepscope.training.attention.inputs import attend, check_inputs
from stepscope.training.attention.written_out import CHUNK, chunked, reference
from stepscope.training.training_step import TrainingStep
from tests.allocations.prediction.test_cpu import assert_alike, kept_by_symbolic_model, kept_in_truth
from tests.conftest import mini, run_steps
from tests.shown import shown
from tests.textbook import textbook

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
HERE = [
    name
    for name, record in ATTENTIONS.items()
    if record.compiler is None and "cpu" in record.device_types and "cpu" in record.trains_on
]
"""The attentions that train on a CPU and are not compiled: each of them is tested without being named."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs Triton, and TRITON_INTERPRET=1")


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float, window: int | None
) -> torch.Tensor:
    """From a table of who sees whom; a query that sees nobody gives zeros."""
    query, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        seen &= key <= query
    if window is not None:
        seen &= (query - key).abs() < window
    group = q.shape[1] // k.shape[1]
    out = []
    for head in range(q.shape[1]):
        exponentials = torch.exp(q[:, head] @ k[:, head // group].mT * scale) * seen
        sums = exponentials.sum(-1, keepdim=True)
        out.append(exponentials / torch.where(sums == 0, 1, sums) @ v[:, head // group])
    return torch.stack(out, dim=1)


def call_tensors(
    heads: int, key_heads: int, queries: int, keys: int, head_dim: int, *, transposed: bool = False
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    sizes = [(2, heads, queries), (2, key_heads, keys), (2, key_heads, keys)]
    made = []
    for batch, h, n in sizes:
        drawn = torch.randn(batch, n, h, 2 * head_dim, generator=generator, dtype=torch.float64)
        tensor = drawn[..., ::2].transpose(1, 2) if transposed else drawn[..., :head_dim].transpose(1, 2).contiguous()
        made.append(tensor.requires_grad_())
    return made


@pytest.mark.parametrize("name", [*HERE, "auto"])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_every_implementation_is_attention(name: Attention, data: st.DataObject):
    """Grouped heads, unequal lengths, windows, any layout: values and all three gradients, to float64's rounding."""
    heads, key_heads = data.draw(st.sampled_from([(1, 1), (4, 4), (4, 2), (3, 1)]))
    queries, keys = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 150))
    window = data.draw(st.none() | st.integers(1, 160)) if name == "auto" or ATTENTIONS[name].window else None
    causal, scale = data.draw(st.booleans()), data.draw(st.sampled_from([None, 0.2, 0.0, -0.3]))
    head_dim = data.draw(st.sampled_from([2, 5, 16]))
    inputs = call_tensors(heads, key_heads, queries, keys, head_dim, transposed=data.draw(st.booleans()))
    out = attend(name, *inputs, causal=causal, scale=scale, window=window)
    scale = head_dim**-0.5 if scale is None else scale
    exact = by_definition(*inputs, causal=causal, scale=scale, window=window)
    gradient = torch.randn(exact.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(out, inputs, gradient)
    wanted = torch.autograd.grad(exact, inputs, gradient)
    for a, b in zip((out, *found), (exact, *wanted), strict=True):
        assert torch.allclose(a, b, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 9), (False, 9)])
def test_flex_on_a_cpu_has_a_forward_alone(causal: bool, window: int | None):
    inputs = [tensor.detach() for tensor in call_tensors(4, 2, 50, 33, 16)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is not compiled
        out = attend("flex", *(tensor.float() for tensor in inputs), causal=causal, window=window)
    exact = by_definition(*inputs, causal=causal, scale=0.25, window=window)
    assert torch.allclose(out.double(), exact, atol=1e-5)
    with pytest.raises(InputError, match="flex has no backward on cpu"):
        attend("flex", *(tensor.float().requires_grad_() for tensor in inputs), causal=causal)


def test_unsafe_overflows_where_the_reference_does_not():
    q = torch.full((1, 1, 2, 4), 4.0, dtype=torch.float16)  # scores 32: exp is infinite in fp16 from 11.09 on
    v = torch.tensor([1.0, 3.0], dtype=torch.float16)[None, None, :, None].expand(1, 1, 2, 4)
    assert torch.equal(reference(q, q, v, causal=False), torch.full((1, 1, 2, 4), 2.0, dtype=torch.float16))
    assert bool(implementation("unsafe")(q, q, v, causal=False).isnan().all())


# ---- what chunks save


@pytest.mark.parametrize("causal", [True, False])
def test_chunks_of_queries_are_cut_where_they_must_be(monkeypatch: pytest.MonkeyPatch, causal: bool):
    monkeypatch.setattr(written_out, "CHUNK", 8)
    for queries, keys, window in [(24, 24, None), (25, 9, None), (7, 30, 3), (31, 20, 8), (9, 9, 1)]:
        inputs = call_tensors(2, 1, queries, keys, 4)
        out = chunked(*inputs, causal=causal, window=window)
        assert torch.allclose(out, by_definition(*inputs, causal=causal, scale=0.5, window=window), atol=1e-12)


def test_chunked_keeps_queries_keys_and_values_alone():
    q, k, v = (torch.randn(1, 2, 3 * CHUNK, 8).requires_grad_() for _ in range(3))
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        chunked(q, k, v, causal=True)
    assert sum(kept.values()) <= sum(tensor.nbytes for tensor in (q, k, v))


# ---- what is refused


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


GOOD = (1, 2, 5, 8)


@pytest.mark.parametrize("name", ["reference", "sdpa", "flash-tiled", "auto"])
@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (((2, 5, 8),) * 3, r"takes \(batch, heads, seq, head_dim\), not \(2, 5, 8\)"),
        ((GOOD, (1, 2, 6, 8), (1, 2, 5, 8)), "keys and values of one shape"),
        ((GOOD, (2, 2, 5, 8), (2, 2, 5, 8)), "one batch and one head_dim"),
        ((GOOD, (1, 2, 5, 16), (1, 2, 5, 16)), "one batch and one head_dim"),
        (((1, 4, 5, 8), (1, 3, 5, 8), (1, 3, 5, 8)), "3 heads of keys do not divide 4 heads of queries"),
        (((1, 2, 0, 8), GOOD, GOOD), "empty tensor"),
        ((GOOD, (1, 2, 0, 8), (1, 2, 0, 8)), "empty tensor"),
    ],
)
def test_shapes_that_are_no_call(name: Attention, shapes: tuple[tuple[int, ...], ...], says: str):
    with pytest.raises(InputError, match=says) as caught:
        attend(name, *tensors(*shapes), causal=True)
    assert f"attention {name}" in str(caught.value) and "\n" not in str(caught.value)


def test_dtypes_and_windows_that_are_no_call():
    q, k, v = tensors(GOOD, GOOD, GOOD)
    with pytest.raises(InputError, match="float32 on cpu, float16 on cpu"):
        attend("sdpa", q, k.half(), v, causal=True)
    with pytest.raises(InputError, match="not made in int64"):
        attend("sdpa", q.long(), k.long(), v.long(), causal=True)
    with pytest.raises(InputError, match="window is 0"):
        attend("reference", q, k, v, causal=True, window=0)
    with pytest.raises(
        InputError, match="sdpa-flash takes no sliding window: choose one of reference, sdpa, sdpa-math"
    ):
        attend("sdpa-flash", q, k, v, causal=True, window=3)


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
def test_numbers_that_are_none_are_found_where_asked_for(value: float, word: str):
    q, k, v = tensors(GOOD, GOOD, GOOD)
    k[0, 1, 2, 3] = value
    assert check_inputs("sdpa", q, k, v) == "sdpa"
    with pytest.raises(InputError, match=f"attention sdpa: 1 of the 80 numbers of the keys .* {word}"):
        check_inputs("sdpa", q, k, v, finite=True)


def call(**changes: Any) -> AttentionCall:
    return AttentionCall(**{"device_type": "cuda", "dtype": "bf16", "head_dim": 64, **changes})


def everything(_name: Attention, _device_type: str) -> None:
    """A machine that has all there is."""


def no_triton(name: Attention, _device_type: str) -> str | None:
    return "needs Triton" if ATTENTIONS[name].compiler == "triton" else None


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("sdpa-cudnn", {"head_dim": 136}, "head_dim up to 128, not 136"),
        ("sdpa-cudnn", {"head_dim": 20}, "multiples of 8, not 20"),
        ("sdpa-cudnn", {"keys": 1}, "keys from 2 on, not 1"),
        ("sdpa-cudnn", {"dtype": "fp32"}, r"does not run in fp32 \(it takes bf16, fp16\)"),
        ("sdpa-efficient", {"dtype": "fp64"}, "does not run in fp64"),
        ("flash", {"head_dim": 257}, "head_dim up to 256, not 257"),
        ("flash", {"dtype": "fp64"}, "does not run in fp64"),
        ("flex", {"head_dim": 8}, "head_dim from 16 on, not 8"),
        ("flex", {"device_type": "cpu"}, "no backward on cpu"),
        ("flash", {"device_type": "mps"}, "does not run on mps: none of the others does"),
    ],
)
def test_what_an_implementation_does_not_take(name: Attention, changes: dict[str, Any], says: str):
    with pytest.raises(InputError, match=f"attention {name} .*{says}"):
        resolve_attention(name, call(**changes), everything)


def test_the_remedy_names_those_that_would_work_and_never_the_one_for_the_lab():
    with pytest.raises(InputError) as caught:
        resolve_attention("sdpa-flash", call(window=5, dtype="fp64"), everything)
    remedy = str(caught.value).partition("choose one of ")[2].split(", ")
    assert remedy == ["reference", "sdpa", "sdpa-math", "chunked", "flash-tiled"]
    willing = [name for name in ATTENTIONS if ATTENTIONS[name].fault(call(window=5, dtype="fp64")) is None]
    assert willing == [*remedy[:3], "unsafe", *remedy[3:]]


@pytest.mark.parametrize(
    ("changes", "here", "picks"),
    [
        ({}, everything, "flash"),
        ({}, no_triton, "sdpa-cudnn"),
        ({"head_dim": 256}, no_triton, "sdpa-flash"),
        ({"dtype": "fp32"}, no_triton, "sdpa-efficient"),
        ({"dtype": "fp32", "head_dim": 20}, no_triton, "sdpa"),
        ({"dtype": "fp64"}, everything, "sdpa"),
        ({"device_type": "cpu"}, everything, "sdpa"),
    ],
)
def test_auto_picks_the_first_that_runs(changes: dict[str, Any], here: Any, picks: Attention):
    assert resolve_attention("auto", call(**changes), here) == picks


def test_auto_has_nothing_for_a_device_that_nobody_knows():
    with pytest.raises(InputError, match="no attention runs on mps"):
        resolve_attention("auto", call(device_type="mps"))


def test_flash_says_what_the_machine_lacks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_support.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match="flash needs Triton, which is not installed: choose one of reference"):
        resolve_attention("flash", call())
    monkeypatch.setattr(attention_support.importlib.util, "find_spec", lambda _name: object())
    assert resolve_attention("flash", call()) == "flash"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InputError, match="flash runs on cpu in Triton's interpreter only, with TRITON_INTERPRET=1"):
        resolve_attention("flash", call(device_type="cpu"))


def test_every_name_is_known_without_torch():
    code = (
        "import sys; from stepscope.core.parts import ATTENTIONS, attention_names; "
        "from stepscope.core.attention_support import is_predicted; "
        "assert attention_names() == (*ATTENTIONS, 'auto'); "
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- in the model


@pytest.mark.parametrize("name", [*HERE, "auto"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_trains_the_model(name: Attention, dtype: str):
    """The loss after two steps is that of the reference."""
    losses = [
        run_steps(TrainingStep(mini(attention=attention, dtype=dtype), CPU), 2) for attention in ("reference", name)
    ]
    assert losses[0] is not None
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if dtype == "fp32" else 3e-3)


def test_a_run_says_what_auto_picked(tmp_path: Path):
    one_step = Settings(warmup_floor=0, warmup_cap=0, steps_floor=1, steps_cap=1, seconds=0)
    request = StepRequest(workload=mini(attention="auto"), device="cpu", settings=one_step, out=str(tmp_path))
    run, _ = measure_step(request)
    assert textbook(run).attention == "auto" and run.evidence.attention == "sdpa"
    assert "Attention auto picked sdpa." in shown(answer_run(run))


def test_inference_takes_what_has_no_backward():
    assert attention_of(mini(attention="flex", phase="forward", d_model=64), "cpu") == "flex"
    with pytest.raises(InputError, match="flex has no backward on cpu"):
        attention_for(mini(attention="flex", d_model=64), "cpu")


def test_every_name_is_a_cell_of_its_own():
    assert len({mini(attention=name).key for name in attention_names()}) == len(ATTENTIONS) + 1
    assert mini().key.endswith("-b2-s16-fp32-train-0a5feb3f")  # as it was when there were six names


# ---- what is predicted of it


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "bf16-pure"])
def test_unsafe_keeps_what_the_symbolic_model_says(dtype: str):
    workload = mini(attention="unsafe", dtype=dtype, phase="forward-backward")
    assert kept_in_truth(workload) == kept_by_symbolic_model(workload)


@pytest.mark.parametrize("changes", [{}, {"seq_len": 64}, {"checkpointing": "every-1"}, {"dtype": "fp16"}])
def test_every_phase_of_unsafe_has_the_peak_that_is_predicted(changes: dict[str, Any]):
    assert_alike(mini(**{"attention": "unsafe", "phase": "forward-backward", "layers": 3, **changes}))


@interpreted
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16-pure"])
def test_flash_keeps_what_the_symbolic_model_says(dtype: str):
    workload = mini(attention="flash", dtype=dtype, phase="forward-backward")
    assert kept_in_truth(workload) == kept_by_symbolic_model(workload)


@interpreted
def test_checkpointing_keeps_flashs_output(monkeypatch: pytest.MonkeyPatch):
    """Its kernel runs once, and not again in backward; gradients are those without checkpointing."""
    from stepscope.kernels.flash import launch as flash_launch

    launched: list[int] = []
    launch_forward = flash_launch.launch_forward

    def counting(*tensors: torch.Tensor, **options: Any) -> None:
        launched[-1] += 1
        launch_forward(*tensors, **options)

    monkeypatch.setattr(flash_launch, "launch_forward", counting)
    gradients: list[list[torch.Tensor | None]] = []
    for checkpointing in ("none", "selective", "attention", "every-1"):
        launched.append(0)
        step = TrainingStep(mini(attention="flash", phase="forward-backward", checkpointing=checkpointing), CPU)
        run_steps(step)
        gradients.append([parameter.grad for parameter in step.model.parameters()])
    assert launched == [2, 2, 2, 4]  # of two layers
    for plain, *others in zip(*gradients, strict=True):
        assert plain is not None
        assert all(other is not None and torch.equal(plain, other) for other in others)


def test_flash_is_predicted_to_keep_what_pytorchs_flash_keeps():
    ours = mini(attention="flash", dtype="bf16", seq_len=512)
    theirs = mini(attention="sdpa-flash", dtype="bf16", seq_len=512)
    assert estimate(ours).saved_for_backward == estimate(theirs).saved_for_backward
    assert estimate(mini(attention="auto", dtype="bf16", seq_len=512)) == estimate(ours)
    assert estimate_by_running(ours).memory.saved_for_backward == estimate_by_running(theirs).memory.saved_for_backward


@pytest.mark.parametrize("name", attention_names())
def test_checkpointing_attention_is_for_those_that_are_an_operator(name: Attention):
    """Each of those that are none is refused in one line that names those that are."""
    kept = ("sdpa", "sdpa-efficient", "sdpa-flash", "sdpa-cudnn", "flash", "auto")
    assert is_kept(name) == (name in kept)
    assert mini(attention=name, checkpointing="attention", phase="forward").checkpointing == "none"
    if name in kept:
        assert mini(attention=name, checkpointing="attention").checkpointing == "attention"
        return
    with pytest.raises(InputError, match=f"attention {name} is no such .*: choose --attention {', '.join(kept)}, or"):
        mini(attention=name, checkpointing="attention")


@pytest.mark.parametrize("name", ["chunked", "flash-tiled", "flex"])
def test_memory_that_is_not_predicted_is_refused_not_guessed(name: Attention):
    workload = mini(attention=name, d_model=64)
    for predict in (estimate, estimate_by_running):
        with pytest.raises(InputError, match=f"attention {name} is not predicted: choose one of reference, sdpa"):
            predict(workload)
    budget = budget_of_memory(1 << 20)
    plan = SweepPlan(cells=(Cell(workload=workload), Cell(workload=mini(seq_len=4096))), devices=("cuda",))
    assert cells_that_will_not_fit(plan, budget) == [mini(seq_len=4096)]


def test_unsafe_is_not_predicted_compiled():
    assert is_predicted(mini(attention="unsafe")) and not is_predicted(mini(attention="unsafe", compile="default"))
    with pytest.raises(InputError, match="a compiled step with attention unsafe is not predicted"):
        predicted_attention(mini(attention="unsafe", compile="default"), "cuda")
    assert {n for n in ATTENTIONS if is_predicted(mini(attention=n))} == set(ATTENTIONS) - {
        "chunked",
        "flash-tiled",
        "flex",
    }


@pytest.mark.parametrize("name", ["sdpa", "sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_scale_that_is_not_positive_makes_no_nan_where_causal(name: Attention, scale: float):
    inputs = call_tensors(4, 2, 40, 40, 16)
    out = attend(name, *inputs, causal=True, scale=scale)
    exact = by_definition(*inputs, causal=True, scale=scale, window=None)
    assert torch.allclose(out, exact, atol=1e-11)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), inputs) for o in (out, exact)), strict=True):
        assert torch.allclose(a, b, atol=1e-10)
