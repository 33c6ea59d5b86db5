"""Memory that grows from step to step: each way to keep tensors planted in a loop, and nothing said of one without."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepscope
from stepscope.allocations.left_behind import growth_tables
from stepscope.core.answer import Answer, Finding, Table, name_of
from stepscope.core.evidence import MemoryGrowth
from stepscope.core.run import Run, Settings
from stepscope.engine.request import MemoryRequest, StepRequest
from stepscope.engine.step import measure_step
from stepscope.runs.checks import check_run
from tests.conftest import mini

pytestmark = pytest.mark.slow

ROWS, WIDTH = 32, 64
ACTIVATION = ROWS * WIDTH * 4
STATE = 2 * (WIDTH * WIDTH + WIDTH) * 4 * 2 + 4 * 4
"""Bytes of AdamW's state: two moments of two linear layers' tensors, and four counts of steps."""
CACHE: dict[int, Tensor] = {}


class Net(nn.Module):
    """Two linear layers, which keep what they are told to."""

    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keeps = keeps
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu()
        if self.keeps:
            self.history.append(hidden)
        return self.b(hidden)


def watched(
    folder: Path, each: Callable[[int, nn.Module, torch.optim.Optimizer, Tensor, Tensor], object], *,
    keeps: bool = False, steps: int = 4,
) -> Run:  # fmt: skip
    """The run of a loop that calls this in each step: with its number, the model, the optimizer, output and loss."""
    torch.manual_seed(0)
    model = Net(keeps)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(ROWS, WIDTH)
    with stepscope.watch(
        model, optimizer, steps=(3, 5), record="memory", memory_steps=steps, runs=folder, quiet=True
    ) as watching:
        for i in range(5 + 8 + steps):
            output = model(inputs)
            loss = output.square().mean()
            loss.backward()
            each(i, model, optimizer, output, loss)
            optimizer.step()
            optimizer.zero_grad()
    assert watching.run is not None and watching.run.evidence.notes == ()
    return watching.run


def site(text: str) -> str:
    """The line of the model's forward with this text, as an answer names it."""
    lines = Path(__file__).read_text().splitlines()
    return f"engine/test_growth.py:{next(i for i, line in enumerate(lines, 1) if line.strip() == text)} forward"


def told(run: Run) -> tuple[Finding, MemoryGrowth]:
    growth = run.evidence.growth
    (finding,) = [finding for finding in run.findings if finding.kind == "memory-grows"]
    assert growth is not None and finding in check_run(run)
    assert growth.ends[-1] - growth.ends[-2] == growth.bytes_a_step, "the lines make up all that grows"
    return finding, growth


def test_outputs_that_are_kept_detached(out: Path):
    outputs: list[Tensor] = []
    finding, growth = told(watched(out, lambda i, model, optimizer, output, loss: outputs.append(output.detach())))
    (left,) = growth.left
    assert finding.severity == "warning" and finding.evidence["bytes_a_step"] == ACTIVATION == left.bytes_a_step
    assert left.site == site("return self.b(hidden)") and left.module == "b" and left.tensors_a_step == 1
    assert (left.shape, left.dtype) == ((ROWS, WIDTH), "float32")
    assert left.kept_by.startswith("outputs[...] in test_outputs_that_are_kept_detached()")
    assert f"held by {left.kept_by}" in finding.sentence and "8.00 KiB a step" in finding.sentence


def test_losses_whose_graphs_are_kept(out: Path):
    losses: list[Tensor] = []
    inputs = torch.randn(ROWS, WIDTH)
    finding, growth = told(
        watched(out, lambda i, model, optimizer, output, loss: losses.append(model(inputs).square().mean()))
    )
    assert growth.bytes_a_step == 2 * ACTIVATION + 4
    assert growth.left[0].kept_by.startswith("the graph of losses[...] in test_losses_whose_graphs_are_kept()")
    assert growth.left[0].category == "saved for backward" == growth.left[1].category
    assert growth.left[-1].kept_by.startswith("losses[...]") and "loss.item()" in finding.remedy


def test_a_list_of_losses_is_little(out: Path):
    losses: list[Tensor] = []
    finding, growth = told(watched(out, lambda i, model, optimizer, output, loss: losses.append(loss)))
    assert finding.severity == "note" and growth.bytes_a_step == 4


def test_a_module_that_keeps_its_activations(out: Path):
    _, growth = told(watched(out, nothing, keeps=True))
    (left,) = growth.left
    assert (left.kept_by, left.category) == ("Net.history[...]", "saved for backward")
    assert (left.other_kinds, left.other_categories) == (0, ())
    assert left.site == site("hidden = self.a(x).relu()") and left.bytes_a_step == ACTIVATION


def test_a_cache_with_a_key_for_each_step(out: Path):
    def cached(i: int, *_: object) -> None:
        CACHE[i] = torch.zeros(100)

    try:
        _, growth = told(watched(out, cached))
    finally:
        CACHE.clear()
    assert (growth.left[0].kept_by, growth.bytes_a_step) == (f"{__name__}.CACHE[...]", 400)


