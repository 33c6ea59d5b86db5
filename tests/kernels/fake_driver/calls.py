"""Calls of flash attention under the fake driver, by Python and by the launcher in C++; prints what it saw, as JSON."""

import contextlib
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.core.environment import NATIVE_LAUNCHER
from stepscope.kernels import native
from stepscope.kernels.flash import attention, recorded_launches, tuning_cache
from stepscope.kernels.flash import launch as flash_launch
from stepscope.kernels.flash.attention import flash_attention
from stepscope.kernels.flash.configuration import (
    BackwardConfiguration,
    ForwardConfiguration,
    HopperBackward,
    HopperForward,
    Tiles,
    Way,
)
from stepscope.kernels.flash.recorded_launches import ATTENTION
from stepscope.kernels.parts import mlp, norm, rope
from stepscope.recording.keepers import saved_tensors
from tests.kernels.fake_driver.fake import Fake, Kept, in_cpp, said
from tests.kernels.fake_driver.lessons import lessons

MOST_WAYS = 4096
"""kMostWays of native.cpp."""
_TILES = Tiles(block_m=64, block_n=64, num_warps=4, num_stages=2)
_HOPPER = HopperForward(consumers=1, late=True, max_registers=128), HopperBackward(v_in_registers=True)
_Way = tuple[ForwardConfiguration, BackwardConfiguration]


def way(kind: Way, *, tma: bool = False, hopper: bool = False) -> _Way:
    forward, backward = _HOPPER if hopper else (None, None)
    return (
        ForwardConfiguration(tiles=_TILES, tma=tma, hopper=forward),
        BackwardConfiguration(way=kind, keys=_TILES, queries=_TILES, tma=tma, hopper=backward),
    )


class Call:
    """Queries, keys, values and a gradient, and forward and backward over them."""

    def __init__(self, heads: int = 2, kv_heads: int = 2, *, strided: bool = False, side_by_side: bool = False) -> None:
        def made(heads: int) -> Tensor:
            if strided:
                return torch.zeros(1, 96, heads, 64, dtype=torch.bfloat16).transpose(1, 2)
            return torch.zeros(1, heads, 96, 64, dtype=torch.bfloat16)

        counts = (heads, kv_heads, kv_heads)
        self.side_by_side = side_by_side
        tensors = made(sum(counts)).split(counts, 1) if side_by_side else map(made, counts)
        self.q, self.k, self.v = (tensor.detach().requires_grad_() for tensor in tensors)
        self.gradient = torch.zeros_like(self.q)

    def forward(self, **more: Any) -> Tensor:
        return flash_attention(self.q, self.k, self.v, causal=True, **more)

    def run(self, gradient: Tensor | None = None, **more: Any) -> Tensor:
        self.q.grad = self.k.grad = self.v.grad = None
        out = self.forward(**more)
        gradient = self.gradient if gradient is None else gradient
        if self.side_by_side:  # autograd copies what it keeps for parts of a tensor
            of = self.q, self.k, self.v
            self.q.grad, self.k.grad, self.v.grad = torch.autograd.grad(out, of, gradient)
        else:
            out.backward(gradient)
        return out

    def seen(self, out: Tensor) -> set[int]:
        """The addresses of the tensors that a caller has."""
        tensors = (self.q, self.k, self.v, self.gradient, out, self.q.grad, self.k.grad, self.v.grad)
        return {tensor.data_ptr() for tensor in tensors if tensor is not None}


def addresses_in(kept: Kept, launch: dict[str, Any]) -> dict[int, int]:
    """By tensor of the call its address in a launch's parameters."""
    at = {place: number for number, place in enumerate(launch["places"])}
    return {
        tensor: int.from_bytes(kept.parameters[at[place]][:8], "little") - offset
        for place, tensor, offset in (*launch["addresses"], *launch["descriptors"])
    }


def without_addresses(kept: Kept, launch: dict[str, Any]) -> tuple[dict[str, int], list[bytes]]:
    at = {place: number for number, place in enumerate(launch["places"])}
    cut = {at[place] for place, _, _ in (*launch["addresses"], *launch["descriptors"])}
    return kept.numbers, [each[8:] if n in cut else each for n, each in enumerate(kept.parameters)]


@contextlib.contextmanager
def learning() -> Iterator[list[dict[str, Any]]]:
    """A context that gives the launches that are learnt in it, in their order."""
    learnt: list[dict[str, Any]] = []
    noted = native.launch_of

    def keep(*of: Any) -> dict[str, Any] | None:
        found = noted(*of)
        learnt.append(found or {})
        return found

    native.launch_of = keep
    yield learnt
    native.launch_of = noted


