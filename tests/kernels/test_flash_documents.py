"""FlashAttention over packed documents, against float64 document by document; on a GPU, or in Triton's interpreter."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from stepscope.core.errors import InputError
from stepscope.kernels.documents import check_cu_seqlens, document_bounds
from stepscope.kernels.flash import launch as flash_launch
from stepscope.kernels.flash import tuning_cache
from stepscope.kernels.flash.attention import flash_attention
from stepscope.kernels.flash.configuration import (
    BackwardConfiguration,
    HopperBackward,
    tiles,
)
from stepscope.kernels.launching import interpreted
from stepscope.training.attention.gate import check_attention_implementation, packed_shapes
from tests.conftest import in_the_interpreter_at_length
from tests.kernels.test_flash_attention import (
    DEVICE,
    FLOOR,
    _interpreter_with_new_numpy,  # noqa: F401  (a fixture)
    inputs,
    way,  # noqa: F401  (a fixture)
    written_out,
)

pytestmark = pytest.mark.slow

in_the_interpreter_long = pytest.mark.long if DEVICE == "cpu" else pytest.mark.slow


def borders(*lengths: int, device: str = DEVICE) -> Tensor:
    return torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32, device=device)


def one_by_one(
    tensors: list[Tensor], lengths: tuple[int, ...], dtype: torch.dtype, **options: Any
) -> dict[str, Tensor]:
    """Attention as its definition says of each document by itself, put together again: out and gradients in dtype."""
    batch, _, length, _ = tensors[0].shape
    q, k, v, _ = tensors
    made = {name: torch.empty_like(t, dtype=dtype) for name, t in {"out": q, "dq": q, "dk": k, "dv": v}.items()}
    ends = {*itertools.accumulate(lengths), *range(length, batch * length + 1, length)}
    for first, after in itertools.pairwise(sorted({0, *ends})):
        row, here = first // length, slice(first % length, (after - 1) % length + 1)
        of_document = written_out([t[row : row + 1, :, here] for t in tensors], dtype, **options)
        for name, whole in made.items():
            whole[row : row + 1, :, here] = of_document[name]
    return made


def ours(tensors: list[Tensor], cu_seqlens: Tensor, **options: Any) -> dict[str, Tensor]:
    *leaves, gradient = tensors
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = flash_attention(leaves[0], leaves[1], leaves[2], cu_seqlens=cu_seqlens, **options)
    found = torch.autograd.grad(out, leaves, gradient)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *found), strict=True))


def assert_right(tensors: list[Tensor], lengths: tuple[int, ...], **options: Any) -> None:
    """No further from float64 than twice what attention written out in the same dtype is."""
    dtype = tensors[0].dtype
    truth = one_by_one(tensors, lengths, torch.float64, **options)
    same_dtype = one_by_one(tensors, lengths, dtype, **options)
    for name, got in ours(tensors, borders(*lengths), **options).items():
        assert got.isfinite().all(), name
        error = (got.double() - truth[name]).abs().max().item()
        allowed = 2 * (same_dtype[name].double() - truth[name]).abs().max().item() + FLOOR[dtype]
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("sizes", "lengths"),  # batch, length, query heads of a key head, causal; tiles are of 16 and 32 positions
    [((1, 45, 2, True), (7, 1, 0, 22, 15)), ((2, 33, 1, False), (20, 30, 16)),
     *in_the_interpreter_at_length(
         *(((batch, length, group, causal), lengths) for causal in (True, False) for batch, length, group, lengths in (
             (1, 64, 1, (32, 16, 16)), (1, 37, 1, (37,)), (1, 19, 2, (1,) * 19), (1, 70, 1, (3, 66, 1)),
             (3, 20, 2, (60,)), (1, 40, 1, (0, 40, 0)), (1, 1, 1, (1,)), (2, 48, 1, (15, 17, 1, 31, 32)),
             (1, 45, 2, (7, 1, 0, 22, 15)), (2, 33, 1, (20, 30, 16)))))],
)  # fmt: skip
def test_every_way_is_attention_of_each_document(sizes: tuple[int, int, int, bool], lengths: tuple[int, ...]):
    batch, length, group, causal = sizes
    tensors = inputs(q_shape=(batch, 2, length, 16), k_shape=(batch, 2 // group, length, 16))
    assert_right(tensors, lengths, causal=causal)


@given(data=st.data())
@settings(max_examples=3, deadline=None)
def test_any_lengths(data: st.DataObject):
    batch, length = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 50))
    ends = sorted(data.draw(st.lists(st.integers(0, batch * length), max_size=6)))
    lengths = tuple(after - first for first, after in itertools.pairwise((0, *ends, batch * length)))
    tensors = inputs(q_shape=(batch, 1, length, 16), seed=length)
    assert_right(tensors, lengths, causal=data.draw(st.booleans()))


@pytest.mark.parametrize(
    ("dtype", "causal"),
    [(torch.float16, True), (torch.bfloat16, False),
     *in_the_interpreter_at_length((torch.float16, False), (torch.bfloat16, True))],
)  # fmt: skip
def test_half_precisions(dtype: torch.dtype, causal: bool):
    assert_right(inputs(q_shape=(1, 2, 40, 32), dtype=dtype), (11, 2, 27), causal=causal)


@pytest.mark.parametrize(
    "options",
    [{"window": 5, "causal": True}, {"window": 5, "causal": False}, {"scale": -0.7, "causal": False},
     *in_the_interpreter_at_length({"scale": 0.0, "causal": True}, {"scale": 1.5, "window": 40, "causal": False})],
)  # fmt: skip
def test_documents_go_with_windows_and_any_scale(options: dict[str, Any]):
    assert_right(inputs(q_shape=(1, 1, 40, 16)), (3, 22, 15), **options)


@in_the_interpreter_long
def test_six_products_of_bf16_take_documents():
    with tuning_cache.forced(precision="bf16x6"):
        assert_right(inputs(q_shape=(1, 2, 37, 24), k_shape=(1, 1, 37, 24)), (20, 1, 16), causal=True)


def test_tiles_of_other_documents_are_not_visited():
    """NaN in whole tiles of one document would reach the others by any visit, masked or not: zero times NaN is NaN."""
    size = 32 if interpreted() else 256  # of whole tiles, which are larger on a GPU
    tensors, packed = inputs(q_shape=(1, 1, 3 * size, 16)), borders(size, size, size)
    spoiled = [t.clone() for t in tensors]
    for tensor in spoiled:
        tensor[:, :, size : 2 * size] = float("nan")
    for causal in (True, False):
        expected = ours(tensors, packed, causal=causal)
        for name, got in ours(spoiled, packed, causal=causal).items():
            assert torch.equal(got[:, :, :size], expected[name][:, :, :size]), name
            assert torch.equal(got[:, :, 2 * size :], expected[name][:, :, 2 * size :]), name
            assert got[:, :, size : 2 * size].isnan().all(), name


def test_in_shared_tiles_finite_numbers_of_other_documents_change_no_bit():
    tensors, packed = inputs(q_shape=(1, 1, 60, 16)), borders(10, 30, 20)
    expected = ours(tensors, packed, causal=True)
    for tensor in tensors[:3]:
        tensor[:, :, 10:40] = 1e4
    for name, got in ours(tensors, packed, causal=True).items():
        assert torch.equal(got[:, :, :10], expected[name][:, :, :10]), name
        assert torch.equal(got[:, :, 40:], expected[name][:, :, 40:]), name


def test_every_output_is_written(monkeypatch: pytest.MonkeyPatch):
    """The operators allocate without filling; whatever was there before must not show."""

    def poisoned(*size: Any, like: Tensor | None = None, **options: Any) -> Tensor:
        made = real_empty(*size, **options) if like is None else real_empty_like(like, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    real_empty, real_empty_like = torch.empty, torch.empty_like
    tensors, packed = inputs(q_shape=(1, 2, 37, 24), k_shape=(1, 1, 37, 24)), borders(5, 1, 31)
    expected = ours(tensors, packed, causal=True)
    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda like, **options: poisoned(like=like, **options))
    for name, got in ours(tensors, packed, causal=True).items():
        assert torch.equal(got, expected[name]), name


@pytest.mark.parametrize("causal", [False, *in_the_interpreter_at_length(True)])
def test_one_document_is_none(causal: bool):
    """Bit for bit: the same tiles in the same order."""
    tensors = inputs(q_shape=(2, 1, 40, 16))
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    plain = flash_attention(leaves[0], leaves[1], leaves[2], causal=causal)
    found = torch.autograd.grad(plain, leaves, tensors[3])
    packed = ours(tensors, borders(40, 40), causal=causal)
    for got, expected in zip(packed.values(), (plain, *found), strict=True):
        assert torch.equal(got, expected)


def test_calls_repeated_and_profiled_are_the_same_call():
    """Launches are recorded by shape: other borders of as many positions are other documents. A profiler makes the
    call an operator."""
    tensors = inputs(q_shape=(1, 1, 32, 16), dtype=torch.float16)
    for lengths in ((32,), (5, 27), (16, 16)):
        assert_right(tensors, lengths, causal=True)
        plain = ours(tensors, borders(*lengths), causal=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            watched = ours(tensors, borders(*lengths), causal=True)
        assert "stepscope::flash_attention_backward" in {event.key for event in profile.key_averages()}
        assert all(torch.equal(plain[name], watched[name]) for name in plain)


@in_the_interpreter_long
def test_the_operators_keep_the_rules_of_torch_library():
    q, k, v, gradient = inputs(q_shape=(1, 2, 6, 16), k_shape=(1, 1, 6, 16))
    bounds = document_bounds(borders(2, 4), 1, 6)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(torch.ops.stepscope.flash_attention_forward.default, (*leaves, True, 0.25, None, bounds))
    detached = [t.detach() for t in leaves]
    out, logsumexp = torch.ops.stepscope.flash_attention_forward(*detached, True, 0.25, None, bounds)
    torch.library.opcheck(
        torch.ops.stepscope.flash_attention_backward.default,
        (gradient, None, *detached, out, logsumexp, True, 0.25, None, bounds),
    )


def test_compile_breaks_no_graph():
    q, k, v, _ = inputs(q_shape=(1, 2, 20, 16))

    def attend(q: Tensor, cu_seqlens: Tensor) -> Tensor:
        return flash_attention(q * 2, k, v, causal=True, cu_seqlens=cu_seqlens)

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for lengths in ((9, 11), (12, 8)):
        assert torch.equal(compiled(q, borders(*lengths)), attend(q, borders(*lengths)))


@in_the_interpreter_long
def test_per_sample_gradients():
    """vmap folds the samples into the batch, and their documents with them."""
    q, k, v, _ = inputs(q_shape=(3, 2, 20, 16))
    packed = borders(9, 11)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q[None], k[None], v[None], causal=True, cu_seqlens=packed).square().sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for sample in range(3):
        leaves = [t[sample].clone().requires_grad_() for t in (q, k, v)]
        expected = torch.autograd.grad(loss(leaves[0], leaves[1], leaves[2]), leaves)
        for got, true in zip(found, expected, strict=True):
            torch.testing.assert_close(got[sample], true)


def test_hopper_kernels_take_limits_of_self_attention_alone(monkeypatch: pytest.MonkeyPatch):
    """Other calls go to the kernels in Triton, which every configuration has too."""
    monkeypatch.setattr(flash_launch, "_hopper", lambda: SimpleNamespace(takes=lambda *_: True))
    q, longer = torch.zeros(1, 1, 16, 64), torch.zeros(1, 1, 24, 64)
    for keys, limited, taken in ((q, True, True), (longer, True, False), (longer, False, True)):
        assert flash_launch.hopper_takes(q, keys, keys, limited=limited) == taken
    both = tiles(16, 16, 4, 1)
    backward = BackwardConfiguration(keys=both, queries=both, hopper=HopperBackward())
    statistics = flash_launch.statistics_for(q, backward)
    sloped = flash_launch.sums_for(backward, statistics, q, q, q, q, causal=True, limited=False, in_triton=True)
    assert sloped is None


# ---- bounds, and what is wrong


def test_bounds_by_hand():
    """Two rows of five: documents of 2, 0 and 4 tokens, whose last ends in the second row, then one of 4."""
    assert document_bounds(borders(2, 0, 4, 4, device="cpu"), 2, 5).tolist() == [
        [[0, 0, 2, 2, 2], [0, 1, 1, 1, 1]],
        [[2, 2, 5, 5, 5], [1, 5, 5, 5, 5]],
    ]


@pytest.mark.parametrize(
    ("cu_seqlens", "says"),
    [
        (torch.tensor([0, 4, 2, 8], dtype=torch.int32), r"decreases from 4 to 2: give the borders in their order"),
        (torch.tensor([0, 4, 7], dtype=torch.int32), r"goes from 0 to 7, and the batch has 8 tokens: .* end with 8"),
        (torch.tensor([1, 8], dtype=torch.int32), r"goes from 1 to 8, and the batch has 8 tokens: begin with 0"),
        (torch.tensor([0, 4, 8]), r"int32 of shape \(documents \+ 1,\), not int64 \(3,\)"),
        (torch.tensor([0.0, 8.0]), r"int32 of shape .*, not float32 \(2,\)"),
        (torch.tensor([[0, 8]], dtype=torch.int32), r"not int32 \(1, 2\)"),
        (torch.tensor([8], dtype=torch.int32), r"not int32 \(1,\): give the borders of one document or more"),
    ],
)
def test_wrong_borders_are_one_clear_error(cu_seqlens: Tensor, says: str):
    with pytest.raises(InputError, match=says) as failure:
        document_bounds(cu_seqlens, 1, 8)
    assert "\n" not in str(failure.value) and "cu_seqlens" in str(failure.value)
    with pytest.raises(InputError, match=says):
        check_cu_seqlens(cu_seqlens.to(DEVICE), 8)


def test_what_does_not_fit_the_queries_is_one_clear_error():
    q, k, v, _ = inputs(q_shape=(1, 1, 8, 16), k_shape=(1, 1, 9, 16))
    with pytest.raises(InputError, match="documents are of self-attention: 8 queries and 9 keys"):
        flash_attention(q, k, v, causal=True, cu_seqlens=borders(8))
    with pytest.raises(InputError, match=r"cu_seqlens lies on meta, and the queries on .*: move it there"):
        flash_attention(q, q, q, causal=True, cu_seqlens=borders(8, device="cpu").to("meta"))
    for wrong in (document_bounds(borders(9), 1, 9), document_bounds(borders(8), 1, 8).long()):
        with pytest.raises(InputError, match=r"bounds of documents are int32 \(2, 1, 8\), not .*document_bounds"):
            flash_attention(q, q, q, causal=True, bounds=wrong)


@pytest.mark.parametrize("wrong", [[0, 4, 2, 8], [3, 5], [-7, 900], [0, 0]])
def test_borders_that_nobody_checked_lead_out_of_no_row(wrong: list[int]):
    """As on a GPU, where nobody reads them. Inside a transformation nobody does either."""
    unread = torch.func.functionalize(lambda of: document_bounds(of, 2, 4))(torch.tensor(wrong, dtype=torch.int32))
    assert 0 <= int(unread.min()) <= int(unread.max()) <= 4


# ---- the gate


@pytest.mark.parametrize("dtype", ["fp32", *in_the_interpreter_at_length("bf16", "fp16")])
def test_the_gate_passes_documents(dtype: Any):
    shapes = packed_shapes()[3:4] if DEVICE == "cpu" else packed_shapes()
    report = check_attention_implementation("flash", device=torch.device(DEVICE), dtypes=(dtype,), shapes=shapes)
    report.require()
    assert {verdict.outcome for verdict in report.verdicts} == {"passed"}
