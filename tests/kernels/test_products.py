"""Products by other algorithms of cuBLASLt than PyTorch's: the same bits, whatever is chosen."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from stepscope.kernels import products
from stepscope.kernels.products import product


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_known", {})
    monkeypatch.setattr(products, "_calls", products.Counter())


def test_a_compiled_product_is_ours() -> None:
    def gradient(dy: Tensor, x: Tensor) -> Tensor:
        return product(dy.t(), x)

    dy, x = torch.randn(6, 5), torch.randn(6, 4)
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    made = torch.compile(gradient, fullgraph=True, backend=kept)(dy, x)
    assert torch.equal(made, dy.t() @ x)
    assert [node.target for node in graphs[0].graph.nodes if node.op == "call_function"] == [
        torch.ops.stepscope.product
    ]


def test_the_fastest_with_the_same_bits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose bits differ is faster than all, and is not taken."""
    left, right = torch.randn(8, 8, dtype=torch.bfloat16), torch.randn(8, 8, dtype=torch.bfloat16)
    out = torch.empty(8, 8, dtype=torch.bfloat16)
    ran: list[str] = []

    def other(name: str, off: bool = False) -> products._Run:
        def run(left: Tensor, right: Tensor, out: Tensor) -> None:
            ran.append(name)
            torch.mm(left, right, out=out)
            if off:
                out[3, 5] = out[3, 5].nextafter(torch.tensor(9.0, dtype=torch.bfloat16))

        return run

    slower, faster, wrong = other("slower"), other("faster"), other("wrong", off=True)
    took = {"": 1.0, "slower": 1.2, "faster": 0.9, "wrong": 0.5}

    def seconds(run: Callable[[], None], _times: int) -> float:
        ran.clear()
        run()
        return took[ran[0] if ran else ""]

    monkeypatch.setattr(products, "_listed", lambda *_: [wrong, slower, faster])
    monkeypatch.setattr(products, "_seconds", seconds)
    assert products._fastest(left, right, out) is faster
    assert torch.equal(out, left @ right)
    took["faster"] = 0.99  # which could be chance
    assert products._fastest(left, right, out) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("turned", ["neither", "left", "right"])
def test_the_bits_are_pytorchs_on_a_gpu(turned: str, dtype: torch.dtype) -> None:
    rows, terms, columns = 2048, 896, 9728
    left = torch.randn(rows, terms, device="cuda").to(dtype)
    right = torch.randn(terms, columns, device="cuda").to(dtype)
    if turned == "left":
        left = left.t().contiguous().t()
    if turned == "right":
        right = right.t().contiguous().t()
    expected = left @ right
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = [product(left, right) for _ in range(4)]
    peak = torch.cuda.max_memory_allocated() - before - 4 * expected.nbytes
    assert peak < expected.nbytes + (33 << 20), "a trial makes no copy of a result: PyTorch's buffers alone"
    assert all(torch.equal(each, expected) for each in made)
    assert len(products._known) == 1

    out, graph = torch.empty_like(expected), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product(left, right, out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_what_was_not_tried_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call, small products, operands at odd places, one after the last shape, fp32."""
    monkeypatch.setattr(products, "_MOST_SHAPES", 1)
    x, weight = (torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product(x, weight.t())
    assert not products._known
    moved = torch.empty(x.numel() + 8, device="cuda", dtype=torch.bfloat16)[8:].view_as(x).copy_(x)
    for left, right in ((x[:64], weight.t()), (moved, weight.t()), (x.float(), weight.float().t())):
        for _ in range(2):
            assert torch.equal(product(left, right), left @ right)
    assert not products._known
    for _ in range(2):
        product(x, weight.t())
        product(x[:3072], weight.t())
    assert len(products._known) == 1


@pytest.mark.gpu
def test_cublaslt_lists_other_algorithms() -> None:
    left, right = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    listed = products._listed(left, right, out)
    assert len(listed) > 1
    for run in listed:
        run(left, right, out.zero_())
        torch.testing.assert_close(out, left @ right, rtol=2e-2, atol=2.0)


def test_an_operator_runs_while_another_thread_compiles() -> None:
    """PyTorch tells all threads that one of them compiles."""
    left, right, out = torch.randn(6, 5), torch.randn(5, 4), torch.empty(6, 4)
    with torch.compiler._compile_session_context():
        assert torch.equal(torch.ops.stepscope.product(left, right), left @ right)
        assert product(left, right, out) is out
    assert torch.equal(out, left @ right)


def test_a_compiled_product_is_counted() -> None:
    with FlopCounterMode(display=False) as counted:
        torch.ops.stepscope.product(torch.randn(6, 5), torch.randn(5, 4))
    assert counted.get_total_flops() == 2 * 6 * 5 * 4


def test_a_profiler_sees_the_algorithm_that_runs_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_is_chosen", lambda *_: True)
    left, right = torch.randn(6, 5), torch.randn(5, 4)
    out = torch.empty(6, 4)

    def run(left: Tensor, right: Tensor, out: Tensor) -> None:
        out.fill_(7.0)

    products._known[products._key(left, right, out)] = run
    with torch.profiler.profile() as profiled:
        product(left, right, out)
    assert "stepscope::chosen_product" in {event.key for event in profiled.key_averages()}
    assert torch.equal(out, torch.full((6, 4), 7.0))


@pytest.mark.parametrize("number", [0.0, float("nan")])
def test_a_result_whose_rows_are_alike_tells_nothing(number: float) -> None:
    right = torch.randn(16, 32).bfloat16()
    rows = torch.full((64, 16), number, dtype=torch.bfloat16)
    assert not products._tells(rows @ right)
    rows[:10] = torch.randn(10, 16)
    assert products._tells(rows @ right)


def test_an_algorithm_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = torch.randn(8, 8).bfloat16(), torch.randn(8, 8).bfloat16()
    out = torch.empty(8, 8, dtype=torch.bfloat16)

    def fails(*_: Tensor) -> None:
        raise RuntimeError("cuBLASLt: status 15")

    monkeypatch.setattr(products, "_listed", lambda *_: [fails])
    monkeypatch.setattr(products, "_seconds", lambda *_: 1.0)
    assert products._fastest(left, right, out) is None
    assert torch.equal(out, left @ right)