def same(fake: Fake, chosen: _Way, call: Call) -> dict[str, Any]:
    """How the launches of a call by Triton, by Python's replay and by C++ differ."""
    with tuning_cache.forced(forward=chosen[0], backward=chosen[1]):
        with learning() as learnt:
            call.run()  # compiles, records and teaches
        recorded_launches.forget()
        fake.forget()
        os.environ[NATIVE_LAUNCHER] = "0"
        native.extension.cache_clear()
        call.run()
        of_triton = fake.launches()
        os.environ[NATIVE_LAUNCHER] = "1"
        native.extension.cache_clear()
        fake.forget()
        out = call.run()
        of_cpp = fake.launches()
    learnt = learnt[-len(of_cpp) :]  # forward was learnt alone before
    different = [
        launch["function"]
        for one, other, launch in zip(of_triton, of_cpp, learnt, strict=True)
        if without_addresses(one, launch) != without_addresses(other, launch)
    ]
    forward, backward = learnt[:1], learnt[1:]
    places = [addresses_in(kept, launch) for kept, launch in zip(of_cpp[1:], backward, strict=True)]
    together: dict[int, set[int]] = {}
    for each in places:
        for tensor, address in each.items():
            together.setdefault(tensor, set()).add(address)
    first = addresses_in(of_cpp[0], forward[0])
    # In forward: q, k, v, out, logsumexp. In backward: gradient, q, k, v, out, logsumexp, dq, dk, dv, buffers.
    named = [call.gradient, call.q, call.k, call.v, out, None, call.q.grad, call.k.grad, call.v.grad]
    if call.side_by_side:  # in place of the last three there is what has them as its columns
        del named[7:]
    right = all(
        address == {named[tensor].data_ptr()}  # pyright: ignore[reportOptionalMemberAccess]
        for tensor, address in together.items()
        if tensor < len(named) and named[tensor] is not None
    )
    return {
        "count": len(of_cpp),
        "native": in_cpp(out),
        "different": different,
        "of the caller": right
        and [first[n] for n in range(4)] == [t.data_ptr() for t in (call.q, call.k, call.v, out)],
        "consistent": all(len(each) == 1 for each in together.values()) and together[5] == {first[4]},
        "aligned": not any(address % 16 for each in together.values() for address in each),
    }


