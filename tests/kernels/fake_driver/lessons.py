"""What the launcher in C++ learns from a first call that is unlike those after it, and what it leaves to Python."""

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.compiled_autograd
from torch import Tensor
from torch.autograd import forward_ad

from stepscope.kernels import native
from stepscope.kernels.flash.attention import flash_attention
from stepscope.kernels.parts import mlp, norm, rope
from tests.kernels.fake_driver.fake import Fake, in_cpp, said

EPSILON = 1e-5


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_()


def lessons(fake: Fake) -> dict[str, Any]:
    """By lesson, whether it was the right one."""
    found = {
        "one tensor twice": alike_forward(fake), "one gradient twice": alike_backward(fake),
        "after an expanded gradient": plain_after(lambda y, g: y.sum().backward()),
        "after a strided gradient": plain_after(lambda y, g: y.backward(made(4, 96)[:, :48].detach())),
        "after a failure": after_a_failure(fake),
        "after an address that is not aligned": after_an_odd_address(),
        "forward mode": forward_mode(), "a node": a_node(),
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
        taught = bool(passes)
        for _ in range(3):
            passes.clear()
            norm.rms_norm(x, None, weight, EPSILON)[1].backward(gradient)
    finally:
        norm._backward = own
    return taught and not passes


def after_a_failure(fake: Fake) -> bool:
    native.forget()
    gate, up = made(6, 40), made(6, 40)
    fake.fail(2)
    failed = said(lambda: mlp.silu_product(gate, up))
    fake.fail(0)
    mlp.silu_product(gate, up)
    return bool(failed) and in_cpp(mlp.silu_product(gate, up))


def after_an_odd_address() -> bool:
    """Whether its kernels, which are others, are not learnt for those of aligned addresses."""
    native.forget()
    gate, up = made(6, 40), made(6, 40)
    mlp.silu_product(torch.zeros(241, dtype=torch.bfloat16)[1:].view(6, 40), up)
    return [in_cpp(mlp.silu_product(gate, up)) for _ in range(2)] == [False, True]


def forward_mode() -> bool:
    """A tangent is refused, as Python refuses it, and not dropped."""
    gate, up = made(6, 40), made(6, 40)
    mlp.silu_product(gate, up)
    plain = mlp.silu_product(gate, up)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(gate.detach(), torch.ones_like(gate))
        refused = said(lambda: mlp.silu_product(dual, up))
    return "jvp" in refused and in_cpp(plain)


def a_node() -> bool:
    gate, up = made(6, 40), made(6, 40)
    mlp.silu_product(gate, up)
    return isinstance(mlp.silu_product(gate, up).grad_fn, torch.autograd.graph.Node)


def compilable() -> dict[str, tuple[Callable[[], tuple[Tensor, ...]], list[Tensor]]]:
    gate, up, x, branch, weight = made(6, 40), made(6, 40), made(4, 48), made(4, 48), made(48)
    q, k = made(2, 4, 7, 16), made(2, 4, 7, 16)
    tables = torch.zeros(9, 16), torch.ones(9, 16)
    heads = [made(1, 2, 96, 64) for _ in range(3)]
    return {
        "mlp": (lambda: (mlp.silu_product(gate, up),), [gate, up]),
        "norm": (lambda: norm.rms_norm(x, branch, weight, EPSILON), [x, branch, weight]),
        "rope": (lambda: rope.rotated(q, k, *tables), [q, k]),
        "flash": (lambda: (flash_attention(*heads, causal=True),), heads),
    }


def compiled(call: tuple[Callable[[], tuple[Tensor, ...]], list[Tensor]]) -> bool:
    """Whether compiled autograd runs a backward whose forward ran in C++."""
    function, leaves = call
    native.forget()
    for _ in range(3):
        outs = function()
        torch.autograd.backward(outs, [torch.zeros_like(out) for out in outs])
    for leaf in leaves:
        leaf.grad = None
    outs = function()
    native_forward = in_cpp(outs[0])
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        torch.autograd.backward(outs, [torch.zeros_like(out) for out in outs])
    torch._dynamo.reset()
    return native_forward and all(leaf.grad is not None for leaf in leaves)
