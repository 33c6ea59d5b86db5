"""The fused parts against float64: on a GPU, or without one in Triton's interpreter (conftest.py)."""

import functools
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from stepscope.core import parts as records
from stepscope.core.errors import InputError
from stepscope.core.parts import TensorDtype
from stepscope.kernels.operators import HERE
from stepscope.kernels.parts import loss as of_loss
from stepscope.kernels.parts import rope as of_rope
from stepscope.kernels.parts.loss import linear_cross_entropy
from stepscope.kernels.parts.mlp import biased_gelu, silu_product
from stepscope.kernels.parts.norm import layer_norm, rms_norm
from stepscope.kernels.parts.rope import rotated
from stepscope.training.parts.gate import LARGE_CASES, SMALL_CASES, PartCase, check_part
from tests.conftest import in_the_interpreter_at_length

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
    ),
]


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", *in_the_interpreter_at_length("fp16")])
@pytest.mark.parametrize("case", SMALL_CASES, ids=str)
def test_a_part_passes_the_gate(case: PartCase, dtype: TensorDtype):
    (verdict,) = check_part("fused", [case], [dtype], DEVICE)
    assert verdict.passed, verdict.reason


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_a_part_passes_the_gate_at_the_sizes_of_models(case: PartCase, dtype: TensorDtype):
    (verdict,) = check_part("fused", [case], [dtype], DEVICE)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(1, 5), (3, 7, 33), (70, 700), (3, 5000)])
def test_layer_norm_is_pytorchs(sizes: tuple[int, ...], dtype: torch.dtype, biased: bool):
    """The input is a view of wider rows, far from zero; the gradients of weight and bias are sums over several
    programs. With the sum before it, and the gradient that comes by that, the operators give what the pieces give."""
    wide, weight, bias = (
        normal(*sizes[:-1], sizes[-1] + 8, dtype=dtype),
        *(normal(sizes[-1], dtype=dtype, seed=i) for i in (1, 2)),
    )
    wide.data += 3.0
    dy, dtotal = (normal(*sizes, dtype=dtype, seed=i).detach() for i in (3, 4))
    x, parameters = wide[..., 8:], [weight, bias] if biased else [weight]

    def results(leaves: list[Tensor], *, formula: bool) -> list[Tensor]:
        x, weight, *rest = leaves
        bias = rest[0] if rest else None
        out = F.layer_norm(x, sizes[-1:], weight, bias) if formula else layer_norm(x, weight, bias, 1e-5)
        return [out.detach(), *torch.autograd.grad(out, leaves, dy.to(out.dtype))]

    exact = results([each.detach().double().requires_grad_() for each in (x, *parameters)], formula=True)
    unit = torch.finfo(dtype).eps / 2 * (2 if DEVICE.type == "cpu" else 1)  # the interpreter cuts bf16 off
    found = results([x, *parameters], formula=False)
    for ours, right in zip(found, exact, strict=True):
        assert ours.dtype == dtype and float((ours - right).norm()) <= 6 * unit * max(float(right.norm()), 1.0)
    branch = normal(*sizes, dtype=dtype, seed=5).detach()
    y, total, means, roots = torch.ops.stepscope.layer_norm_forward(
        x, branch, weight, bias if biased else None, 1e-5, dtype
    )
    alone = layer_norm(total, weight, bias if biased else None, 1e-5)
    # A GPU's threads have other numbers of a view of wider rows than of the sum, and add them in another order.
    tolerance = 0.0 if DEVICE.type == "cpu" else 4 * unit
    torch.testing.assert_close(y, alone, rtol=tolerance, atol=tolerance)
    assert float((total - (x.double() + branch.double())).norm()) <= 2 * unit * float(total.double().norm())
    apart = torch.ops.stepscope.layer_norm_backward(dy, None, total, weight, means, roots, dtype, biased)
    summed = torch.ops.stepscope.layer_norm_backward(dy, dtotal, total, weight, means, roots, dtype, biased)
    assert torch.equal(apart[1], summed[1])
    added = torch.ops.stepscope.layer_norm_backward(dy + branch, None, total, weight, means, roots, dtype, biased)
    given = torch.ops.stepscope.layer_norm_backward(dy, None, total, weight, means, roots, dtype, biased, branch)
    tolerance = 6 * unit if dtype == torch.bfloat16 and DEVICE.type == "cpu" else 0.0
    for ours, right in zip(given, added, strict=True):
        assert float((ours - right).double().norm()) <= tolerance * float(right.double().norm())
    assert float((summed[0] - apart[0] - dtotal).double().norm()) <= 6 * unit * float(summed[0].double().norm())


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(3, 37), (2, 21, 300)])
def test_gelu_of_a_linear_layer_is_pytorchs(sizes: tuple[int, ...], dtype: torch.dtype, tanh: bool):
    """The input is a view of wider rows, with large numbers among them; the bias's gradient is a sum over chunks."""
    wide, bias = normal(*sizes[:-1], sizes[-1] + 8, dtype=dtype), normal(sizes[-1], dtype=dtype)
    wide.data[0] *= 5
    upstream = normal(*sizes, dtype=dtype, seed=1).detach()
    h = wide[..., 8:]

    def results(h: Tensor, bias: Tensor, *, formula: bool) -> list[Tensor]:
        out = F.gelu(h + bias, approximate="tanh" if tanh else "none") if formula else biased_gelu(h, bias, tanh=tanh)
        return [out, *torch.autograd.grad(out, [h, bias], upstream.to(h.dtype))]

    exact = results(h.detach().double().requires_grad_(), bias.detach().double().requires_grad_(), formula=True)
    unit = torch.finfo(dtype).eps / 2 * (2 if DEVICE.type == "cpu" else 1)  # the interpreter cuts bf16 off
    for found, right in zip(results(h, bias, formula=False), exact, strict=True):
        # The constants of the formula with tanh have 16 digits, and not what rounds to them.
        assert found.dtype == dtype and float((found - right).norm() / right.norm()) < max(2 * unit, 1e-15)
    frozen = biased_gelu(h.detach().requires_grad_(), bias.detach(), tanh=tanh)
    assert torch.equal(frozen, biased_gelu(h, bias, tanh=tanh)) and frozen.requires_grad