def parts() -> dict[str, tuple[list[Tensor], Callable[..., Any]]]:
    """Calls of the fused parts: their inputs, and what is called with them."""

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype).requires_grad_()

    x, branch, weight = made(3, 5, 48), made(3, 5, 48), made(48)
    both = torch.zeros(15, 2 * 40, dtype=torch.bfloat16)
    halves = [half.detach().requires_grad_() for half in both.tensor_split(2, dim=-1)]
    heads = [torch.zeros(2, 7, n, 16, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for n in (4, 2)]
    tables = [torch.zeros(9, 16), torch.zeros(9, 16)]
    return {
        "norm": ([x, weight], lambda x, weight: norm.rms_norm(x, None, weight, 1e-5)[1]),
        "norm with its sum": ([x, branch, weight], lambda x, branch, weight: norm.rms_norm(x, branch, weight, 1e-5)),
        "norm of two dtypes": (
            [made(4, 48, dtype=torch.float32), made(4, 48), made(48, dtype=torch.float32)],
            lambda x, branch, weight: norm.rms_norm(x, branch, weight, 1e-5, torch.bfloat16),
        ),
        "mlp": ([made(6, 40), made(6, 40)], mlp.silu_product),
        "mlp of halves": (halves, mlp.silu_product),
        "layer norm": ([x, weight, made(48)], lambda x, weight, bias: norm.layer_norm(x, weight, bias, 1e-5)),
        "layer norm without a bias": ([x, weight], lambda x, weight: norm.layer_norm(x, weight, None, 1e-5)),
        "gelu": ([x, weight], mlp.biased_gelu),
        "gelu by tanh": ([x], lambda x: mlp.biased_gelu(x, tanh=True)),
        "rope": ([*heads, *tables], rope.rotated),
    }


def same_part(fake: Fake, inputs: list[Tensor], function: Callable[..., Any]) -> dict[str, Any]:
    """How the launches of a part by Triton and by C++ differ, and whether C++ read and wrote the caller's tensors."""

    def run() -> tuple[list[Tensor], list[Kept]]:
        fake.forget()
        out = function(*inputs)
        outputs = list(out) if isinstance(out, tuple) else [out]
        trained = [each for each in inputs if each.requires_grad]
        gradients = torch.autograd.grad(outputs, trained, [torch.zeros_like(each) for each in outputs])
        return [*outputs, *gradients], fake.launches()

    with learning() as learnt:
        run()
    os.environ[NATIVE_LAUNCHER] = "0"
    native.extension.cache_clear()
    _, of_triton = run()
    os.environ[NATIVE_LAUNCHER] = "1"
    native.extension.cache_clear()
    results, of_cpp = run()
    forward = addresses_in(of_cpp[0], learnt[0])
    written = {address for kept, launch in zip(of_cpp, learnt, strict=True) for address in addresses_of(kept, launch)}
    return {
        "count": len(of_cpp),
        "native": in_cpp(results[0]),
        "different": [
            launch["function"]
            for one, other, launch in zip(of_triton, of_cpp, learnt, strict=True)
            if without_addresses(one, launch) != without_addresses(other, launch)
        ],
        "of the caller": all(forward[n] == each.data_ptr() for n, each in enumerate(inputs) if n in forward)
        and all({each.data_ptr(), each.untyped_storage().data_ptr()} & written for each in results),
    }


def one_used(fake: Fake, name: str, at: int) -> list[Any]:
    """Call a part twice and use one of its outputs. Returns of the second call whether it ran in C++, how many kernels
    it launched, and whether each trained input has a gradient. Autograd gives a Function in Python zeros for the
    gradient of an output that nobody uses."""
    inputs, function = parts()[name]
    trained = [each for each in inputs if each.requires_grad]

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        out = function(*inputs)[at]
        return out, torch.autograd.grad(out, trained, torch.zeros_like(out))

    native.forget()
    run()
    fake.forget()
    out, gradients = run()
    return [in_cpp(out), len(fake.launches()), all(gradient is not None for gradient in gradients)]


def addresses_of(kept: Kept, launch: dict[str, Any]) -> set[int]:
    """The addresses that a launch was given."""
    at = {place: number for number, place in enumerate(launch["places"])}
    return {int.from_bytes(kept.parameters[at[place]], "little") for place, _, _ in launch["addresses"]}


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def backward_in_cpp(call: Call) -> dict[str, bool]:
    """By what is unusual of a call whose launches are known: whether its backward still ran without Python."""
    found: dict[str, bool] = {}
    passes: list[bool] = []
    own = attention._backward

    def counted(*of: Any, **more: Any) -> Any:
        passes.append(True)
        return own(*of, **more)

    # The operator calls what it was made of, and Python what the module names.
    attention._backward = counted
    library = torch.library.Library("stepscope", "IMPL")
    library.impl("flash_attention_backward", counted, "CPU")

    def ask(what: str, run: Callable[[], object]) -> None:
        call.run()
        passes.clear()
        run()
        found[what] = not passes

    call.run()
    ask("a plain call", call.run)
    wide = torch.zeros(1, 2, 96, 128, dtype=torch.bfloat16)[..., :64]
    ask("a gradient that lies in another way", lambda: call.run(wide))

    def unpacked(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2) if tensor.dim() == 4 else tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpacked):
        ask("a saved tensor that came back in another way", call.run)

    def deterministic() -> None:
        torch.use_deterministic_algorithms(mode=True)
        try:
            call.run()
        finally:
            torch.use_deterministic_algorithms(mode=False)

    ask("sums in a fixed order", deterministic)

    def profiled() -> None:
        out = call.forward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            out.backward(call.gradient)

    ask("a profiler", profiled)

    def under_a_mode() -> None:
        out = call.forward()
        with Mode():
            out.backward(call.gradient)

    ask("a mode", under_a_mode)
    shifted = torch.zeros(call.gradient.numel() + 1, dtype=torch.bfloat16)[1:].view(call.gradient.shape)
    ask("an address that is not aligned", lambda: call.run(shifted))
    ask("another scale", lambda: call.run(scale=0.3))
    ask("what was forgotten", lambda: (native.forget(), call.run()))
    library._destroy()
    attention._backward = own
    call.run()
    return found


def inference(call: Call) -> dict[str, Any]:
    """Calls without gradients, and then one with them."""
    passes: list[bool] = []
    own = attention._forward

    def counted(*of: Any, **more: Any) -> Any:
        passes.append(True)
        return own(*of, **more)

    with torch.no_grad():
        plain = not call.forward().requires_grad
        native.forget()
        call.forward()
        attention._forward = counted
        call.forward()
        attention._forward = own
    out = call.forward()
    out.backward(call.gradient)
    return {
        "no gradient": plain, "inference without Python": not passes,
        "after inference": [in_cpp(out), call.q.grad is not None],
    }  # fmt: skip


