"""Prices of graph breaks and recompilations, planted in a model: a break in its blocks, one outside, other shapes.

Pieces, graphs and bytes are counted; no time is asserted. The backend generates no code, so that it is quick.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils._traceback import shorten_filename

from stepscope.core.answer import Answer
from stepscope.core.samples import Samples
from stepscope.core.study_results import CompiledStep, CompilePrices, GraphBreak, PricedBreak
from stepscope.core.workloads import FactoryWorkload, UserModel
from stepscope.questions.compile_prices import answer_prices, compile_prices
from stepscope.recording.compile_prices import Pricing, place_named
from stepscope.training.user_module.loading import make_user_step, take_object
from stepscope.training.user_module.module_step import ModuleStep

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
WIDTH = 16


class Block(nn.Module):
    """A block that reads a number from the device in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).relu()
        scale = hidden.detach().abs().max().item()
        return x + hidden / (1 + scale)


class Broken(nn.Module):
    """Three such blocks, and a print outside of them that they hide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        print("blocks are done")
        return self.head(x).square().mean()


class Whole(nn.Module):
    """Nothing breaks it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).square().mean()


class Stopped(Whole):
    """A break that no setting avoids."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x).relu()
        torch._dynamo.graph_break()
        return super().forward(x)


def prices_of(kind: Callable[[], nn.Module], *rows: int, limit: int = 64) -> CompilePrices:
    """Prices of a module on batches of so many rows, counted and not timed."""

    def make() -> ModuleStep:
        torch.manual_seed(0)
        given = (kind(), [torch.randn(count, WIDTH) for count in rows])
        workload = FactoryWorkload(model=UserModel(name=""), factory="model.py:make")
        step, _ = make_user_step(workload, CPU, lambda: take_object(given, "the module"))
        assert isinstance(step, ModuleStep)
        return step

    # PyTorch 2.11 compiles the function of the blocks again for each of them, and reaches its limit of 8.
    with torch._dynamo.config.patch(recompile_limit=limit):
        pricing = Pricing(make, CPU, settings=None, backend="aot_eager")
        clean, breaks = pricing.breaks()
        dynamic = pricing.dynamic()
    return CompilePrices(
        module=kind.__name__, as_it_is=pricing.as_it_is, clean=clean, breaks=breaks, dynamic=dynamic,
        recompilations=pricing.recompilations, gave_up_at=pricing.gave_up_at, steps=pricing.steps,
    )  # fmt: skip


def line(text: str) -> str:
    """The place of the line with this text in this file."""
    lines = Path(__file__).read_text().splitlines()
    number = next(i for i, each in enumerate(lines, 1) if each.strip() == text)
    return f"recording/test_compile_prices.py:{number}"


def sentences(answer: Answer, kind: str) -> list[str]:
    return [finding.sentence for finding in answer.findings if finding.kind == kind]


@pytest.mark.long
def test_two_breaks_and_a_shape_that_changes(capsys: pytest.CaptureFixture[str]):
    prices = prices_of(Broken, 8, 6)
    # Each block is two pieces, and what is outside of them is not compiled at all: there the break hides another one.
    assert prices.as_it_is.pieces == 6
    assert {each.place for each in prices.as_it_is.breaks} == {line("scale = hidden.detach().abs().max().item()")}
    assert prices.clean.pieces == 1 and prices.clean.breaks == ()
    hot, outside = prices.ranked
    assert (hot.how, hot.pieces) == ("capture_scalar_outputs = True", 5)
    assert (outside.how, outside.pieces) == ("reorderable_logging_functions", 1)
    assert [each.place for each in outside.breaks] == [line('print("blocks are done")')]
    assert hot.saved_bytes is not None and prices.as_it_is.saved_bytes
    changed = [each for each in prices.recompilations if "size mismatch" in each.guard]
    # Where several guards fail PyTorch names one: 2.11 whether an input requires a gradient.
    assert changed or torch.__version__ < "2.13"
    assert {each.step for each in changed} <= {1} and all(each.seconds > 0 for each in prices.recompilations)
    assert prices.dynamic is not None and prices.dynamic.graphs < prices.as_it_is.graphs
    answer = answer_prices(prices)
    table = answer.tables[0]
    assert [row[0] for row in table.rows] == [hot.breaks[0].place, outside.breaks[0].place]
    first, second = sentences(answer, "break-price")
    assert "A forward calls 6 compiled graphs with it, 1 without" in first and "print" in second
    assert not changed or "expected 8, actual 6" in str(answer.tables)
    delayed = len({each.step for each in prices.recompilations})
    assert f"delayed {delayed} of the first 4 steps" in sentences(answer, "recompilation-price")[0]
    assert sentences(answer, "dynamic-shapes")


def test_where_dynamo_gives_up_no_function_was_compiled_again():
    prices = prices_of(Whole, 8, 6, 5, 4, limit=1)
    assert prices.recompilations == () and "size mismatch" in prices.gave_up_at
    assert "ran a function eagerly from there on" in sentences(answer_prices(prices), "recompile-limit")[0]


def test_a_break_that_nothing_avoids_has_no_price():
    prices = prices_of(Stopped, 8)
    (found,) = prices.ranked
    assert found.breaks[0].place == line("torch._dynamo.graph_break()") and prices.as_it_is.pieces == 2
    assert found.with_them is None and found.why_not and found.eagerly is not None and found.eagerly.pieces == 0
    answer = answer_prices(prices)
    assert "not measurable: no setting of dynamo avoids" in sentences(answer, "break-without-price")[0]
    assert not sentences(answer, "break-price") and not prices.recompilations and prices.dynamic is None


def test_a_step_that_nothing_breaks():
    prices = prices_of(Whole, 8)
    assert (prices.breaks, prices.as_it_is.pieces, prices.clean) == ((), 1, prices.as_it_is)
    assert [finding.kind for finding in answer_prices(prices).findings] == ["no-graph-break"]


def timed(seconds: float) -> CompiledStep:
    values = tuple(seconds * (1 + 0.001 * (i % 5)) for i in range(40))
    return CompiledStep(pieces=1, graphs=1, compile_s=1, samples=Samples(values_s=values, warmup_s=(), clock="fake"))


def priced(place: str, with_s: float, pieces: float = 1) -> PricedBreak:
    with_them = msgspec.structs.replace(timed(with_s), pieces=pieces)
    one = GraphBreak(place, "forward", "Tensor.item() Explanation: none")
    return PricedBreak(breaks=(one,), how=place, with_them=with_them, without=timed(0.010))


def test_the_dearest_comes_first_and_noise_has_no_price():
    breaks = (priced("a.py:1", 0.010, pieces=3), priced("b.py:1", 0.012), priced("c.py:1", 0.015))
    prices = CompilePrices(module="Net", as_it_is=timed(0.02), clean=timed(0.01), breaks=breaks)
    assert [each.how for each in prices.ranked] == ["c.py:1", "b.py:1", "a.py:1"]
    assert [round(each.decided_s, 4) for each in prices.ranked] == [0.005, 0.002, 0]
    said = sentences(answer_prices(prices), "break-price")
    assert "c.py:1 (Tensor.item()) costs 5.01 ms a step: without it the step is 1.50" in said[0]
    assert "costs no time that can be told" in said[2]


OWN = """
import torch
from torch import nn

def make():
    return nn.Linear(8, 8), torch.randn(4, 8), lambda output: output.square().mean()
"""


def test_in_a_process_of_its_own(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    workload = FactoryWorkload(model=UserModel(name=""), factory=f"{tmp_path / 'own.py'}:make")
    prices = compile_prices(workload, "cpu", backend="aot_eager")
    assert (prices.module, prices.as_it_is.pieces, prices.breaks) == ("Linear", 1, ())
    assert prices.environment is not None and prices.environment.device_type == "cpu"


def test_a_file_that_pytorch_shortened_is_named_whole():
    """A file that shares nothing but the root with PyTorch loses a letter more; one in a package keeps its name."""
    mine = "/elsewhere/mine/own.py"
    assert (
        place_named(f"{shorten_filename(mine)}:9", mine)
        == place_named("lsewhere/mine/own.py:9", mine)
        == "mine/own.py:9"
    )
    assert place_named(f"{shorten_filename(nn.__file__)}:2", mine) == "torch/nn/__init__.py:2"
    assert place_named("unknown/own.py:3", mine) == "unknown/own.py:3"