def test_gelu_takes_any_number_of_rows(monkeypatch: pytest.MonkeyPatch):
    """A GPU takes 65,535 programs in a grid's second dimension, and any number in its first."""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(HERE, "watcher", lambda _compiled, grid, _arguments: grids.append(grid))
    torch.ops.stepscope.biased_gelu_forward(normal(600, 300).detach(), None, False)
    assert [math.prod(grid[1:]) for grid in grids] == [1]


@pytest.mark.parametrize("value", [123456.7, -0.3, 1e-3])
def test_layer_norm_of_equal_numbers_is_its_bias(value: float):
    x = torch.full((3, 700), value, device=DEVICE)
    weight, bias = torch.ones(700, device=DEVICE), torch.linspace(-1, 1, 700, device=DEVICE)
    for width in (700, 333):
        found = layer_norm(x[:, :width], weight[:width], bias[:width], 1e-5)
        torch.testing.assert_close(found, bias[:width].expand(3, -1), rtol=0, atol=1e-4)


def test_gelu_of_16_bits_is_near_itself_far_from_zero():
    """Each number within 5e-6 of itself before it is rounded, where PyTorch's own rounds the error function."""
    x = torch.linspace(-13, 13, 2601, device=DEVICE).to(torch.float16)
    right = x.double() * 0.5 * torch.special.erfc(-x.double() / 2**0.5)
    seen = right.abs() > 2**-13  # below, fp16 has fewer bits
    assert float(((biased_gelu(x) - right) / right)[seen].abs().max()) < 2**-11 + 1e-5


