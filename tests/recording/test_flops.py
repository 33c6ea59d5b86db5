"""FLOPs counted while a step runs, against the formulas for the textbook's model and by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from stepscope.core.formulas.transformer import phase_work, recomputed_flops
from stepscope.core.model_config import configure
from stepscope.core.workloads import TextbookWorkload
from stepscope.recording.flops import FlopCounts
from stepscope.recording.step import Phase, drive
from stepscope.training.training_step import TrainingStep


class _Work:
    """A step of one phase that runs a function."""

    def __init__(self, run: object) -> None:
        self.phases = (Phase(name="forward", run=run),)  # type: ignore[arg-type]

    def prepare(self) -> None: ...


def _counted(run: object) -> FlopCounts:
    counts = FlopCounts()
    with counts.running():
        drive(_Work(run), counts)
    return counts


@pytest.mark.parametrize("choices", [{}, {"accumulation": 2}, {"dtype": "bf16"}, {"checkpointing": "every-2"}], ids=str)
def test_the_textbooks_step_has_the_flops_of_its_formula(choices: dict[str, object]):
    """The counter takes attention as the full square, and what backward runs again as work."""
    workload = TextbookWorkload(model=configure("tiny", layers=2), seq_len=32, **choices)  # type: ignore[arg-type]
    step = TrainingStep(workload, torch.device("cpu"))
    step.prepare()
    counts = FlopCounts()
    with counts.running():
        drive(step, counts)
    expected = {phase: work.flops for phase, work in phase_work(workload, "full").items()}
    expected["backward"] += recomputed_flops(workload, "full")
    assert {phase: work.flops for phase, work in counts.work.items()} == expected
    assert not counts.unknown


def test_fused_attention_on_a_cpu_counts_and_its_backward_multiplies_once_more():
    """Backward runs the product of the scores again: 5 products where forward has 2, each 2 B H S S D."""
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    product = 2 * 1 * 2 * 16 * 16 * 8

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()

    assert _counted(attend).work["forward"].flops == 7 * product


def test_heads_of_keys_that_queries_share_count_for_each_query_head():
    query, key = torch.empty(1, 4, 8, 16, device="meta"), torch.empty(1, 2, 8, 16, device="meta")
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    counts = _counted(lambda: attend(query, key, key, 0.0, True, False))
    assert counts.work["forward"].flops == 2 * (2 * 4 * 8 * 8 * 16) and not counts.unknown


def test_a_formula_that_fails_is_unknown_and_ends_nothing(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object, **__: object) -> int:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(flop_registry, torch.ops.aten.cosh, fails)
    counts = _counted(lambda: torch.ones(2, 3).cosh())
    assert counts.unknown == {"aten::cosh": 1} and counts.work["forward"].flops == 0


def test_a_compiled_step_counts_as_its_eager_one():
    module = torch.compile(nn.Linear(8, 4), backend="eager")
    counts = _counted(lambda: module(torch.randn(2, 8)).sum().backward())
    assert counts.work["forward"].flops == 2 * (2 * 2 * 8 * 4)  # forward, and the gradient of the weight


def test_what_a_checkpoint_runs_again_counts():
    module, x = nn.Linear(8, 4, bias=False), torch.randn(2, 8, requires_grad=True)
    counts = _counted(lambda: checkpoint(lambda x: module(x).relu(), x, use_reentrant=False).sum().backward())
    assert counts.work["forward"].flops == 4 * (2 * 2 * 8 * 4)


def test_products_without_a_formula_are_named_and_not_taken_for_none():
    lstm = nn.LSTM(8, 16)
    counts = _counted(lambda: (lstm(torch.randn(3, 2, 8)), torch.fft.rfft(torch.randn(8))))
    assert any("rnn" in name or "lstm" in name for name in counts.unknown)
    assert "aten::_fft_r2c" in counts.unknown


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_product_of_a_sparse_matrix_is_named(layout: torch.layout):
    """Most of its places are zeros that nobody multiplies: its shape does not say how many."""
    sparse = torch.eye(64).to_sparse(layout=layout)
    counts = _counted(lambda: (sparse @ torch.ones(64, 8), torch.ones(2, 3) @ torch.ones(3, 4)))
    assert counts.unknown == {"aten::mm": 1} and counts.work["forward"].flops == 2 * 2 * 3 * 4


def test_an_operator_of_the_users_own_is_unknown():
    @torch.library.custom_op("stepscope_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    assert _counted(lambda: twice(torch.ones(2))).unknown == {"stepscope_test::twice": 1}


def test_products_inside_an_operator_that_is_written_in_python_count():
    """As its trace has them, and with the device's own implementation. It is known, and called as before."""

    @torch.library.custom_op("stepscope_test::product", mutates_args=())
    def product(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b).relu()

    @product.register_kernel("cpu")
    def _(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b @ b).relu()

    counts = _counted(lambda: product(torch.ones(2, 3), torch.ones(3, 3)))
    assert counts.work["forward"].flops == 2 * (2 * 2 * 3 * 3) and not counts.unknown
    assert torch.equal(product(torch.ones(2, 3), torch.ones(3, 3)), torch.full((2, 3), 9.0))


def test_what_does_not_multiply_is_neither_counted_nor_unknown():
    counts = _counted(
        lambda: (
            torch.randn(4).softmax(0),
            torch.linspace(0, 1, 5),
            torch.randn(3, 4).view(12).cumsum(0),
            torch.randn(4).cummax(0),
            torch.rand(4).lgamma(),
            torch.rand(4).digamma(),
        )
    )
    assert counts.work["forward"].flops == 0 and not counts.unknown


def test_a_product_by_a_vector():
    matrix, vector = torch.randn(3, 4), torch.randn(4)
    assert _counted(lambda: (matrix @ vector, vector @ vector)).work["forward"].flops == 2 * 3 * 4 + 2 * 4


def test_flex_attention_counts_by_pytorchs_formula():
    """It is an operator of higher order, which a mode must be willing to take."""
    q = torch.randn(1, 2, 128, 16)
    counts = _counted(lambda: flex_attention(q, q, q))
    assert counts.work["forward"].flops == 4 * 2 * 128 * 128 * 16 and not counts.unknown
