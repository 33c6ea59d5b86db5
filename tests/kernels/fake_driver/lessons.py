"""What the launcher in C++ learns from a first call that is unlike those after it, and what it leaves to Python."""

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.compiled_autograd
from torch import Tensor
from torch.autograd import forward_ad

from stepscope.kernels import native
from stepscope.kernels.parts import mlp, norm, rope
from tests.kernels.fake_driver.fake import Fake

EPSILON = 1e-5


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_()


def in_cpp(out: Tensor) -> bool:
    return type(out.grad_fn).__name__ == "RecordedBackward"


def lessons(fake: Fake) -> dict[str, Any]:
    """By lesson, whether it was the right one."""
    found = {
        "one tensor twice": alike_forward(fake), "one gradient twice": alike_backward(fake),
        "after an expanded gradient": plain_after(lambda y, g: y.sum().backward()),
        "after a strided gradient": plain_after(lambda y, g: y.backward(made(4, 96)[:, :48].detach())),
        "after a failure": after_a_failure(fake), "forward mode": forward_mode(), "a node": a_node(),
    }  # fmt: skip
    return found | {f"compiled autograd, {name}": compiled(call) for name, call in compilable().items()}


def given(fake: Fake, run: Callable[[], tuple[Tensor, ...]], *tensors: Tensor) -> bool:
    """Whether the call ran in C++ and its kernels were given each of these tensors."""
    fake.forget()
    outs = run()
    addresses = {
        int.from_bytes(each, "little") for kept in fake.launches() for each in kept.parameters if len(each) == 8
    }
    return in_cpp(outs[-1]) and all(each.data_ptr() in addresses for each in tensors)


def alike_forward(fake: Fake) -> bool:
    gate, up, x, branch, weight = made(6, 40), made(6, 40), made(4, 48), made(4, 48), made(48)
    q, k = made(2, 4, 7, 16), made(2, 4, 7, 16)
    cos, sin = torch.zeros(9, 16), torch.ones(9, 16)
    calls: list[tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...], tuple[Tensor, ...]]] = [
        (lambda *of: (mlp.silu_product(*of),), (gate, gate), (gate, up)),
        (lambda *of: norm.rms_norm(of[0], of[1], of[2], EPSILON), (x, x, weight), (x, branch, weight)),
        (rope.rotated, (q, q, cos, sin), (q, k, cos, sin)),
        (rope.rotated, (q, k, cos, cos), (q, k, cos, sin)),
    ]
    right = True
    for call, alike, apart in calls:
        native.forget()
        call(*alike)
        call(*apart)
        right = right and given(fake, lambda call=call, apart=apart: call(*apart), *apart)
    return right


def alike_backward(fake: Fake) -> bool:
    """The sum of both outputs gives each the same gradient."""
    native.forget()
    x, branch, weight = made(4, 48), made(4, 48), made(48)
    total, y = norm.rms_norm(x, branch, weight, EPSILON)
    (total + y).backward(torch.zeros(4, 48, dtype=torch.bfloat16))
    of_total, of_y = torch.zeros_like(total), torch.zeros_like(y)

    def run() -> tuple[Tensor, ...]:
        outs = norm.rms_norm(x, branch, weight, EPSILON)
        torch.autograd.grad(outs, [x, branch, weight], [of_total, of_y])
        return outs

    run()
    return given(fake, run, of_total, of_y)


def plain_after(first: Callable[[Tensor, Tensor], object]) -> bool:
    """Whether the backward of plain gradients runs in C++ at last, though the first gradient was none."""
    native.forget()
    x, weight, gradient = made(4, 48), made(48), torch.zeros(4, 48, dtype=torch.bfloat16)
    own, passes = norm._backward, list[bool]()

    def counted(*of: Any) -> Any:
        passes.append(True)
        return own(*of)

    norm._backward = counted
    try:
        first(norm.rms_norm(x, None, weight, EPSILON)[1], gradient)
        for _ in range(3):
            passes.clear()
            norm.rms_norm(x, None, weight, EPSILON)[1].backward(gradient)
    finally:
        norm._backward = own
    return not passes


def after_a_failure(fake: Fake) -> bool:
    native.forget()
    gate, up = made(6, 40), made(6, 40)
    fake.fail(2)
    try:
        mlp.silu_product(gate, up)
    except RuntimeError:
        fake.fail(0)
        mlp.silu_product(gate, up)
        return in_cpp(mlp.silu_product(gate, up))
    return False


def forward_mode() -> bool:
    """A tangent is refused, as Python refuses it, and not dropped."""
    gate, up = made(6, 40), made(6, 40)
    mlp.silu_product(gate, up)
    with forward_ad.dual_level():
        try:
            mlp.silu_product(forward_ad.make_dual(gate.detach(), torch.ones_like(gate)), up)
        except NotImplementedError:
            return in_cpp(mlp.silu_product(gate, up))
    return False


def a_node() -> bool:
    gate, up = made(6, 40), made(6, 40)
    mlp.silu_product(gate, up)
    return isinstance(mlp.silu_product(gate, up).grad_fn, torch.autograd.graph.Node)


def compilable() -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    gate, up, x, branch, weight = made(6, 40), made(6, 40), made(4, 48), made(4, 48), made(48)
    q, k = made(2, 4, 7, 16), made(2, 4, 7, 16)
    tables = torch.zeros(9, 16), torch.ones(9, 16)
    return {
        "mlp": (lambda: mlp.silu_product(gate, up), [gate, up]),
        "norm": (lambda: sum(norm.rms_norm(x, branch, weight, EPSILON), torch.zeros(())), [x, branch, weight]),
        "rope": (lambda: sum(rope.rotated(q, k, *tables), torch.zeros(())), [q, k]),
    }


def compiled(call: tuple[Callable[[], Tensor], list[Tensor]]) -> bool:
    """Whether compiled autograd runs a backward whose forward ran in C++."""
    function, leaves = call
    for _ in range(2):
        function()
    out = function()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out.backward(torch.zeros_like(out))
    torch._dynamo.reset()
    return all(leaf.grad is not None for leaf in leaves)