def test_the_gate_sees_what_is_wrong():
    def forgets(gate: Tensor, up: Tensor) -> Tensor:
        out = silu_product(gate, up)
        return torch.cat([out[:-1], torch.full_like(out[-1:], float("nan"))])

    def overwrites(gate: Tensor, up: Tensor) -> Tensor:
        gate.data.mul_(0.5)
        return silu_product(gate, up)

    def of_another_dtype(gate: Tensor, up: Tensor) -> Tensor:
        return (F.silu(gate) * up).double()

    def a_little_off(gate: Tensor, up: Tensor) -> Tensor:
        return silu_product(gate, up) * 1.0001

    case = PartCase("mlp", (3, 8))
    said = {
        wrong.__name__: check_part("fused", [case], ["fp32"], DEVICE, wrong)[0].reason
        for wrong in (forgets, overwrites, of_another_dtype, a_little_off)
    }
    assert "off by nan" in said["forgets"] and said["overwrites"] == "it writes to its inputs"
    assert "in torch.float64, not" in said["of_another_dtype"] and "is off by" in said["a_little_off"]


def test_gradients_are_those_of_finite_differences():
    x, branch, weight = normal(2, 5), normal(2, 5, seed=1), normal(5)
    q, k = normal(1, 2, 2, 4), normal(1, 2, 1, 4)
    angles = torch.linspace(0, 6, 4, dtype=torch.float64, device=DEVICE).reshape(2, 2).repeat(1, 2)
    targets = torch.tensor([1, -100, 6], device=DEVICE)

    def check(function: Any, *inputs: Tensor) -> None:
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)

    check(lambda x, weight: rms_norm(x, None, weight, 1e-5)[1], x, weight)
    check(lambda x, branch, weight: rms_norm(x, branch, weight, 1e-5), x, branch, weight)
    check(lambda q, k: rotated(q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin()), q, k)
    # Any tables: of each sequence, of a part of the width, and with halves of their own.
    for cos, sin in ((normal(2, 3, 4), normal(2, 3, 4, seed=1)), (normal(1, 3, 2), normal(1, 3, 2, seed=1))):
        check(functools.partial(rotated, cos=cos.detach(), sin=sin.detach()), normal(2, 2, 3, 4), normal(2, 1, 3, 4))
    check(silu_product, normal(2, 7), normal(2, 7, seed=1))
    check(lambda x, weight: linear_cross_entropy(x, weight, targets, z_loss=0.1), normal(3, 5), normal(7, 5))


def test_the_loss_is_pytorchs_in_chunks_scaled_and_with_a_z_loss(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "LOSS_CHUNK_BYTES", 0)
    monkeypatch.setattr(records, "LOSS_LEAST_ROWS", 2)
    x, weight = normal(5, 6), normal(11, 6)
    targets = torch.tensor([3, 0, -100, 10, 10], device=DEVICE)
    logits = x @ weight.t()
    kept = targets != -100
    right = F.cross_entropy(logits, targets) + 0.1 * logits.logsumexp(-1)[kept].square().mean()
    ours = linear_cross_entropy(x, weight, targets, z_loss=0.1)
    torch.testing.assert_close(ours, right, rtol=1e-12, atol=0)  # 0.1 in fp32 is off by 1.5e-8 of it
    found, known = (torch.autograd.grad(65536 * loss, [x, weight]) for loss in (ours, right))
    torch.testing.assert_close(found, known, rtol=1e-12, atol=1e-9)


def test_a_loss_without_any_target_is_as_pytorchs():
    x, weight = normal(2, 4), normal(5, 4)
    ignored = torch.full((2,), -100, device=DEVICE)
    loss = linear_cross_entropy(x, weight, ignored)
    assert loss.isnan()
    assert all(gradient.eq(0).all() for gradient in torch.autograd.grad(loss, [x, weight]))


