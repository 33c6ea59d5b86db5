"""The gate lets attention through and nothing else: each planted mistake is one that a kernel could have."""

import importlib.util
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from stepscope.app.cli.app import app
from stepscope.core.attention_call import (
    AttentionShape,
    GateFailure,
    GateReport,
)
from stepscope.core.errors import InputError
from stepscope.core.parts import ATTENTIONS, Attention, TensorDtype
from stepscope.kernels.flash.tiled import flash_tiled
from stepscope.questions import attention_gate as attention_matrix
from stepscope.questions.attention_gate import GateMatrix, answer_gate, decode_matrix
from stepscope.training.attention import AttentionFunction, implementation
from stepscope.training.attention.gate import (
    check_attention_implementation,
    check_attention_matrix,
    few_shapes,
    gate_shapes,
)
from stepscope.training.attention.pytorch import sdpa
from stepscope.training.attention.written_out import reference
from tests.conftest import at_length
from tests.shown import shown

CPU = torch.device("cpu")
PLAIN, PROBES = few_shapes()[:7], few_shapes()[7:]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def square(seq: int, **changes: Any) -> AttentionShape:
    sizes = {"batch": 1, "heads": 2, "key_heads": 2, "queries": seq, "keys": seq, "head_dim": 16, "causal": True}
    return msgspec.convert({**sizes, **changes}, AttentionShape)


def judged(function: AttentionFunction, *shapes: AttentionShape, dtype: TensorDtype = "bf16") -> GateReport:
    return check_attention_implementation(
        "flash",
        device=CPU,
        dtypes=(dtype,),
        shapes=shapes,
        function=function,
    )


# ---- what is right passes


@pytest.mark.parametrize("dtype", ["fp32", "bf16", *at_length("fp16")])
def test_every_implementation_passes_on_every_length_and_head_dim(dtype: TensorDtype):
    names: list[Attention] = [name for name in ATTENTIONS if name not in ("flash", "flex")]
    reports = check_attention_matrix(
        names,
        device=CPU,
        dtypes=(dtype,),
        shapes=few_shapes(),
        repeat=dtype == "fp32",
    )
    for report in reports:
        name = report.implementation
        if "cpu" in ATTENTIONS[name].device_types:
            report.require()
            assert len(report.verdicts) == 16
            ran = [verdict for verdict in report.verdicts if verdict.outcome == "passed"]
            for verdict in ran:
                asked = [f"d{letter}" for letter in verdict.shape.differentiated]
                assert [error.tensor for error in verdict.errors] == ["out", *asked]
            assert {verdict.repeats for verdict in ran} == ({True} if dtype == "fp32" else {None})
        else:
            assert {verdict.outcome for verdict in report.verdicts} == {"not supported"}
            with pytest.raises(GateFailure, match=f"{name} was not seen to be right: .* does not run on cpu"):
                report.require()


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_an_implementation_without_backward_is_judged_by_its_output():
    report = check_attention_implementation("flex", device=CPU, dtypes=("fp32",), shapes=few_shapes()[:3])
    assert report.passed
    assert {tuple(error.tensor for error in verdict.errors) for verdict in report.verdicts} == {("out",)}


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton, and TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", ["fp32", *at_length("bf16", "fp16")])
def test_the_kernel_passes_in_tritons_interpreter(dtype: TensorDtype):
    check_attention_implementation(
        "flash",
        device=CPU,
        dtypes=(dtype,),
        shapes=(PLAIN[1], PLAIN[3], *((PROBES[4], PROBES[6]) if dtype == "fp32" else ())),
    ).require()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name not in {"flash", "flex"}])
def test_every_implementation_passes_on_a_gpu(name: Attention, dtype: TensorDtype):
    report = check_attention_implementation(
        name, device=torch.device("cuda"), dtypes=(dtype,), shapes=gate_shapes(), repeat=True
    )
    assert [verdict.sentence for verdict in report.failures if not verdict.known] == []
    ran = any(verdict.outcome != "not supported" for verdict in report.verdicts)
    assert ran or dtype not in ATTENTIONS[name].cuda_dtypes


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_flash_passes_on_a_gpu(dtype: TensorDtype, part: int):
    """In parts, side by side: every shape has kernels of its own to compile."""
    check_attention_implementation(
        "flash", device=torch.device("cuda"), dtypes=(dtype,), shapes=gate_shapes()[part::6], repeat=True
    ).require()


