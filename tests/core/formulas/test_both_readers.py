"""The FLOPs of a product are the same where a step is counted while it runs and where its trace is read, and are those
that one counts by hand."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from stepscope.core.formulas.operator_rules import is_product
from stepscope.recording.flops import FlopCounts
from stepscope.recording.step import Phase, drive
from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.roofline import roofline


class _Step:
    """A step of one phase that runs a function."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.phases = (Phase(name="forward", run=run),)  # type: ignore[arg-type]

    def prepare(self) -> None: ...


def while_it_runs(run: Callable[[], object]) -> int:
    counts = FlopCounts()
    with counts.running():
        drive(_Step(run), counts)  # type: ignore[arg-type]
    assert not counts.unknown
    return counts.work["forward"].flops


def of_its_trace(run: Callable[[], object], folder: Path, *, causal: str = "half") -> int:
    run()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    found = roofline(attribute(read_trace(path)), causal=causal)  # type: ignore[arg-type]
    return sum(each.flops or 0 for each in found.operators if is_product(each.operator))


# Rank, channels, filters, side, window, stride, padding, dilation, groups, transposed.
CONVOLUTIONS = {
    "1 dimension": (1, 6, 8, 20, 3, 1, 1, 1, 1, False),
    "strided": (2, 6, 8, 15, 3, 2, 1, 1, 1, False),
    "dilated": (2, 6, 8, 15, 3, 1, 2, 2, 1, False),
    "grouped": (2, 6, 9, 12, 3, 1, 1, 1, 3, False),
    "depthwise": (2, 8, 8, 12, 3, 1, 1, 1, 8, False),
    "depthwise, twice as many": (2, 8, 16, 12, 5, 2, 2, 1, 8, False),
    "3 dimensions": (3, 4, 6, 8, 3, 1, 1, 1, 1, False),
    "dilated, 3 dimensions": (3, 4, 6, 9, 3, 1, 0, 2, 1, False),
    "transposed": (2, 6, 8, 7, 3, 2, 1, 1, 1, True),
    "transposed, channels alike": (2, 8, 8, 7, 2, 2, 0, 1, 1, True),
    "transposed, grouped": (2, 8, 8, 7, 4, 2, 1, 1, 4, True),
    "transposed, 1 dimension": (1, 4, 4, 9, 4, 4, 0, 1, 1, True),
    "transposed, 3 dimensions": (3, 4, 4, 5, 2, 2, 0, 1, 1, True),
}