def targets_of(rows: int, vocabulary: int, labels: int) -> Tensor:
    """Random targets, of which so many are no -100."""
    generator = torch.Generator().manual_seed(labels)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[torch.randperm(rows, generator=generator)[: rows - labels]] = -100
    return targets.to(DEVICE)


def loss_and_gradients(function: Any, leaves: list[Tensor], targets: Tensor) -> list[Tensor]:
    x, weight, *bias = leaves
    loss = 3 * function(x, weight, targets, *bias)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def dense(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias), targets)


def few(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_cross_entropy(x, weight, targets, bias, few_labels=True)


@pytest.mark.parametrize("labels", [0, 1, 4, 9])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("function", [linear_cross_entropy, few])
def test_a_bias_and_rows_without_labels(
    function: Any, chunked: bool, biased: bool, labels: int, monkeypatch: pytest.MonkeyPatch
):
    if chunked:
        for name, value in (("LOSS_CHUNK_BYTES", 0), ("FEW_LABELS_CHUNK_BYTES", 0), ("LOSS_LEAST_ROWS", 2)):
            monkeypatch.setattr(records, name, value)
    leaves = [normal(9, 8), normal(11, 8), *([normal(11)] if biased else [])]
    targets = targets_of(9, 11, labels)
    found, right = (loss_and_gradients(each, leaves, targets) for each in (function, dense))
    if not labels:  # PyTorch's gradients are NaN, too; ours are zero, as where some rows have labels
        right = [right[0], *map(torch.zeros_like, leaves)]
    torch.testing.assert_close(found, right, equal_nan=True)


def is_near(ours: list[Tensor], theirs: list[Tensor], right: list[Tensor]) -> None:
    """Check that results are at most twice as far off as PyTorch's, or by roundings of logits and result to bf16."""
    for our, their, each in zip(ours, theirs, right, strict=True):
        error, other = (float((one.double() - each).norm() / each.norm()) for one in (our, their))
        assert error <= max(2 * other, 2**-7), (error, other)


@pytest.mark.parametrize("labels", [0, 1, 4, 9])
@pytest.mark.parametrize("chunked", [True, False])
def test_products_stop_at_the_last_row_with_a_label(chunked: bool, labels: int, monkeypatch: pytest.MonkeyPatch):
    """On Hopper by its own kernel, elsewhere by PyTorch's slow way: rows behind it hold what the memory held."""
    monkeypatch.setattr(of_loss, "takes_groups", lambda _: True)
    if chunked:
        for name, value in (("LOSS_CHUNK_BYTES", 0), ("FEW_LABELS_CHUNK_BYTES", 0), ("LOSS_LEAST_ROWS", 2)):
            monkeypatch.setattr(records, name, value)
    leaves = [normal(*shape, dtype=torch.bfloat16) for shape in ((9, 8), (11, 8), (11,))]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    targets = targets_of(9, 11, labels)
    found = loss_and_gradients(few, leaves, targets)
    if not labels:
        assert found[0].isnan() and all(each.eq(0).all() for each in found[1:])
        return
    is_near(found, loss_and_gradients(dense, leaves, targets), loss_and_gradients(dense, exact, targets))


@pytest.mark.parametrize(
    ("dtype", "function", "bound"),
    [
        (torch.float64, linear_cross_entropy, 1e-13),
        (torch.float32, linear_cross_entropy, 2**-14),
        (torch.bfloat16, linear_cross_entropy, 2**-6),
        (torch.bfloat16, few, 2**-6),
    ],
)
@pytest.mark.parametrize("vocabulary", [16_384, 50_257])
def test_rows_of_many_blocks(
    vocabulary: int, dtype: torch.dtype, function: Any, bound: float, monkeypatch: pytest.MonkeyPatch
):
    """Targets at both ends of a row, in blocks that stay in registers, and in others; with pieces, too."""
    monkeypatch.setattr(of_loss, "takes_groups", lambda _: True)
    monkeypatch.setattr(of_loss, "_LENGTHENED", (256, 8))  # else a head of 8 columns has 12,576 programs
    leaves = [normal(6, 8, dtype=dtype), normal(vocabulary, 8, dtype=dtype)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    targets = torch.tensor([0, vocabulary - 1, -100, 7_000, vocabulary // 2, vocabulary - 2_000], device=DEVICE)
    found = loss_and_gradients(function, leaves, targets)
    for each, right in zip(found, loss_and_gradients(dense, exact, targets), strict=True):
        assert float((each.double() - right).norm()) <= bound * float(right.norm())


@pytest.mark.parametrize("tokens", [1, 8, 40, 300])
@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_s_gradient_is_added_to_the_rows_of_its_tokens(dtype: torch.dtype, padding: int, tokens: int):
    """Each row is rounded once, and the same bits come twice. In the interpreter rounding is towards zero."""
    generator = torch.Generator().manual_seed(tokens)
    numbers = (5 * torch.rand(tokens, generator=generator) ** 3).long().to(DEVICE)
    table, rows = normal(7, 70, dtype=dtype).detach(), normal(tokens, 70, dtype=dtype, seed=1).detach()
    right = table.double().index_add(0, numbers, rows.double() * (numbers != padding)[:, None])
    found = [table.clone(), table.clone()]
    for each in found:
        of_loss._add_embedded(each, numbers.view(1, -1), rows, padding)  # pyright: ignore[reportPrivateUsage]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0][5:], table[5:])
    bound = (2**-7 if DEVICE.type == "cpu" else 2**-8) if dtype == torch.bfloat16 else 2**-18
    assert ((found[0].double() - right).abs() <= bound * right.abs() + 1e-5).all()


@pytest.mark.parametrize(("vocabulary", "width", "biased"), [(11, 8, False), (16, 1030, True), (70, 24, True)])
def test_a_head_gets_rows_and_columns_of_zeros_and_its_bias(vocabulary: int, width: int, biased: bool):
    """From rows that lie apart, and rounded; 64 divides the rows there are then, and rows begin at 16 bytes."""
    weight = normal(vocabulary, width + 3, dtype=torch.float32)[:, :width]
    bias = normal(vocabulary, dtype=torch.float32) if biased else None
    found = of_loss._aligned(weight, bias, torch.float16)
    rows, columns = found.shape
    assert found.dtype == torch.float16 and rows % 16 == 0 and rows >= vocabulary
    assert columns == (width + 8 if biased else width)
    known = torch.zeros(rows, columns, dtype=torch.float16, device=DEVICE)
    known[:vocabulary, :width] = weight.half()
    if bias is not None:
        known[:vocabulary, width] = bias.half()
    assert torch.equal(found, known)


@pytest.mark.parametrize("vocabulary", [16, 11])
def test_backward_makes_the_gradient_of_a_head_in_bf16(vocabulary: int):
    """Where rows are one chunk: nothing of the head's size is kept, and a second backward gives the same bits."""
    leaves = [normal(*shape, dtype=torch.bfloat16) for shape in ((9, 8), (vocabulary, 8))]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    targets, kept = targets_of(9, 11, 7), list[torch.Size]()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.shape) or each, lambda each: each):
        loss = 3 * linear_cross_entropy(leaves[0], leaves[1], targets)
    assert (vocabulary, 8) not in kept
    first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second)) and first[1].shape == (vocabulary, 8)
    right = loss_and_gradients(dense, exact, targets)
    is_near([loss.detach(), *first], loss_and_gradients(dense, leaves, targets), right)
    for frozen in range(2):
        some = [each.detach().requires_grad_(place != frozen) for place, each in enumerate(leaves)]
        (alone,) = torch.autograd.grad(3 * linear_cross_entropy(some[0], some[1], targets), some[1 - frozen])
        assert torch.equal(alone, first[1 - frozen])
    with FlopCounterMode(display=False) as counted:
        linear_cross_entropy(leaves[0], leaves[1], targets).backward()
    assert counted.get_total_flops() >= 6 * 9 * vocabulary * 8