def promises(fake: Fake, call: Call) -> dict[str, Any]:
    """What autograd promises of any function: what it says where a call cannot be, and what it gives."""
    call.run()
    found: dict[str, Any] = {"twice": said(lambda: call.run().backward(call.gradient))}

    def changed() -> None:
        out = call.forward()
        with torch.no_grad():
            call.q.add_(1)
        out.backward(call.gradient)

    found["changed"] = said(changed)

    def second() -> None:
        (gradient,) = torch.autograd.grad(call.forward(), call.q, call.gradient, create_graph=True)
        gradient.sum().backward()

    found["second derivative"] = said(second)
    fake.fail(2)
    found["failed"] = said(call.forward)
    fake.fail(0)
    found |= inference(call)
    out = call.forward()
    assert out.grad_fn is not None
    kept = {saved.name: saved.tensor.data_ptr() for saved in saved_tensors(out.grad_fn)}
    given = {"saved[0]": call.q, "saved[1]": call.k, "saved[2]": call.v, "saved[3]": out}
    found["kept"] = sorted(kept), all(kept[name] == tensor.data_ptr() for name, tensor in given.items())
    found["operator"] = {saved.operator for saved in saved_tensors(out.grad_fn)} == {"FlashAttention"}
    call.k.requires_grad = False
    call.run()
    found["frozen"] = [tensor.grad is not None for tensor in (call.q, call.k, call.v)]
    call.k.requires_grad_()
    done: list[bool] = []

    def many() -> None:
        own = Call()
        for _ in range(100):
            done.append(in_cpp(own.run()))

    threads = [threading.Thread(target=many) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fake.forget()
    known = native.extension()
    assert known is not None
    options = 1, native.bits(0.125), tuning_cache.configuration_number()
    (out,) = known.call(ATTENTION.number, [call.q, call.k, call.v], options, 9)
    out.backward(call.gradient)
    return {**found, "threads": sum(done), "streams": [each.numbers["stream"] for each in fake.launches()]}


def many_ways(fake: Fake, call: Call) -> dict[str, Any]:
    """More calls than are kept, each by another scale: what the first of them is then, and a graph from before."""
    for _ in range(2):
        call.run(scale=0.5)
    out = call.forward(scale=0.5)
    before = in_cpp(out)
    with torch.no_grad():
        for number in range(MOST_WAYS):
            call.forward(scale=1.0 + number)
    forgotten = not in_cpp(call.run(scale=0.5))
    again = in_cpp(call.run(scale=0.5))
    fake.forget()
    out.backward(call.gradient)
    return {"before": before, "forgotten": forgotten, "again": again, "backward launches": len(fake.launches())}


def failing(folder: str) -> str:
    """What is said where no compiler is."""
    os.environ |= {"STEPSCOPE_CACHE": f"{folder}/other", "CXX": "/no/compiler"}
    native.extension.cache_clear()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert native.extension() is None
    return said.getvalue().strip()


def main(folder: str) -> None:
    fake = Fake()
    assert native.extension() is not None
    chosen = {
        "hopper": (way("apart", hopper=True), Call()),
        "hopper, grouped and strided": (way("apart", hopper=True), Call(4, 2, strided=True)),
        "hopper, side by side": (way("apart", hopper=True), Call(4, 2, strided=True, side_by_side=True)),
        "pointers, side by side": (way("apart"), Call(strided=True, side_by_side=True)),
        "pointers": (way("apart"), Call()),
        "descriptors": (way("apart", tma=True), Call()),
        "joint": (way("joint"), Call()),
        "joint, by shares": (way("joint"), Call(4, 2, strided=True)),
        "pointers, by shares, side by side": (way("apart"), Call(4, 2, strided=True, side_by_side=True)),
    }
    found: dict[str, Any] = {"parts": {name: same_part(fake, *each) for name, each in parts().items()}}
    found |= {
        "unused": {f"{name} {at}": one_used(fake, name, at) for name in ("norm with its sum", "rope") for at in (0, 1)}
    }
    found["same"] = {}
    for name, each in chosen.items():
        few = "shares" in name
        with mock.patch.object(flash_launch, "has_few_programs", lambda *_, few=few: few):
            found["same"][name] = same(fake, *each)
    forward, backward = way("apart", hopper=True)
    with tuning_cache.forced(forward=forward, backward=backward):
        found |= {"backward in C++": backward_in_cpp(Call()), "promises": promises(fake, Call())}
        found |= {"many": many_ways(fake, Call()), "lessons": lessons(fake)}
    print(json.dumps({**found, "failing": failing(folder)}))


if __name__ == "__main__":
    if not (here := os.environ["TRITON_LIBCUDA_PATH"]) or not os.path.exists(f"{here}/libcuda.so.1"):  # noqa: PTH110
        raise SystemExit("build the fake driver first")
    main(sys.argv[1])
