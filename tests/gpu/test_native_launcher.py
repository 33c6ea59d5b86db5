"""Operations launched from C++ on a GPU: the numbers of Python's launches, on any stream, and inside a graph."""

import gc
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from stepscope.core.environment import NATIVE_LAUNCHER
from stepscope.kernels import native
from stepscope.kernels.flash import tuning_cache
from stepscope.kernels.flash.attention import flash_attention
from stepscope.kernels.parts import mlp, norm, rope
from stepscope.training.training_step import TrainingStep
from tests.conftest import mini, run_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not shutil.which("c++") or not shutil.which("ninja"), reason="no C++ compiler or no ninja here"),
]

SHAPES = {
    "Hopper's kernels": (2, 8, 8, 640, 64), "head_dim 128": (1, 4, 4, 1000, 128), "head_dim 96": (1, 4, 4, 300, 96),
    "grouped": (2, 8, 2, 512, 64), "head_dim 32": (2, 4, 4, 500, 32), "head_dim 80, short": (1, 2, 1, 17, 80),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(NATIVE_LAUNCHER, "1")
        patched.setenv("STEPSCOPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        native.extension.cache_clear()
        assert native.extension() is not None
        yield
    native.forget()
    native.extension.cache_clear()


def tensors(shape: tuple[int, ...], dtype: torch.dtype, *, strided: bool) -> list[Tensor]:
    batch, heads, kv_heads, length, head_dim = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def made(heads: int) -> Tensor:
        size = (batch, length, heads, head_dim) if strided else (batch, heads, length, head_dim)
        values = torch.randn(size, generator=generator, device="cuda", dtype=torch.float32).to(dtype)
        return (values.transpose(1, 2) if strided else values).requires_grad_()

    return [made(heads), made(kv_heads), made(kv_heads)]


def results(inputs: list[Tensor], gradient: Tensor, *, causal: bool) -> tuple[bool, list[Tensor]]:
    """Whether the call ran in C++; the output and the gradients."""
    out = flash_attention(*inputs, causal=causal)
    gradients = torch.autograd.grad(out, inputs, gradient)
    return type(out.grad_fn).__name__ == "RecordedBackward", [out.detach(), *gradients]


def same(found: list[Tensor], right: list[Tensor]) -> None:
    """All bits, but those of dQ, whose sums Hopper's kernel adds up in any order."""
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, right, strict=True):
        if name == "dq":
            assert float((one.float() - other.float()).norm()) <= 4e-3 * float(other.float().norm())
        else:
            assert torch.equal(one, other), name


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_has_the_numbers_of_pythons_launches(
    shape: tuple[int, ...], dtype: torch.dtype, causal: bool, strided: bool
):
    native.forget()
    inputs = tensors(shape, dtype, strided=strided)
    gradient = torch.randn_like(inputs[0])
    in_cpp, right = results(inputs, gradient, causal=causal)
    assert not in_cpp, "the first call teaches"
    for _ in range(2):
        in_cpp, found = results(inputs, gradient, causal=causal)
        assert in_cpp
        same(found, right)
    # Other addresses, and the strides of one head, too, which no operator keeps.
    others = [torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=t.device) for t in inputs]
    for other, t in zip(others, inputs, strict=True):
        other.copy_(t.detach().neg()).requires_grad_()
    in_cpp, found = results(others, gradient.clone(), causal=causal)
    assert in_cpp
    native.forget()
    same(found, results(others, gradient, causal=causal)[1])