@pytest.mark.gpu
def test_one_graph_serves_batches_with_any_number_of_labels():
    rows, vocabulary, width = 3000, 30522, 768
    leaves = [
        (normal(*shape, dtype=torch.bfloat16).detach() * size).requires_grad_()
        for shape, size in (((rows, width), 1.0), ((vocabulary, width), 0.02), ((vocabulary,), 1.0))
    ]
    place = targets_of(rows, vocabulary, 450)
    loss_and_gradients(few, leaves, place)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = loss_and_gradients(few, leaves, place)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    for labels in (450, 1, 0, rows, 449, 0, 700):
        place.copy_(targets_of(rows, vocabulary, labels))
        graph.replay()
        if not labels:
            assert found[0].isnan() and all(each.eq(0).all() for each in found[1:])
            continue
        is_near(found, loss_and_gradients(dense, leaves, place), loss_and_gradients(dense, exact, place))


@pytest.mark.gpu
@pytest.mark.parametrize("target", [5, -1, -100])
def test_a_gpu_asserts_that_targets_are_tokens(target: int):
    """In a process of its own, which the assertion ends."""
    code = (
        "import torch; from stepscope.kernels.parts.loss import linear_cross_entropy as loss; "
        "x, w = (torch.randn(n, 4, device='cuda', requires_grad=True) for n in (2, 5)); "
        f"loss(x, w, torch.tensor([1, {target}], device='cuda')).backward(); torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    asserted = "Target is out of bounds" in done.stderr  # What the next call then raises differs: cuBLAS has its own.
    assert asserted == (done.returncode != 0) == (target != -100), done.stderr[-2000:]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU's assertion ends the process: the test before this one")
@pytest.mark.parametrize("ignored", [-100, 6, -1])
def test_a_target_is_held_against_the_tokens_and_the_label_that_is_left_out(ignored: int):
    """As PyTorch has it: any number may be left out, one beyond the vocabulary too."""
    x, weight = normal(3, 4), normal(5, 4)
    for third in (4, 5, -1, 6, -100):
        targets = torch.tensor([0, ignored, third])
        try:
            right: Any = F.cross_entropy(x @ weight.t(), targets, ignore_index=ignored)
        except IndexError as error:
            with pytest.raises(IndexError, match=str(error)):
                linear_cross_entropy(x, weight, targets, ignore_index=ignored)
            continue
        torch.testing.assert_close(linear_cross_entropy(x, weight, targets, ignore_index=ignored), right)


def test_fp16_keeps_gradients_that_a_mean_over_many_rows_would_lose():
    """1 / 4096 of a probability of 1e-5 is below fp16's smallest number; the loss scale comes after forward."""
    rows, vocabulary = 4096 if DEVICE.type == "cuda" else 8, 64
    x, weight = normal(rows, 8, dtype=torch.float16), normal(vocabulary, 8, dtype=torch.float16)
    targets = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    exact = torch.autograd.grad(65536 * F.cross_entropy(x.double() @ weight.double().t(), targets), weight)[0]
    ours = torch.autograd.grad(65536 * linear_cross_entropy(x, weight, targets), weight)[0]
    assert (ours.double() - exact).norm() <= 4e-3 * exact.norm()


def test_without_gradients_the_loss_makes_none():
    x, weight = normal(3, 4), normal(5, 4)
    targets = torch.tensor([0, 1, 4], device=DEVICE)
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, targets).requires_grad
    (of_x,) = torch.autograd.grad(linear_cross_entropy(x, weight.detach(), targets), [x])
    torch.testing.assert_close(of_x, torch.autograd.grad(F.cross_entropy(x @ weight.t(), targets), [x])[0])


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
def test_tensors_without_rows(shape: tuple[int, ...]):
    x, weight = normal(*shape), normal(4)
    summed, out = rms_norm(x, x * 2, weight, 1e-5)
    assert summed.shape == out.shape == shape
    mlps = silu_product(x, x).sum() + biased_gelu(x, weight).sum() + layer_norm(x, weight, weight, 1e-5).sum()
    gradients = torch.autograd.grad((out.sum() + summed.sum() + mlps), [x, weight])
    assert gradients[0].shape == shape and gradients[1].eq(0).all()
    q = normal(0, 2, 3, 4)
    assert rotated(q, q, torch.ones(3, 4, device=DEVICE), torch.ones(3, 4, device=DEVICE))[0].shape == q.shape