@pytest.mark.gpu
def test_flex_passes_on_a_gpu():
    """On fewer shapes: it is compiled for each."""
    check_attention_implementation("flex", device=torch.device("cuda"), dtypes=("bf16",), shapes=few_shapes()).require()


# ---- what is wrong does not


class _SixteenBits(torch.autograd.Function):
    """Attention that is exact but for what a GPU's kernels round: the operands of backward's products, and the results.

    With `early` the weights P are rounded before dS = P (dP - D) is made of them, as PyTorch's memory-efficient kernel
    does; other kernels round P for products alone, and dS.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, early: bool) -> Tensor:  # noqa: PLR0917
        weights = ((q.double() @ k.double().mT) * scale).masked_fill(~mask, -math.inf).softmax(-1)
        out = (weights @ v.double()).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, weights.to(q.dtype) if early else weights)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, weights = ctx.saved_tensors
        gradient = gradients[0].double()
        row = (gradient * out.double()).sum(-1, keepdim=True)
        scores = (weights.double() * (gradient @ v.double().mT - row) * ctx.scale).to(q.dtype).double()
        dq, dk, dv = scores @ k.double(), scores.mT @ q.double(), weights.to(q.dtype).double().mT @ gradient
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None


def sixteen_bits(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None,
    bounds: Tensor | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    assert window is None and bounds is None
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return _SixteenBits.apply(q, k, v, mask.tril() if causal else mask, scale, early)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("name", "dtype", "keys_times", "known"),
    [
        ("sdpa-efficient", "fp16", 1.0, True),
        ("flash", "fp16", 1.0, False),  # no other kernel is known to round so
        ("sdpa-efficient", "fp16", 1.1, False),  # a mistake is no rounding
        ("sdpa-efficient", "fp32", 1.1, False),
    ],
)
def test_the_efficient_kernels_rounded_weights_are_told_from_mistakes(
    name: Attention, dtype: TensorDtype, keys_times: float, known: bool, monkeypatch: pytest.MonkeyPatch
):
    """Its error in the one call of a GPU's gate that it fails, 0.00078, is that of its rounding, emulated.

    So is that of the call it is judged by: how PyTorch rounds on a CPU differs with the CPU's instructions.
    """
    monkeypatch.setattr("stepscope.training.attention.gate.sdpa", sixteen_bits)
    call = next(shape for shape in few_shapes() if shape.scale == -0.2)

    def function(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return sixteen_bits(q, k * keys_times, v, early=True, **options)

    report = check_attention_implementation(name, device=CPU, dtypes=(dtype,), shapes=(call,), function=function)
    assert report.failures
    assert all(verdict.known for verdict in report.failures) is known
    assert ("known of PyTorch's memory-efficient kernel" in report.failures[0].sentence) is known


def test_a_call_that_writes_to_its_inputs_does_not_pass_nor_spoils_them_for_others():
    def scales_in_place(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None, **_: object):
        out = sdpa(q, k, v, causal=causal, window=window)
        q.data.mul_(2)
        return out

    mistaken, right = check_attention_matrix(
        ("flash-tiled", "sdpa"),
        device=CPU,
        dtypes=("fp32",),
        shapes=few_shapes()[:3],
        functions={"flash-tiled": scales_in_place},
    )
    assert {verdict.reason for verdict in mistaken.verdicts} == {"it writes to q, which are the caller's"}
    right.require()


@pytest.mark.parametrize("other", [1, -1])
def test_a_window_of_another_size_does_not_pass(other: int):
    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None, **_: object):
        return sdpa(q, k, v, causal=causal, window=None if window is None else max(1, window + other))

    report = check_attention_implementation(
        "flash-tiled", device=CPU, dtypes=("bf16",), shapes=few_shapes(), function=attention
    )
    assert any(verdict.outcome == "failed" for verdict in report.verdicts)


def tiles_of_the_first_half(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
    """A grid that covers part of the queries; the rest of the output is what was in memory. That is NaN on a GPU, and
    mostly so on a host, where it may be what another call has computed: then gradients alone are off."""
    out = torch.empty_like(q)
    half = q.shape[-2] // 2
    right = sdpa(q, k, v, causal=causal)
    return torch.where(torch.arange(q.shape[-2])[:, None] < half, right, out.detach())


def zeros_in_the_last_row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
    return sdpa(q, k, v, causal=causal) * (torch.arange(q.shape[-2])[:, None] < q.shape[-2] - 1)


def another_scale(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
    return sdpa(q, k, v, causal=causal, scale=1.02 / math.sqrt(q.shape[-1]))


def mask_lost_on_the_last_tile(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
    """Tiles of 16."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    query, key = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
    hidden = (key > query) & ~((query >= q.shape[-2] - 16) & (key >= q.shape[-2] - 16))
    return scores.float().masked_fill(hidden & causal, -math.inf).softmax(-1).to(q.dtype) @ v