def test_it_runs_on_the_stream_of_its_call_and_inside_a_graph():
    inputs = tensors((2, 8, 8, 640, 64), torch.bfloat16, strided=True)
    gradient = torch.randn_like(inputs[0])
    _, right = results(inputs, gradient, causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # who ran on another stream would read before the inputs are there
        late = [t.detach().mul(1.0).requires_grad_() for t in inputs]
        in_cpp, found = results(late, gradient, causal=True)
    stream.synchronize()
    assert in_cpp
    same(found, right)

    static = [t.detach().clone().requires_grad_() for t in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_cpp, captured = results(static, gradient, causal=True)
    assert in_cpp
    for t in static:
        t.detach().zero_()
    graph.replay()
    with torch.no_grad():
        for t, value in zip(static, inputs, strict=True):
            t.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    same(captured, right)


def test_a_new_thread_may_launch_first_thing():
    """It has no context of the device until it calls CUDA's runtime, or we give it one."""
    inputs = tensors((2, 8, 8, 640, 64), torch.bfloat16, strided=True)
    gradient = torch.randn_like(inputs[0])
    results(inputs, gradient, causal=True)
    _, right = results(inputs, gradient, causal=True)
    found: list[tuple[bool, list[Tensor]]] = []
    thread = threading.Thread(target=lambda: found.append(results(inputs, gradient, causal=True)))
    thread.start()
    thread.join()
    assert found and found[0][0]
    same(found[0][1], right)


def test_a_first_call_with_one_tensor_twice_teaches_no_other():
    gate, up = (torch.randn(64, 256, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    native.forget()
    mlp.silu_product(gate, gate)
    right = mlp.silu_product(gate, up)
    found = mlp.silu_product(gate, up)
    assert type(found.grad_fn).__name__ == "RecordedBackward" and torch.equal(found, right)
    torch.testing.assert_close(found, torch.nn.functional.silu(gate) * up, rtol=2e-2, atol=2e-2)


def test_another_configuration_is_another_way():
    inputs = tensors((1, 4, 4, 512, 64), torch.bfloat16, strided=False)
    gradient = torch.randn_like(inputs[0])
    _, right = results(inputs, gradient, causal=True)
    forward = tuning_cache.forward_configuration(inputs[0], causal=True)
    with tuning_cache.forced(forward=forward):
        in_cpp, found = results(inputs, gradient, causal=True)
    assert not in_cpp
    same(found, right)


def test_no_memory_stays():
    inputs = tensors((2, 8, 8, 1024, 64), torch.bfloat16, strided=False)
    gradient = torch.randn_like(inputs[0])
    for _ in range(2):
        results(inputs, gradient, causal=True)
    gc.collect()  # what an earlier test left in cycles must not go meanwhile
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        results(inputs, gradient, causal=True)
    ends = time.monotonic() + 5  # autograd's thread drops what a backward held a moment after the call has returned
    while torch.cuda.memory_allocated() != before and time.monotonic() < ends:
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() == before


def parts() -> dict[str, tuple[list[Tensor], Callable[..., Any]]]:
    generator = torch.Generator("cuda").manual_seed(1)

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_()

    both = made(1030, 2 * 640).detach()
    halves = [half.detach().requires_grad_() for half in both.tensor_split(2, dim=-1)]
    heads = [made(2, 300, n, 64).detach().transpose(1, 2).requires_grad_() for n in (8, 2)]
    angles = torch.rand(512, 32, generator=generator, device="cuda").repeat(1, 2)
    return {
        "norm": ([made(3, 257, 640), made(640)], lambda x, weight: norm.rms_norm(x, None, weight, 1e-5)[1]),
        "norm with its sum": (
            [made(3, 257, 640), made(3, 257, 640), made(640)],
            lambda x, branch, weight: norm.rms_norm(x, branch, weight, 1e-5),
        ),
        "norm of two dtypes": (
            [made(300, 768, dtype=torch.float32), made(300, 768), made(768, dtype=torch.float32)],
            lambda x, branch, weight: norm.rms_norm(x, branch, weight, 1e-5, torch.bfloat16),
        ),
        "mlp": ([made(1030, 1712), made(1030, 1712)], mlp.silu_product),
        "mlp of halves": (halves, mlp.silu_product),
        "layer norm": (
            [made(3, 257, 768), made(768), made(768)],
            lambda x, weight, bias: norm.layer_norm(x, weight, bias, 1e-5),
        ),
        "layer norm without a bias": (
            [made(2049, 640), made(640)],
            lambda x, weight: norm.layer_norm(x, weight, None, 1e-5),
        ),
        "gelu": ([made(1030, 1712), made(1712)], mlp.biased_gelu),
        "gelu by tanh": ([made(3000, 640)], lambda h: mlp.biased_gelu(h, tanh=True)),
        "rope": ([*heads, angles.cos(), angles.sin()], rope.rotated),
    }


@pytest.mark.parametrize(
    "part",
    [
        "norm", "norm with its sum", "norm of two dtypes", "layer norm", "layer norm without a bias", "mlp",
        "mlp of halves", "gelu", "gelu by tanh", "rope",
    ],
)  # fmt: skip
def test_parts_have_the_bits_of_pythons_launches(part: str):
    inputs, function = parts()[part]
    trained = [each for each in inputs if each.requires_grad]

    def run() -> tuple[bool, list[Tensor]]:
        out = function(*inputs)
        outputs = list(out) if isinstance(out, tuple) else [out]
        upstream = [torch.full_like(each, 0.5) for each in outputs]
        in_cpp = type(outputs[0].grad_fn).__name__ == "RecordedBackward"
        return in_cpp, [*(each.detach() for each in outputs), *torch.autograd.grad(outputs, trained, upstream)]

    native.forget()
    in_cpp, right = run()
    assert not in_cpp
    for _ in range(2):
        in_cpp, found = run()
        assert in_cpp and all(torch.equal(one, other) for one, other in zip(found, right, strict=True))


@pytest.mark.parametrize("choices", [{}, {"dtype": "bf16"}, {"dtype": "bf16-master", "projections": "joint"}], ids=str)
def test_an_eager_step_has_the_losses_and_gradients_of_pythons_launches(choices: dict[str, Any]):
    """From the third step on every call of flash attention and of the parts is launched from C++."""
    fused: dict[str, Any] = dict.fromkeys(("norm", "rope", "mlp"), "fused")
    workload = mini(attention="flash", d_model=128, heads=2, seq_len=64, **fused, **choices)
    found: list[list[float]] = []
    for launched in (False, True):
        native.forget()
        with pytest.MonkeyPatch.context() as patched:
            if not launched:
                patched.setattr(native, "extension", lambda: None)
            step = TrainingStep(workload, torch.device("cuda"))
            found.append([run_steps(step) or 0.0 for _ in range(6)])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