def test_under_autocast_outputs_have_its_dtype_and_gradients_their_inputs():
    x, weight, branch = normal(3, 8, dtype=torch.float32), normal(8, dtype=torch.float32), normal(3, 8).bfloat16()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        summed, out = rms_norm(x, branch, weight, 1e-5)
        loss = linear_cross_entropy(
            out, normal(9, 8, dtype=torch.float32), torch.zeros(3, dtype=torch.int64).to(DEVICE)
        )
    assert (summed.dtype, out.dtype, loss.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    gradients = torch.autograd.grad(loss + summed.sum(), [x, branch, weight])
    assert [g.dtype for g in gradients] == [torch.float32, torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: rms_norm(normal(2, 4), None, normal(5), 1e-5), r"norm fused takes x .* not \(2, 4\), None, \(5,"),
        (lambda: rms_norm(normal(2, 4), normal(4), normal(4), 1e-5), "norm fused takes"),
        (lambda: rotated(normal(1, 2, 3, 5), normal(1, 2, 3, 5), *[normal(3, 5)] * 2), "with an even D up to 1024"),
        (lambda: rotated(normal(1, 2, 3, 4), normal(1, 2, 3, 4), *[normal(2, 4)] * 2), r"tables \(S or more, D\)"),
        (lambda: rotated(*[normal(2, 2, 3, 4)] * 2, *[normal(3, 3, 4)] * 2), r"tables \(S or more, D\), or"),
        (lambda: silu_product(normal(2, 4), normal(2, 5)), "mlp fused takes gate and up"),
        (lambda: silu_product(normal(2).int(), normal(2).int()), "mlp fused takes fp32, bf16, fp16 or fp64, not int32"),
        (lambda: layer_norm(normal(2, 4), normal(4), normal(5), 1e-5), r"norm fused takes x .* and a bias \(M\)"),
        (lambda: biased_gelu(normal(2, 4), normal(5)), r"mlp fused takes h \(..., F\) and a bias \(F\), not"),
        (lambda: linear_cross_entropy(normal(2, 4), normal(5, 4), torch.zeros(3)), "loss fused takes x"),
        (lambda: linear_cross_entropy(normal(2, 4), normal(5, 4), torch.zeros(2).to(DEVICE)), "targets of int64 or"),
    ],
)  # fmt: skip
def test_what_a_part_does_not_take_is_one_line_that_names_it(call: Any, says: str):
    with pytest.raises(InputError, match=says) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_a_second_derivative_is_refused():
    x = normal(2, 4)
    (gradient,) = torch.autograd.grad(silu_product(x, x * 2).sum(), x, create_graph=False)
    assert gradient.shape == x.shape
    with pytest.raises(NotImplementedError, match="mlp fused has no second derivative"):
        torch.autograd.grad(silu_product(x, x * 2).sum(), x, create_graph=True)