def by_hand(name: str) -> int:
    """A multiply and an add for each place, filter, channel of its group, and element of the window.

    Forward slides the window over the output's places; a transposed convolution is the gradient of another, and slides
    it over its input's. Batch is 2.
    """
    rank, channels, filters, side, window, stride, padding, dilation, groups, transposed = CONVOLUTIONS[name]
    output = (side + 2 * padding - dilation * (window - 1) - 1) // stride + 1
    places = side if transposed else output
    if transposed:
        return 2 * 2 * places**rank * channels * (filters // groups) * window**rank
    return 2 * 2 * places**rank * filters * (channels // groups) * window**rank


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("wanted", ["forward", "weight", "both"])
def test_a_convolution_and_its_gradients(tmp_path: Path, name: str, wanted: str):
    """Each gradient, of the input and of the weight, has forward's FLOPs; one that nobody wants has none."""
    rank, channels, filters, side, window, stride, padding, dilation, groups, transposed = CONVOLUTIONS[name]
    kinds = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d] if transposed else [
        nn.Conv1d, nn.Conv2d, nn.Conv3d
    ]  # fmt: skip
    layer = kinds[rank - 1](channels, filters, window, stride=stride, padding=padding, dilation=dilation, groups=groups)
    x = torch.randn(2, channels, *[side] * rank, requires_grad=wanted == "both")

    def run() -> None:
        out = layer(x)
        if wanted != "forward":
            out.sum().backward()

    expected = by_hand(name) * {"forward": 1, "weight": 2, "both": 3}[wanted]
    assert while_it_runs(run) == expected
    assert of_its_trace(run, tmp_path) == expected


def test_gradients_of_a_convolutions_gradients(tmp_path: Path):
    """PyTorch makes them of convolutions, each of which counts: the same in both readers."""
    layer, x = nn.Conv2d(4, 4, 3, padding=1, bias=False), torch.randn(2, 4, 8, 8, requires_grad=True)

    def run() -> None:
        (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()

    once = 2 * 2 * 8 * 8 * 4 * 4 * 9
    assert while_it_runs(run) == of_its_trace(run, tmp_path) == once * 4


def grouped(a: Tensor, b: Tensor, offsets: list[int] | None = None) -> Tensor:
    bounds = torch.tensor(offsets, dtype=torch.int32) if offsets is not None else None
    return torch._grouped_mm(a, b, offs=bounds)  # pyright: ignore[reportPrivateImportUsage]


def half(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


PRODUCTS: dict[str, tuple[Callable[[], object], int]] = {
    "rows by expert": (lambda: grouped(half(24, 16), half(3, 16, 8), [8, 12, 24]), 2 * 24 * 16 * 8),
    "a product each": (lambda: grouped(half(3, 8, 16), half(3, 16, 8)), 2 * 3 * 8 * 16 * 8),
    "gradients of weights": (lambda: grouped(half(16, 24), half(24, 8), [8, 16, 24]), 2 * 16 * 24 * 8),
    "columns by expert": (lambda: grouped(half(3, 8, 16), half(16, 24), [8, 16, 24]), 2 * 8 * 16 * 24),
    "matrix by vector": (lambda: half(6, 8) @ half(8), 2 * 6 * 8),
    "addmv": (lambda: torch.addmv(half(6), half(6, 8), half(8)), 2 * 6 * 8),
    "dot": (lambda: torch.dot(half(8), half(8)), 2 * 8),
    "vdot": (lambda: torch.vdot(half(8), half(8)), 2 * 8),
    "addbmm": (lambda: torch.addbmm(half(4, 5), half(3, 4, 6), half(3, 6, 5)), 2 * 3 * 4 * 6 * 5),
    "baddbmm": (lambda: torch.baddbmm(half(3, 4, 5), half(3, 4, 6), half(3, 6, 5)), 2 * 3 * 4 * 6 * 5),
    "addr": (lambda: torch.addr(half(4, 5), half(4), half(5)), 2 * 4 * 5),
    "einsum": (lambda: torch.einsum("bij,bjk->bik", half(3, 4, 6), half(3, 6, 5)), 2 * 3 * 4 * 6 * 5),
    "linear": (lambda: F.linear(half(2, 4, 8), half(6, 8), half(6)), 2 * 8 * 8 * 6),
    # Four products and as many sums for one of complex numbers.
    "complex": (lambda: torch.ones(3, 4, dtype=torch.cfloat) @ torch.ones(4, 5, dtype=torch.cfloat), 8 * 3 * 4 * 5),
    "int8": (lambda: torch._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 24, dtype=torch.int8)),  # pyright: ignore[reportPrivateImportUsage]
             2 * 32 * 16 * 24),
    "weight in 8 bits": (
        lambda: torch._weight_int8pack_mm(half(4, 32), torch.ones(16, 32, dtype=torch.int8), half(16)),  # pyright: ignore[reportPrivateImportUsage]
        2 * 4 * 32 * 16,
    ),
    "bilinear in attention": (
        lambda: F.scaled_dot_product_attention(half(2, 4, 8, 16), half(2, 4, 8, 16), half(2, 4, 8, 16)),
        2 * 2 * 2 * 4 * 8 * 8 * 16,
    ),
    "attention of shared heads": (
        lambda: F.scaled_dot_product_attention(
            half(2, 4, 8, 16), half(2, 2, 8, 16), half(2, 2, 8, 16), is_causal=True, enable_gqa=True
        ),
        2 * 2 * 2 * 4 * 8 * 8 * 16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product(tmp_path: Path, name: str):
    """Counted whole also where it is causal, as a count while it runs has it."""
    run, expected = PRODUCTS[name]
    assert while_it_runs(run) == expected
    assert of_its_trace(run, tmp_path, causal="full") == expected


@pytest.mark.parametrize("joint", [True, False])
def test_layers_that_one_operator_runs_in_inference(tmp_path: Path, joint: bool):
    """An encoder's layer and attention with its projections: a trace shows what the operator calls, and a count does
    not. 2 sequences of 6 rows, 16 wide, and 24 between the two linear layers."""
    encoder = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True).eval()
    x = torch.randn(2, 6, 16)

    @torch.no_grad()
    def run() -> None:
        if joint:
            encoder(x)
        else:
            encoder.self_attn(x, x, x, need_weights=False)

    attention = 2 * 12 * (48 * 16 + 16 * 16) + 2 * 2 * 2 * 6 * 6 * 16
    expected = attention + (2 * 2 * 12 * 16 * 24 if joint else 0)
    assert while_it_runs(run) == of_its_trace(run, tmp_path) == expected


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_a_trace_says_whether_attention_was_causal(tmp_path: Path, causal: bool, masked: bool):
    """Forward's two products and backward's five, half of each where it is causal. A mask counts the whole square."""
    q, k, v = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3))
    mask = torch.ones(32, 32).tril().bool() if masked else None
    causal = causal and not masked

    def run() -> None:
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).sum().backward()

    square = 2 * 2 * 4 * 32 * 32 * 16
    assert of_its_trace(run, tmp_path) == 7 * square // (2 if causal else 1)
    assert math.isclose(while_it_runs(run), 7 * square)


def test_written_out_attention_counts_its_products_once(tmp_path: Path):
    """The operator that calls them is a product too, and leaves them the work."""
    q = torch.randn(1, 2, 16, 8)

    def run() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)

    assert of_its_trace(run, tmp_path) == while_it_runs(run) == 4 * 2 * 16 * 16 * 8
