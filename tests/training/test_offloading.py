"""What blocks keep in the host's memory: what goes there, comes back, and when. Gradients: test_checkpointing.py.

A CPU has no stream: its copies are made at once, from its memory to its memory. What a device is spared, and that
nothing is read before it is there, only a GPU shows (tests/gpu/test_gpu.py)."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepscope.core.checkpointing import BLOCKS_ON_THE_WAY, spans_of
from stepscope.training.checkpointing import KEPT_OPERATORS, HostCopies, KeptByBlock, checkpointed, one_after_another

WIDTH = 8


class Block(nn.Module):
    """x + down(relu(up(x)))"""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def blocks(count: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(count))


def copies() -> HostCopies:
    return HostCopies(KEPT_OPERATORS["selective"])


def gradients(model: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    run(model, x).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("offloaded", [1, 3, 5])
def test_steps_use_the_hosts_memory_again(offloaded: int, monkeypatch: pytest.MonkeyPatch):
    """A piece for what `up` returns of each block that offloads, and none for `down`, for which backward does not ask;
    the second step and the third take the same."""
    made: list[torch.device] = []
    piece = HostCopies.piece

    def counted(self: HostCopies, device: torch.device) -> Tensor:
        made.append(device) if not self.pieces else None
        return piece(self, device)

    monkeypatch.setattr(HostCopies, "piece", counted)
    model, run = blocks(5), one_after_another(spans_of(f"offload-{offloaded}", 5))
    x = torch.randn(4, WIDTH, requires_grad=True)
    plain = gradients(model, lambda model, x: nn.Sequential(*model)(x), x)
    for _ in range(3):
        found = gradients(model, run, x)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert len(made) == offloaded


def test_memory_is_let_go_two_blocks_later_and_comes_back_one_offloading_block_ahead(
    monkeypatch: pytest.MonkeyPatch,
):
    """Blocks 0, 1, 3 and 4 of six offload. Backward begins: the device lets go of what the last ones still hold, and
    what 4 keeps comes back. When backward reaches 4, what 3 keeps does, and so on."""
    events: list[str] = []
    numbers: dict[int, int] = {}

    def noted(name: str) -> None:
        original = getattr(KeptByBlock, name)

        def method(self: KeptByBlock) -> None:
            events.append(f"{name} {numbers.setdefault(id(self), len(numbers))}")
            original(self)

        monkeypatch.setattr(KeptByBlock, name, method)

    for name in ("end_forward", "let_go", "fetch", "begin_again"):
        noted(name)
    spans = spans_of("offload-4", 6)
    assert [(span.on_host, span.blocks) for span in spans] == [(True, 2), (False, 1), (True, 2), (False, 1)]
    gradients(blocks(6), one_after_another(spans), torch.randn(2, WIDTH, requires_grad=True))
    assert BLOCKS_ON_THE_WAY == 2
    once = list(dict.fromkeys(events))  # a block asks for its own again before it begins
    assert once == [
        "end_forward 0", "end_forward 1", "let_go 0", "end_forward 2", "let_go 1", "end_forward 3", "let_go 2",
        "fetch 3", "let_go 3", "fetch 2", "begin_again 3", "fetch 1", "begin_again 2", "fetch 0", "begin_again 1",
        "begin_again 0",
    ]  # fmt: skip


def test_a_forward_whose_loss_is_dropped_holds_nothing():
    model, run = blocks(3), one_after_another(spans_of("offload-3", 3))
    x = torch.randn(2, WIDTH, requires_grad=True)
    kept = [weakref.ref(one) for one in made_by(lambda: run(model, x))]
    gc.collect()
    assert len(kept) == 3 and not any(one() for one in kept)
    plain = gradients(model, lambda model, x: nn.Sequential(*model)(x), x)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, run, x), plain, strict=True))


def made_by(act: Any) -> list[KeptByBlock]:
    """What a forward's blocks keep, while it runs."""
    with pytest.MonkeyPatch.context() as patched:
        made: list[KeptByBlock] = []
        block = HostCopies.block

        def noted(self: HostCopies) -> KeptByBlock:
            made.append(block(self))
            return made[-1]

        patched.setattr(HostCopies, "block", noted)
        act()
        return made


def test_what_a_step_on_a_gpu_has_in_the_hosts_memory_stays_there():
    """As the seeds that some of PyTorch's kernels return: a piece of the GPU's may be read by a copy still."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert copies().takes(cpu), "of a step on a CPU"
    host, operator = copies(), torch.ops.aten.mm.default
    assert host.takes(gpu) and not host.takes(cpu)
    kept, seed = host.block(), torch.tensor(1234567)
    kept.keep(operator, seed)
    kept.keep(operator, torch.ones(1))
    kept.end_forward()
    kept.let_go()
    kept.begin_again()
    assert not host._piece_count and torch.equal(kept.take(operator), seed)


def test_outputs_lie_one_behind_another():
    """Each begins at a multiple of 512 bytes; what is too large for the rest of a piece goes on in the next."""
    kept, cpu = copies().block(), torch.device("cpu")
    first, second, third = (kept.places(count, cpu) for count in (3, 32 * 2**20 - 512, 5))
    assert [len(place) for place in (*first, *second, *third)] == [3, 32 * 2**20 - 512, 5]
    assert second[0].data_ptr() - first[0].data_ptr() == 512
    across = kept.places(32 * 2**20, cpu)
    assert [len(place) for place in across] == [32 * 2**20 - 512, 512]
    assert not kept.places(0, cpu)


def test_what_was_written_over_while_it_left_is_named():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        product = x @ weight
        product.mul_(2.0)
        return (product @ weight).relu()

    x, weight = torch.randn(3, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="wrote in place over what checkpointing offload-K keeps: choose"):
        checkpointed(block, x, weight, contexts=copies().block().contexts)


def test_a_host_without_room_is_named(monkeypatch: pytest.MonkeyPatch):
    """Two pieces are there when no more memory can be had, as where what may be locked is limited."""

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    host = copies()
    for _ in range(2):
        host.piece(torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RuntimeError, match=r"no room for what offload-K keeps beyond 0\.1 GiB: choose fewer blocks"):
        host.piece(torch.device("cpu"))


def test_tensors_come_back_as_they_were():
    """Every layout that is dense keeps its strides; another is laid out anew, with the same values."""
    host = copies()
    dense = torch.randn(2, 3, 4, 5).transpose(1, 2)
    with_holes = torch.randn(6, 8)[:, ::2]
    large = torch.arange(9 * 2**20, dtype=torch.int32)  # more than a piece
    kept = host.block()
    tensors = [dense, with_holes, large, torch.empty(0), torch.randn(3).to(torch.float8_e4m3fn)]
    for tensor in tensors:
        kept.keep(torch.ops.aten.mm.default, (tensor, None, 7))
    kept.keep(torch.ops.aten.mm.default, torch.ones(1))  # the last is not kept
    kept.end_forward()
    kept.begin_again()
    for tensor in tensors:
        back, nothing, number = kept.take(torch.ops.aten.mm.default)
        assert (nothing, number, back.dtype) == (None, 7, tensor.dtype)
        assert back.stride() == (tensor.stride() if tensor is not with_holes else (4, 1))
        assert torch.equal(back.float(), tensor.float())
    assert kept.take(torch.ops.aten.mm.default) is None