def test_a_compiler_takes_every_part_without_a_graph_break():
    x, weight, head = normal(2, 3, 8), normal(8), normal(9, 8)
    cos, sin = normal(3, 4).detach(), normal(3, 4, seed=1).detach()
    targets = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    targets[0, 1] = -100

    def all_parts(x: Tensor, weight: Tensor, head: Tensor) -> Tensor:
        summed, out = rms_norm(x, x * 2, weight, 1e-5)
        heads = out.unflatten(-1, (2, 4)).transpose(1, 2)
        q, k = rotated(heads, heads * 2, cos, sin)
        mixed = silu_product(q, k).transpose(1, 2).flatten(-2) + rms_norm(summed, None, weight, 1e-5)[1]
        mixed = mixed + biased_gelu(mixed, weight) + biased_gelu(mixed, tanh=True)
        mixed = mixed + layer_norm(mixed, weight, weight * 2, 1e-5) + layer_norm(mixed, weight, None, 1e-5)
        of_few = linear_cross_entropy(summed, head, targets, head.sum(1), few_labels=True)
        return linear_cross_entropy(mixed, head, targets) + of_few

    right = torch.autograd.grad(all_parts(x, weight, head), [x, weight, head])
    compiled = torch.compile(all_parts, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x, weight, head), [x, weight, head]), right)


