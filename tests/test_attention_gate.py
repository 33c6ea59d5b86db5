"""The gate lets attention through and nothing else: each planted mistake is one that a kernel could have."""

import importlib.util
import io
import math
import os
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from torch import Tensor

from stepscope.core.attention_support import SUPPORT, TensorDtype
from stepscope.core.attention_verdict import AttentionShape, GateFailure, GateReport
from stepscope.core.errors import InputError
from stepscope.core.workload import Attention
from stepscope.kernels.flash_tiled import flash_tiled
from stepscope.models.attention import AttentionFunction, reference, sdpa
from stepscope.models.attention_gate import (
    check_attention_implementation,
    check_attention_matrix,
    few_shapes,
    gate_shapes,
)
from stepscope.report.attention_gate import render_gate

CPU = torch.device("cpu")
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


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_implementation_passes_on_every_length_and_head_dim(dtype: TensorDtype):
    names: list[Attention] = [name for name in SUPPORT if name not in ("flash", "flex")]
    reports = check_attention_matrix(
        names,
        device=CPU,
        dtypes=(dtype,),
        shapes=few_shapes(),
        repeat=dtype == "fp32",
    )
    for report in reports:
        name = report.implementation
        if "cpu" in SUPPORT[name].device_types:
            report.require()
            assert len(report.verdicts) == 7
            ran = [verdict for verdict in report.verdicts if verdict.outcome == "passed"]
            assert all([error.tensor for error in verdict.errors] == ["out", "dq", "dk", "dv"] for verdict in ran)
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


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton, and TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_kernel_passes_in_tritons_interpreter(dtype: TensorDtype):
    check_attention_implementation(
        "flash",
        device=CPU,
        dtypes=(dtype,),
        shapes=(few_shapes()[1], few_shapes()[3]),
    ).require()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in SUPPORT if name != "flex"])
def test_every_implementation_passes_on_a_gpu(name: Attention):
    report = check_attention_implementation(
        name, device=torch.device("cuda"), dtypes=("fp32", "bf16", "fp16"), shapes=gate_shapes(), repeat=True
    )
    report.require()


@pytest.mark.gpu
def test_flex_passes_on_a_gpu():
    """On fewer shapes: it is compiled for each."""
    check_attention_implementation("flex", device=torch.device("cuda"), dtypes=("bf16",), shapes=few_shapes()).require()


def test_the_shapes_have_everything_that_is_odd():
    shapes = gate_shapes()
    assert len(shapes) == 49 == len({str(shape) for shape in shapes})
    assert {shape.queries for shape in few_shapes()} == {1, 17, 63, 64, 65, 127, 200}
    assert {shape.head_dim for shape in few_shapes()} == {16, 24, 40, 64, 80, 128, 256}
    for some in (shapes, few_shapes()):
        assert {shape.layout for shape in some} == {"contiguous", "transposed", "strided"}
        assert {shape.causal for shape in some} == {True, False}
        assert any(shape.keys < shape.queries for shape in some) and any(shape.keys > shape.queries for shape in some)
        assert any(shape.key_heads < shape.heads for shape in some) and any(shape.window for shape in some)
        hiding = [s for s in some if s.window is not None and (s.queries if s.causal else s.keys) > s.window]
        assert {s.causal for s in hiding} == {True, False}
        assert any(s.key_heads < s.heads for s in hiding) and any(s.window != 1 for s in hiding)
        assert any(s.causal and s.keys < s.queries for s in some)
    for shape in shapes:  # what is exact zero would say nothing: no shape is nothing else
        assert shape.window is None or shape.queries < shape.keys + shape.window or shape.queries > 1


# ---- what is wrong does not


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
    """A grid that covers part of the queries; the rest of the output is what was in memory."""
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
    (tiles_of_the_first_half, square(64), "out is"),
    (zeros_in_the_last_row, square(200), "out is off by"),
    (another_scale, square(200), "out is off by"),
    (mask_lost_on_the_last_tile, square(200), "out is off by|a row of out"),
    (no_mask, square(17), "out is off by"),
    (not_a_number_in_one_place, square(65), "out is not finite"),
    (heads_of_keys_in_another_order, square(17, heads=4), "out is off by"),
    (upside_down, square(17, keys=40), "out is off by"),
    (another_shape, square(17), r"out is \(1, 17, 2, 16\) in bfloat16, not \(1, 2, 17, 16\) in bf16"),
    (raises, square(17), "RuntimeError: out of resource: shared memory"),
    (gradient_of_k_wrong, square(17, causal=False), r"full\) in bf16: dk is off by [\d.]+ where [\d.]+ is allowed$"),
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


def test_memory_that_is_not_written_is_no_answer():
    """Where the kernel leaves its output as it came: NaN, or on a host what another allocation left there."""

    def empty(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        return torch.empty_like(q) + 0 * (q.sum() + k.sum() + v.sum())

    (verdict,) = judged(empty, square(64), dtype="fp32").verdicts
    assert verdict.outcome == "failed" and not verdict.errors[0].passed
    assert "out is not finite" in verdict.sentence or "out is off by" in verdict.sentence


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
    screen = io.StringIO()
    Console(file=screen, width=160).print(render_gate((right, absent, wrong)))
    text = screen.getvalue()
    rows = {tuple(line.split()[:3]) for line in text.splitlines() if line.strip()}
    assert {("reference", "fp32", "right"), ("reference", "bf16", "right"), ("flash", "bf16", "WRONG")} <= rows
    assert ("sdpa-cudnn", "bf16", "not") in rows
    assert "flash fails (1, 2, 17, 16, causal) in bf16: out is off by" in text
    assert "sdpa-cudnn does not run on cpu: 4 of 4 calls" in text


def test_large_calls_are_judged_in_chunks(monkeypatch: pytest.MonkeyPatch):
    """The same verdict as by the reference in one piece."""
    from stepscope.models import attention_gate

    whole = judged(reference, square(300), dtype="fp32")
    monkeypatch.setattr(attention_gate, "_MOST_SCORES", 0)
    chunks = judged(reference, square(300), dtype="fp32")
    for a, b in zip(whole.verdicts[0].errors, chunks.verdicts[0].errors, strict=True):
        assert a.error == pytest.approx(b.error, rel=1e-6)