def no_mask(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    return sdpa(q, k, v, causal=False)


def one_key_too_many(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
    """One query of 200 sees the key after it."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    query, key = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
    hidden = (key > query) & ~((query == 150) & (key == 151))
    return scores.masked_fill(hidden & causal, -math.inf).softmax(-1) @ v


def not_a_number_in_one_place(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
    out = sdpa(q, k, v, causal=causal)
    spoiled = torch.zeros_like(out)
    spoiled[..., -1, -1] = math.nan
    return out + spoiled


def heads_of_keys_in_another_order(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
    """Query head h reads key head h mod H' instead of h // (H / H')."""
    group = q.shape[1] // k.shape[1]
    return sdpa(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), causal=causal)


def upside_down(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
    """Causal as the bottom right has it, where the lengths are unequal."""
    behind = k.shape[-2] - q.shape[-2]
    hidden = torch.arange(k.shape[-2])[None, :] > torch.arange(q.shape[-2])[:, None] + behind
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).float()
    return scores.masked_fill(hidden & causal, -math.inf).softmax(-1).to(q.dtype) @ v


def another_shape(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
    return sdpa(q, k, v, causal=causal).transpose(1, 2)


def raises(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    raise RuntimeError("out of resource: shared memory")


class _WrongGradient(torch.autograd.Function):
    """The identity, whose gradient is off."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        wrong = gradients[0].clone()
        wrong[..., -1, :] = 0  # the last row is not added to
        return wrong


def gradient_of_k_wrong(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
    wrong = _WrongGradient.apply(k)
    assert isinstance(wrong, Tensor)
    return sdpa(q, wrong, v, causal=causal)


PLANTED: list[tuple[Callable[..., Tensor], AttentionShape, str]] = [
    (tiles_of_the_first_half, square(64), "out is|dq is off by"),
    (zeros_in_the_last_row, square(200), "out is off by"),
    (another_scale, square(200), "out is off by"),
    (mask_lost_on_the_last_tile, square(200), "out is off by|a row of out"),
    (no_mask, square(17), "out is off by"),
    (not_a_number_in_one_place, square(65), "out is not finite"),
    (heads_of_keys_in_another_order, square(17, heads=4), "out is off by"),
    (upside_down, square(17, keys=40), "out is off by"),
    (another_shape, square(17), r"out is \(1, 17, 2, 16\) in bfloat16, not \(1, 2, 17, 16\) in bf16"),
    (raises, square(17), "RuntimeError: out of resource: shared memory"),
    (gradient_of_k_wrong, square(17, causal=False), r"full\) in bf16: dk is off by [\d.]+ where [\d.]+ is allowed \("),
]


@pytest.mark.parametrize(("function", "shape", "says"), PLANTED, ids=[each[0].__name__ for each in PLANTED])
def test_a_planted_mistake_is_refused(function: AttentionFunction, shape: AttentionShape, says: str):
    dtypes: tuple[TensorDtype, ...] = ("fp32", "bf16", "fp16")
    for dtype in dtypes:
        report = judged(function, shape, dtype=dtype)
        assert not report.passed
        with pytest.raises(
            GateFailure, match="attention flash is wrong in 1 of 1 cases, so that no time of it is shown"
        ):
            report.require()
        assert msgspec.json.decode(msgspec.json.encode(report), type=GateReport) == report
    sentence = judged(function, shape).failures[0].sentence
    assert re.search(says, sentence), sentence


def test_who_subtracts_no_maximum_is_judged_on_the_scores_that_it_takes():
    """By what ATTENTIONS states: where exp of the scores overflows it is not asked, elsewhere it has to be right."""
    (report,) = check_attention_matrix(("unsafe",), device=CPU, dtypes=("fp32", "fp16"), shapes=few_shapes())
    asked = {verdict.shape.numbers for verdict in report.verdicts if verdict.outcome == "passed"}
    assert report.passed and asked == {"normal", "rising", "falling"}  # rising as far as its keys go
    reasons = {verdict.reason for verdict in report.verdicts if verdict.outcome == "not supported"}
    assert reasons == {
        "subtracts no maximum: in fp32 it takes scores up to 88",
        "subtracts no maximum: in fp16 it takes scores up to 11",
    }
    (compiled,) = check_attention_matrix(  # or anything else in its place
        ("unsafe",), device=CPU, dtypes=("fp32",), shapes=PROBES, functions={"unsafe": implementation("unsafe")}
    )
    assert compiled.verdicts == tuple(v for v in report.verdicts if v.dtype == "fp32" and v.shape in PROBES)
    for verdict in report.verdicts:
        if verdict.shape.numbers == "offset":
            assert verdict.outcome == "not supported"
        if verdict.shape.numbers == "normal" and verdict.shape.scale is None:
            assert verdict.outcome == "passed"


def test_who_may_be_further_off_is_said():
    reports = check_attention_matrix(
        ("reference", "flash-tiled"), device=CPU, dtypes=("fp32", "bf16"), shapes=PLAIN[:3]
    )
    allowances = {
        (report.implementation, verdict.dtype): verdict.allowance for report in reports for verdict in report.verdicts
    }
    rounds = "twice as far as others, four times sdpa's error, for rounding scores and weights to 16 bits"
    assert allowances == {
        ("reference", "fp32"): "",
        ("reference", "bf16"): rounds,
        ("flash-tiled", "fp32"): "",
        ("flash-tiled", "bf16"): "",
    }
    for theirs, ours in zip(reports[0].verdicts, reports[1].verdicts, strict=True):
        times = 2 if theirs.dtype == "bf16" else 1
        assert [a.allowed for a in theirs.errors] == pytest.approx([times * b.allowed for b in ours.errors])
    (wrong,) = check_attention_matrix(
        ("reference",), device=CPU, dtypes=("bf16",), shapes=(square(17),), functions={"reference": no_mask}
    )
    assert f"is allowed ({rounds})" in wrong.failures[0].sentence


def test_grouped_heads_of_fp32_are_held_against_the_worse_of_sdpas_two(monkeypatch: pytest.MonkeyPatch):
    """On a GPU sdpa writes attention out where heads are grouped in fp32, and closer than its fused one comes."""
    from stepscope.training.attention import gate

    def coarse(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
        """As a fused kernel might be: off by a hundred times where heads are not grouped, exact where they are."""
        out = reference(q.double(), k.double(), v.double(), causal=causal).to(q.dtype)
        return out if q.shape[1] != k.shape[1] else out * (1 + 1e-5)

    grouped, even = square(17, heads=4), square(17, heads=4, key_heads=4)
    monkeypatch.setattr(gate, "sdpa", coarse)
    for shape in (grouped, even):
        (verdict,) = judged(reference, shape, dtype="fp32").verdicts
        assert verdict.errors[0].sdpa == pytest.approx(1e-5, rel=0.02)
        assert [line[:26] for line in verdict.yardsticks] == (
            ["in fp32 with grouped heads"] if shape is grouped else []
        )
    assert judged(reference, grouped, dtype="bf16").verdicts[0].yardsticks == ()


def test_scores_that_are_large_may_be_rounded_and_that_is_said():
    """Scores up to about 300: two unit roundoffs of them, in fp32; in 16 bits, twice that, for who rounds them so."""
    offset = square(40, numbers="offset")
    rounds, fused = check_attention_matrix(
        ("reference", "flash-tiled"), device=CPU, dtypes=("fp32", "fp16"), shapes=(offset,)
    )
    for report in (rounds, fused):
        for verdict in report.verdicts:
            assert verdict.outcome == "passed"
            assert verdict.yardsticks[0].startswith("where scores are not of the size 1 is at least 2 unit roundoffs")
            unit = 2**-11 * 2 if verdict.dtype == "fp16" and report is rounds else 2**-24
            for error in verdict.errors:
                assert error.allowed >= 2 * unit * 290
                assert error.allowed <= max(2 * unit * 310, 4 * error.sdpa, 2**-11)


def test_a_single_key_too_many_is_seen_in_fp32():
    """The error that it makes in a late row is one that 16 bits make everywhere."""
    report = judged(one_key_too_many, square(200), dtype="fp32")
    assert [error.passed for error in report.failures[0].errors] == [False] * 4


def test_one_wrong_row_among_many_is_seen():
    """In bf16, over all rows together, it would be within what is allowed."""

    def one_row_off(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
        spoiled = torch.ones((*q.shape[:-1], 1), dtype=q.dtype)
        spoiled[-1, -1, -1] = 0
        return sdpa(q, k, v, causal=causal) * spoiled

    report = judged(one_row_off, square(128, batch=64, heads=8, key_heads=8, head_dim=8, causal=False))
    (failure,) = report.failures
    (out, *_) = failure.errors
    assert out.error is not None and out.error <= out.allowed
    assert not out.passed and "a row of out is off by" in failure.sentence


@pytest.mark.parametrize(("left", "says"), [(math.nan, "out is not finite"), (7.0, "out is off by")])
def test_memory_that_is_not_written_is_no_answer(left: float, says: str):
    """Where the kernel leaves its output as it came: NaN, or on a host what another allocation left there.

    Memory that is really left alone holds, now and then, the right answer that was freed before.
    """

    def unwritten(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        return torch.full_like(q, left) + 0 * (q.sum() + k.sum() + v.sum())

    (verdict,) = judged(unwritten, square(64), dtype="fp32").verdicts
    assert verdict.outcome == "failed" and not verdict.errors[0].passed
    assert says in verdict.sentence


def test_an_implementation_that_changes_from_run_to_run_is_said_to():
    runs: list[int] = []

    def drifting(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
        runs.append(1)
        return sdpa(q, k, v, causal=causal) * (1 + 1e-7 * len(runs))

    report = check_attention_implementation(
        "flash", device=CPU, dtypes=("fp32",), shapes=(square(64),), repeat=True, function=drifting
    )
    assert report.verdicts[0].repeats is False
    steady = check_attention_implementation("sdpa", device=CPU, dtypes=("fp32",), shapes=(square(64),), repeat=True)
    assert steady.verdicts[0].repeats is True


def test_numbers_are_fresh_in_every_case_and_the_same_again():
    seen: list[float] = []

    def watching(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
        seen.append(float(q.detach().sum()))
        return sdpa(q, k, v, causal=causal)

    for seed in (0, 0, 1):
        check_attention_implementation(
            "flash", device=CPU, dtypes=("fp32",), shapes=(square(17), square(18)), seed=seed, function=watching
        )
    assert seen[:2] == seen[2:4] and len(set(seen)) == 4


def test_a_gradient_that_is_exactly_zero_is_held_against_its_terms():
    """One key: dq and dk are zero, and whoever is off by rounding is not off by infinitely much."""
    one = square(1)
    assert judged(flash_tiled, one).passed

    def not_zero(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
        out = sdpa(q, k, v, causal=causal)
        return out + (q - q.detach())

    assert "dq is off by" in judged(not_zero, one, dtype="fp32").failures[0].sentence


def test_what_a_benchmark_is_told():
    assert not GateReport(implementation="flash", device="cpu", seed=0, verdicts=()).passed
    with pytest.raises(GateFailure, match="it was asked for nothing"):
        GateReport(implementation="flash", device="cpu", seed=0, verdicts=()).require()
    assert GateFailure.exit_code == 1
    with pytest.raises(InputError, match="cannot judge fp64"):
        check_attention_implementation("sdpa", device=CPU, dtypes=("fp64",), shapes=few_shapes())


def test_a_yardstick_that_fails_is_said_to(monkeypatch: pytest.MonkeyPatch):
    from stepscope.training.attention import gate

    monkeypatch.setattr(gate, "sdpa", raises)
    with pytest.raises(
        RuntimeError, match="sdpa, by whose error the gate judges, raises RuntimeError: out of resource"
    ):
        judged(reference, square(17))


def test_running_out_of_memory_is_nobodys_mistake():
    def full(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        judged(full, square(17))


def test_the_table_says_who_is_wrong_and_where():
    right, absent = check_attention_matrix(
        ("reference", "sdpa-cudnn"), device=CPU, dtypes=("fp32", "bf16"), shapes=few_shapes()[:2], repeat=True
    )
    wrong = judged(no_mask, square(17), square(18))
    text = shown(answer_gate((right, absent, wrong)), 160)
    rows = {tuple(line.split()[:3]) for line in text.splitlines() if line.strip()}
    assert {("reference", "fp32", "right"), ("reference", "bf16", "right"), ("flash", "bf16", "WRONG")} <= rows
    assert ("sdpa-cudnn", "bf16", "not") in rows
    assert "flash fails (1, 2, 17, 16, causal) in bf16: out is off by" in text
    assert "sdpa-cudnn does not run on cpu: 4 of 4 calls" in text


def test_large_calls_are_judged_in_chunks(monkeypatch: pytest.MonkeyPatch):
    """The same verdict as by the reference in one piece."""
    from stepscope.training.attention import gate

    whole = judged(reference, square(300), dtype="fp32")
    monkeypatch.setattr(gate, "_MOST_SCORES", 0)
    chunks = judged(reference, square(300), dtype="fp32")
    for a, b in zip(whole.verdicts[0].errors, chunks.verdicts[0].errors, strict=True):
        assert a.error == pytest.approx(b.error, rel=1e-6)


# ---- the verb's exit code


def gate(*words: str) -> int:
    return app(["study", "attention-gate", "--device", "cpu", "--workers", "1", *words], standalone_mode=False) or 0


@pytest.mark.slow
def test_nothing_judged_is_wrong_input(capfd: pytest.CaptureFixture[str], tmp_path: Path):
    """What was asked for runs nowhere here, or there was no time: one line, and the table of why before it."""
    out = tmp_path / "gate.json"
    with pytest.raises(InputError, match=r"^the gate judged nothing: attention sdpa-cudnn does not run on cpu, the"):
        gate("--attention", "sdpa-cudnn,sdpa-efficient", "--dtype", "bf16", "--figures", str(out))
    assert "0 of 32 calls were judged, and 32 are not supported" in capfd.readouterr().out
    assert decode_matrix(out.read_bytes(), "gate").reached == 32
    with pytest.raises(InputError, match="judged nothing: none of 16 calls was reached: give it more") as caught:
        gate("--attention", "sdpa", "--dtype", "bf16", "--seconds", "0")
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_a_wrong_implementation_is_a_failed_check(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Beside right ones too; and where all that was judged is right, what is not supported does no harm."""
    right, absent = check_attention_matrix(("sdpa", "sdpa-cudnn"), device=CPU, dtypes=("bf16",), shapes=PLAIN[1:3])
    wrong = judged(no_mask, *PLAIN[1:3])
    for reports, code in (((right, absent), 0), ((right, absent, wrong), 1)):
        matrix = GateMatrix(device="cpu", reports=reports, calls=2 * len(reports))
        monkeypatch.setattr(attention_matrix, "judge_matrix", lambda *_, matrix=matrix, **__: matrix)
        assert gate("--attention", "sdpa") == code
    assert "flash fails (1, 3 over 1, 17, 64, causal, transposed) in bf16: out is off by" in capfd.readouterr().out