def test_a_compiler_takes_a_norm_whose_epsilon_is_a_symbol():
    x, weight = normal(2, 8), normal(8)
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager", dynamic=True)
    for epsilon in (1e-5, 1e-3):
        torch.testing.assert_close(compiled(x, None, weight, epsilon), rms_norm(x, None, weight, epsilon))


@given(st.data())
@settings(max_examples=20 if DEVICE.type == "cpu" else 5)  # a GPU compiles a kernel for each
def test_heads_of_any_number_width_and_length_turn_as_written_out(data: st.DataObject):
    """Tables are one for all sequences or one of each, and of the width or of a part of it. Tiles are of any size: they
    go over the borders of sequences, and the last has tokens and heads that are none."""
    batches, positions, q_heads, k_heads, half, rest = (
        data.draw(st.integers(least, most)) for least, most in ((1, 3), (1, 9), (1, 7), (1, 3), (1, 9), (0, 5))
    )
    width = 2 * (half + rest)
    rows = normal(batches, positions, (q_heads + 2 * k_heads) * width)
    heads = rows.unflatten(-1, (-1, width)).transpose(1, 2)
    q, k, _ = heads.split([q_heads, k_heads, k_heads], dim=1)
    tables = (data.draw(st.sampled_from([1, batches])), positions + data.draw(st.integers(0, 2)), 2 * half)
    cos, sin = (normal(*tables, seed=seed).detach() for seed in (1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_rope, "_NUMBERS", data.draw(st.sampled_from([16, 64, of_rope._NUMBERS])))
        patch.setattr(of_rope, "_TOGETHER", data.draw(st.sampled_from([1, 2, of_rope._TOGETHER])))
        found = rotated(q, k, cos, sin)
        right = turned(q, cos, sin), turned(k, cos, sin)
        torch.testing.assert_close(found, right)
        upstream = [torch.randn_like(each) for each in right]
        torch.testing.assert_close(
            torch.autograd.grad(found, rows, upstream), torch.autograd.grad(right, rows, upstream)
        )


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads whose first numbers, as many as tables (1 or B, S or more, R) have, are turned as models write it."""
    cos, sin, rotary = cos[:, None, : x.shape[2]], sin[:, None, : x.shape[2]], cos.shape[-1]
    first, second = x[..., :rotary].chunk(2, dim=-1)
    both = x[..., :rotary] * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([both, x[..., rotary:]], -1)


def test_gradients_of_halves_of_the_same_rows_are_halves_of_the_same_rows():
    both = normal(3, 2, 10, dtype=torch.float32)
    gate, up = both.tensor_split(2, dim=-1)
    (found,) = torch.autograd.grad(silu_product(gate, up).square().sum(), both)
    (right,) = torch.autograd.grad((F.silu(gate) * up).square().sum(), both)
    torch.testing.assert_close(found, right)
    gate, up = (each.detach().requires_grad_() for each in (gate, up))
    of_gate, of_up = torch.autograd.grad(silu_product(gate, up).sum(), (gate, up))
    assert of_up.data_ptr() == of_gate.data_ptr() + 5 * 4 and of_gate.stride() == (20, 10, 1)