def test_one_tensor_that_grows(out: Path):
    kept: dict[str, Tensor] = {"outputs": torch.zeros(0, WIDTH)}

    def longer(i: int, model: nn.Module, optimizer: object, output: Tensor, loss: Tensor) -> None:
        kept["outputs"] = torch.cat([kept["outputs"], output.detach()])

    _, growth = told(watched(out, longer))
    assert growth.left[0].tensors_a_step == 0 and growth.bytes_a_step == ACTIVATION
    assert growth.left[0].kept_by.startswith("kept['outputs'] in ")


def test_states_of_an_optimizer_that_is_made_anew(out: Path):
    states: list[Any] = []

    def anew(i: int, model: nn.Module, optimizer: torch.optim.Optimizer, *_: object) -> None:
        states.append(optimizer.state_dict())
        optimizer.state.clear()

    _, growth = told(watched(out, anew))
    assert growth.bytes_a_step == STATE and growth.left[0].category == "optimizer state"
    (row, *_) = growth_tables(growth)[1].rows
    assert str(row[1]).endswith("64 x 64 float32 and 2 other kinds"), "of a bias, and a count of steps"
    assert growth.left[0].kept_by.startswith("states[...]['state']")


def nothing(*_: object) -> None:
    pass


def restarted(i: int, model: nn.Module, optimizer: torch.optim.Optimizer, *_: object) -> None:
    optimizer.state.clear()


class LastTwo:
    """Keeps the last two outputs."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def __call__(self, i: int, model: object, optimizer: object, output: Tensor, loss: Tensor) -> None:
        self.outputs = [*self.outputs[-1:], output.detach()]


class FilledOnce:
    """Keeps an output for each of four batches."""

    def __init__(self) -> None:
        self.outputs: dict[int, Tensor] = {}

    def __call__(self, i: int, model: object, optimizer: object, output: Tensor, loss: Tensor) -> None:
        self.outputs.setdefault(min(i, 3), output.detach())


@pytest.mark.parametrize(
    "each", [nothing, restarted, LastTwo(), FilledOnce()], ids=["bare", "restarted", "two", "once"]
)
def test_what_does_not_grow(each: Any, out: Path):
    run = watched(out, each)
    growth = run.evidence.growth
    assert growth is not None and growth.left == () and len(growth.ends) == 5 and growth.ends[-1] == growth.ends[-2]
    assert not [finding for finding in run.findings if finding.kind == "memory-grows"]


def test_circles_that_wait_for_the_collector_are_no_growth(out: Path):
    def circle(i: int, model: object, optimizer: object, output: Tensor, loss: Tensor) -> None:
        held: list[Any] = [output.detach()]
        held.append(held)

    gc.disable()
    try:
        growth = watched(out, circle).evidence.growth
    finally:
        gc.enable()
    assert growth is not None and growth.left == () and growth.collected_bytes == 3 * ACTIVATION


def test_recording_leaves_nothing_alive(out: Path):
    """The search for what holds a tensor reads local variables, and must not hold them afterwards."""
    watched(out, nothing)
    gc.collect()
    before = sum(issubclass(type(found), Tensor) for found in gc.get_objects())
    watched(out, LastTwo())
    gc.collect()
    assert sum(issubclass(type(found), Tensor) for found in gc.get_objects()) == before


def test_a_driven_step(out: Path):
    request = StepRequest(
        workload=mini(), settings=Settings(warmup_floor=1, warmup_cap=1, steps_floor=2, steps_cap=2, seconds=0),
        device="cpu", out=str(out), memory=MemoryRequest(steps=3),
    )  # fmt: skip
    run, directory = measure_step(request)
    assert run.evidence.growth is not None and run.evidence.growth.left == ()
    answer = stepscope.memory(directory).answer
    assert answer.checked and not answer.findings, "no finding, and a line that says so"
    rows = shown(answer, "allocated at the end of").rows
    assert [row[0] for row in rows] == ["before the first", "step 1", "step 2", "step 3"]


def test_a_step_of_ones_own_that_keeps_what_it_made(out: Path):
    run = stepscope.run(
        Net(keeps=True), torch.randn(ROWS, WIDTH), lambda output: output.square().mean(), device="cpu", steps=2,
        warmup=1, profile=False, record="memory", memory_steps=3, runs=out,
    )  # fmt: skip
    finding, growth = told(run.run)
    assert growth.left[0].kept_by == "Net.history[...]" and finding.severity == "warning"
    assert run.memory is not None and finding in run.memory.answer.findings
    (row,) = shown(run.memory.answer, "left behind by each step").rows
    assert row[2:] == ("saved for backward", "Net.history[...]", ACTIVATION, "1")


def shown(answer: Answer, head: str) -> Table:
    """The table whose first column begins so."""
    return next(table for table in answer.tables if name_of(table).startswith(head))
