"""Collectives of a step, counted on PyTorch's fake process group: one process is a rank of four, and sends nothing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepscope.core.evidence import CollectiveCalls
from stepscope.recording.flops import TrafficCounts
from stepscope.recording.observe import whole_bytes

RANKS, WIDTH = 4, 16
MATRIX, BIAS = 4 * WIDTH * WIDTH, 4 * WIDTH


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def counted(run: Callable[[], object], phase: str = "backward") -> list[tuple[Any, ...]]:
    with TrafficCounts() as counts:
        counts.phase_begins(phase)
        run()
    return [plain(call) for call in counts.counted]


def plain(call: CollectiveCalls) -> tuple[Any, ...]:
    assert call.ranks == RANKS
    return call.phase, call.kind, call.calls, call.message_bytes, call.sent_bytes, call.received_bytes


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def backward(module: nn.Module) -> None:
    module(torch.ones(4, WIDTH)).sum().backward()


def test_calls_of_one_kind_in_one_phase_go_together():
    message = torch.ones(12)  # 48 bytes

    def run() -> None:
        dist.all_reduce(message)
        dist.all_reduce(message, async_op=True)
        dist.barrier()

    assert counted(run, "optimizer") == [
        ("optimizer", "all-reduce", 2, 96, 2 * 72, 2 * 72),  # 2 (n - 1) / n of 48 bytes, twice
        ("optimizer", "barrier", 1, 1, 0, 0),  # a byte, which gives the barrier its device
    ]


def test_the_message_of_a_gather_and_of_a_scatter_is_the_whole():
    part, whole = torch.ones(4), torch.ones(16)

    def run() -> None:
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_gather([torch.empty(4) for _ in range(RANKS)], part)

    assert counted(run) == [
        ("backward", "all-gather", 2, 128, 96, 96),
        ("backward", "reduce-scatter", 1, 64, 48, 48),
    ]


@pytest.mark.parametrize(("root", "sent", "received"), [(0, 144, 0), (1, 0, 48)])
def test_a_broadcast_leaves_its_root_and_reaches_the_others(root: int, sent: int, received: int):
    assert counted(lambda: dist.broadcast(torch.ones(12), root)) == [
        ("backward", "broadcast", 1, 48, sent, received)
    ]  # fmt: skip


def test_a_receive_sends_nothing():
    def run() -> None:
        dist.send(torch.ones(12), 1)
        dist.recv(torch.ones(8), 1)

    assert counted(run) == [("backward", "send and receive", 2, 80, 48, 32)]


def test_collectives_below_a_dtensor_are_seen():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    module = two_layers()
    parallelize_module(module, init_device_mesh("cpu", (RANKS,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    size = 4 * 4 * WIDTH
    assert counted(lambda: backward(module)) == [("backward", "all-reduce", 1, size, 1.5 * size, 1.5 * size)]


def test_fsdp_gathers_twice_and_scatters_once():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module, mesh = two_layers(), init_device_mesh("cpu", (RANKS,))
    whole = whole_bytes(module.parameters())
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    size = 2 * (MATRIX + BIAS)
    assert whole_bytes(module.parameters()) == whole == (size, size)  # however it is sharded
    backward(module)
    gathered, scattered = counted(lambda: backward(module))
    # The second layer, which backward needs first, is not let go after forward: it is gathered once.
    assert gathered[:4] in (("backward", "all-gather", 4, 2 * size), ("backward", "all-gather", 3, 1.5 * size))
    assert scattered == ("backward", "reduce-scatter", 2, size, 0.75 * size, 0.75 * size)
