"""The lessons as modules, given what a loop of somebody else's may hold: odd tensors, odd loops, odd uses."""

import copy
import functools
import gc
import io
import warnings
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from stepscope import parallel
from stepscope.core.errors import InputError
from stepscope.recording.flops import TrafficCounts
from stepscope.recording.observe import whole_bytes
from tests.training.parallel.ranks import on_ranks


class OddTensors(nn.Module):
    """Parameters and buffers of dtypes that gloo lacks, with gaps between their numbers, or with one number for all."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.gaps = nn.Parameter(torch.full((4, 6), number)[:, ::2])
        self.turned = nn.Parameter(torch.full((3, 2), number).t())
        self.register_buffer("short", torch.full((2,), number, dtype=torch.int16))
        self.register_buffer("mask", torch.full((2, 2), number > 1))
        self.register_buffer("turns", torch.full((2,), number * 1j))
        self.register_buffer("spread", torch.full((1, 1), number).expand(3, 3))
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("count", torch.tensor(int(number)))


KINDS = (parallel.OverlappedDataParallel, parallel.BucketedDataParallel, parallel.FullyShardedDataParallel)


def _small(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _away(found: dict[str, Tensor], wanted: nn.Module) -> float:
    """How far the parameters are from those of one process."""
    return max(float((found[name] - one).detach().abs().max()) for name, one in wanted.named_parameters())


def _whole(module: Any) -> dict[str, Tensor]:
    sharded = isinstance(module, parallel.FullyShardedDataParallel)
    return module.full_parameters() if sharded else dict(module.module.named_parameters())


def _numbers(tensor: Tensor) -> str:
    """The different numbers in a tensor."""
    return " ".join(sorted({str(number) for number in tensor.detach().flatten().tolist()}))


def odd_tensors(rank: int, ranks: int) -> list[list[str]]:
    """What is in each tensor after a wrapper has begun, and what an optimizer made of two."""
    found: list[list[str]] = []
    for kind in KINDS:
        module: Any = kind(OddTensors(rank + 1.0))
        found.append([_numbers(one) for one in (*_whole(module).values(), *module.buffers())])
    own = OddTensors(rank + 1.0)
    optimizer = parallel.ShardedOptimizer(own.parameters(), torch.optim.SGD, lr=0.5)
    for parameter in own.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found.append([_numbers(one) for one in own.parameters()])
    return found


def several_backwards(rank: int, ranks: int) -> list[float]:
    """How far ranks end from one process that splits its batch, which run backward for each part, at once or in turns
    with forward."""
    data = torch.randn(2, 3, ranks, 4, 6, generator=torch.Generator().manual_seed(1))  # steps, parts, ranks
    found: list[float] = []
    for kind in KINDS:
        for in_turns in (True, False):
            alone, module = _small(0), kind(_small(rank))
            one, other = (torch.optim.AdamW(of.parameters(), lr=0.01) for of in (alone, module))
            for step in data:
                alone(step).square().mean().backward()
                losses: list[Tensor] = []
                for part in step[:, rank]:
                    losses.append(module(part).square().mean() / len(step))
                    if in_turns:
                        losses.pop().backward()
                for loss in losses:
                    loss.backward()
                module.finish_gradient_synchronization()
                for optimizer in (one, other):
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=not in_turns)
            found.append(_away(_whole(module), alone))
    return found


def shards_outside_a_step(rank: int, ranks: int) -> dict[str, Any]:
    """What others see of a fully sharded module while no step runs."""
    module = parallel.FullyShardedDataParallel(_small(rank), compute_dtype=torch.bfloat16)
    state = module.state_dict()
    other = parallel.FullyShardedDataParallel(_small(7))
    other.load_state_dict(state)
    said = ""
    try:
        copy.deepcopy(module)
    except TypeError as error:
        said = str(error)
    return {
        "loaded": _away(_whole(other), _small(0)),
        "state": sum(one.numel() for one in state.values()),
        "whole": whole_bytes(module.module.parameters()),
        "kept": sum(one.untyped_storage().nbytes() for one in module.module.parameters()),
        "copied": said,
    }


class Pair(NamedTuple):
    """What a module may take and give."""

    one: Tensor
    other: Tensor | None


class InPairs(nn.Module):
    """A module that takes a pair, and gives one in a dict with some of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 6)

    def forward(self, pair: Pair) -> dict[str, Any]:
        return {"pair": Pair(torch.tanh(self.inner(pair.one)) @ self.weight, None), "rows": [self.weight[:2]]}


class OddUses(nn.Module):
    """A module that changes outputs in place, and reads a parameter that another module gave it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.pairs = nn.Linear(6, 6), nn.ReLU(inplace=True), InPairs()

    def forward(self, x: Tensor) -> Tensor:
        given = self.pairs(Pair(self.relu(self.first(x)), x))
        return given["pair"].one + 0.1 * given["rows"][0].sum(0).to(x.dtype)


def odd_uses(rank: int, ranks: int) -> list[Any]:
    """How far fully sharded ranks end from one process, and what PyTorch warned of."""
    data = torch.randn(3, ranks, 4, 6, generator=torch.Generator().manual_seed(1))
    found: list[Any] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for dtype in (None, torch.bfloat16):
            torch.manual_seed(0)
            alone, module = OddUses(), parallel.FullyShardedDataParallel(OddUses(), compute_dtype=dtype)
            module.load_state_dict(parallel.FullyShardedDataParallel(copy.deepcopy(alone)).state_dict())
            one, other = (torch.optim.SGD(of.parameters(), lr=0.05) for of in (alone, module))
            for step in data:
                alone(step.flatten(0, 1)).square().mean().backward()
                module(step[rank]).float().square().mean().backward()
                module.finish_gradient_synchronization()
                with torch.no_grad():
                    module(step[rank])  # its parameters are those before the update
                for optimizer in (one, other):
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(_away(_whole(module), alone))
    return [*found, sorted({str(one.message) for one in said if "backward" in str(one.message)})]


def _stepped(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def saved_optimizer(rank: int, ranks: int) -> dict[str, Any]:
    """How far an optimizer that goes on from a saved state ends from one that never stopped, and what is refused."""

    def made() -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(size)) for size in (5, 3, 4, 2)]

    def sharded(parameters: list[nn.Parameter], rate: float) -> parallel.ShardedOptimizer:
        return parallel.ShardedOptimizer(parameters, torch.optim.AdamW, lr=rate)

    straight = made()
    whole = torch.optim.AdamW(straight, lr=0.1)
    begun, again, of_one = made(), made(), made()
    first = sharded(begun, 0.1)
    _stepped(straight, whole, range(3))
    _stepped(begun, first, range(3))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    found: dict[str, Any] = {"away": [], "rate": []}
    for parameters, state in ((again, saved), (of_one, whole.state_dict())):
        other = sharded(parameters, 0.5)
        other.load_state_dict(copy.deepcopy(state))
        with torch.no_grad():
            for parameter, begin in zip(parameters, begun, strict=True):
                parameter.copy_(begin)
        _stepped(parameters, other, range(3, 6))
        found["rate"].append(other.param_groups[0]["lr"])
        found["kept"] = sum(len(one) for one in other.state_dict()["state"].values())
    _stepped(straight, whole, range(3, 6))
    for parameters in (again, of_one):
        found["away"].append(
            max(float((a - b).detach().abs().max()) for a, b in zip(parameters, straight, strict=True))
        )
    try:
        sharded(made(), 0.1).load_state_dict({**saved, "rank": 1 - rank})
    except InputError as error:
        found["refused"] = str(error)
    return found


def cycled(rank: int, ranks: int) -> list[float]:
    """The rate and the first beta of one process and of a sharded optimizer under a scheduler that changes both."""
    found: list[float] = []
    for kind in (torch.optim.AdamW, lambda own: parallel.ShardedOptimizer(own, torch.optim.AdamW)):
        parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = kind(parameters)
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        for step in range(4):
            _stepped(parameters, optimizer, range(step, step + 1))
            rates.step()
        found += [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0], float(parameters[1][0])]
    return found


def partly_frozen(rank: int, ranks: int) -> dict[str, int]:
    """What a rank keeps and sends of parameters most of which are frozen."""
    parameters = [nn.Parameter(torch.ones(1000), requires_grad=False), *(nn.Parameter(torch.ones(8)) for _ in range(4))]
    optimizer = parallel.ShardedOptimizer(parameters, torch.optim.SGD, lr=0.5, momentum=0.9)
    for parameter in parameters[1:]:
        parameter.grad = torch.ones_like(parameter)
    counts = TrafficCounts()
    with counts:
        optimizer.step()
    return {
        "kept": sum(one["momentum_buffer"].numel() for one in optimizer.state.values()),
        "sent": sum(one.message_bytes for one in counts.counted),
    }


def sharded_twice(rank: int, ranks: int) -> str:
    """What is said of shards of which each would become the first rank's."""
    module = parallel.FullyShardedDataParallel(_small(rank))
    try:
        parallel.ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.5)
    except InputError as error:
        return str(error)
    return ""


def frozen_at_times(rank: int, ranks: int) -> list[float]:
    """How far ranks end from one process that freezes a layer in some steps."""
    data = torch.randn(4, ranks, 4, 6, generator=torch.Generator().manual_seed(1))
    found: list[float] = []
    for kind in KINDS:
        alone, own = _small(0), _small(rank)
        for model in (alone, own):
            next(model.parameters()).requires_grad_(False)
        module = kind(own)
        one, other = (torch.optim.SGD(of.parameters(), lr=0.1) for of in (alone, module))
        for number, step in enumerate(data):
            for of in (alone, module):
                next(of.parameters()).requires_grad_(number in (1, 2))
            alone(step.flatten(0, 1)).square().mean().backward()
            module(step[rank]).square().mean().backward()
            module.finish_gradient_synchronization()
            for optimizer in (one, other):
                optimizer.step()
                optimizer.zero_grad()
        found.append(_away(_whole(module), alone))
    return found


class Embedded(nn.Module):
    """An embedding, a norm and a product, of which the norm alone holds no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(9, 16), nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens)))


def replicated_norms(rank: int, ranks: int) -> dict[str, Any]:
    """How far steps with whole norms end from one process's, and what a rank then keeps and has in common."""
    torch.manual_seed(0)
    alone = Embedded()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 9, (2, 10 * ranks, 7), generator=generator)
    weights = torch.randn(2, 10 * ranks, 7, 5, generator=generator)
    mine = slice(10 * rank, 10 * (rank + 1))
    found: dict[str, Any] = {}
    for sums, dtype in (("ranks", None), ("batch", None), ("batch", torch.bfloat16)):
        one = copy.deepcopy(alone)
        own = copy.deepcopy(alone)
        module = parallel.FullyShardedDataParallel(own, dtype, replicated=parallel.without_matrices(own), sums=sums)
        optimizers = [torch.optim.SGD(of.parameters(), lr=0.1) for of in (one, module)]
        same: set[str] = set()
        for step in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (one(tokens[step]) * weights[step] / 2).sum().backward()
            (module(tokens[step, mine]).float() * weights[step, mine]).sum().backward()
            module.finish_gradient_synchronization()
            if step == 0:
                gradients = module.full_gradients()
                wanted = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
                same = {name for name, gradient in wanted.items() if torch.equal(gradients[name], gradient)}
            for optimizer in optimizers:
                optimizer.step()
        found[f"{sums} {dtype}"] = {
            "away": _away(_whole(module), one),
            "same": sorted(same),
            "kept": {name: parameter.numel() for name, parameter in module.named_parameters()},
            "norm": [float(p.detach().double().sum()) for p in module.replicated_parameters.values()],
        }
    return found


def sums_refused(rank: int, ranks: int) -> list[str]:
    """What is said where gradients cannot be summed over the batch."""
    said: list[str] = []
    for made in (
        lambda own: parallel.FullyShardedDataParallel(own, units=[own], sums="batch"),
        lambda own: parallel.FullyShardedDataParallel(own, sums="batch")(Pair(torch.ones(2, 6), None)),
    ):
        try:
            made(InPairs())
        except InputError as error:
            said.append(str(error))
    return said


def let_go(rank: int, ranks: int) -> list[bool]:
    """Whether a module that took part in a step is freed once nobody has it any more."""
    found: list[bool] = []
    for kind in (*KINDS, functools.partial(parallel.FullyShardedDataParallel, sums="batch")):
        module = kind(_small(0))
        module(torch.ones(2, 6)).sum().backward()
        module.finish_gradient_synchronization()
        kept = [weakref.ref(one) for one in (module, *module.parameters())]
        del module
        gc.collect()
        found.append(all(one() is None for one in kept))
    return found


CASES = (
    let_go,
    odd_tensors,
    several_backwards,
    shards_outside_a_step,
    odd_uses,
    saved_optimizer,
    cycled,
    partly_frozen,
    sharded_twice,
    frozen_at_times,
    replicated_norms,
    sums_refused,
)


def everything(rank: int, ranks: int) -> dict[str, Any]:
    """What each case finds, in one process a rank."""
    return {case.__name__: case(rank, ranks) for case in CASES}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_ranks(2, everything)


def test_ranks_begin_alike_whatever_the_tensors_are(found: list[dict[str, Any]]):
    begun = ["1.0", "1.0", "1", "False", "1j", "1.0", "", "1"]
    for of_rank in found:
        assert of_rank["odd_tensors"] == [begun, begun, begun, ["0.5", "0.5"]]


def test_a_second_backward_adds_to_the_mean(found: list[dict[str, Any]]):
    for of_rank in found:
        assert max(of_rank["several_backwards"]) < 1e-6


def test_a_module_shows_its_shards_while_no_step_runs(found: list[dict[str, Any]]):
    numbers = sum(parameter.numel() for parameter in _small(0).parameters())
    for of_rank in found:
        seen = of_rank["shards_outside_a_step"]
        assert seen["loaded"] == 0.0
        assert numbers / 2 <= seen["state"] <= numbers / 2 + 4  # each is padded
        assert seen["kept"] == 4 * seen["state"], "a tensor without storage stands in a module"
        assert seen["whole"] == [4 * numbers, 4 * numbers], "of their own dtype, which the formula of bytes is of"
        assert "not copied" in seen["copied"] and "\n" not in seen["copied"]


def test_a_unit_takes_and_gives_what_any_module_does(found: list[dict[str, Any]]):
    for of_rank in found:
        exact, halved, warned = of_rank["odd_uses"]
        assert exact < 1e-6 and halved < 0.02
        assert not warned


def test_a_sharded_optimizer_goes_on_from_what_was_saved(found: list[dict[str, Any]]):
    for rank, of_rank in enumerate(found):
        ends = of_rank["saved_optimizer"]
        assert max(ends["away"]) < 1e-6, "of its own part, and of one process's state"
        assert ends["rate"] == [0.1, 0.1]
        assert ends["kept"] == 2 * 3, "step and two moments of half of the parameters"
        assert f"of rank {1 - rank} of 2, and this is rank {rank} of 2" in ends["refused"]


def test_a_scheduler_finds_what_it_changes_in_a_sharded_optimizer(found: list[dict[str, Any]]):
    for of_rank in found:
        assert of_rank["cycled"][3:] == pytest.approx(of_rank["cycled"][:3])


def test_what_is_frozen_is_neither_shared_out_nor_sent(found: list[dict[str, Any]]):
    assert [of_rank["partly_frozen"] for of_rank in found] == [{"kept": 16, "sent": 4 * 4 * 8}] * 2


def test_shards_are_not_sharded_again(found: list[dict[str, Any]]):
    for of_rank in found:
        assert "own shards" in of_rank["sharded_twice"]


def test_a_layer_may_be_frozen_in_some_steps(found: list[dict[str, Any]]):
    for of_rank in found:
        assert max(of_rank["frozen_at_times"]) < 1e-6


def test_nothing_keeps_a_module_that_nobody_has(found: list[dict[str, Any]]):
    for of_rank in found:
        assert of_rank["let_go"] == [True] * (len(KINDS) + 1)


def test_norms_may_be_whole_on_every_rank(found: list[dict[str, Any]]):
    for of_rank in found:
        by_ranks, by_batch, in_16_bits = of_rank["replicated_norms"].values()
        for ends in (by_ranks, by_batch, in_16_bits):
            assert ends["kept"] == {
                "embedding.weight": 72, "head.weight": 40, "head.bias": 3, "norm.weight": 16, "norm.bias": 16,
            }  # fmt: skip
        assert by_ranks["away"] < 1e-5 and by_batch["away"] < 1e-5 and in_16_bits["away"] < 0.05
    assert [of_rank["replicated_norms"]["ranks None"]["norm"] for of_rank in found[1:]] == [
        found[0]["replicated_norms"]["ranks None"]["norm"]
    ]


def test_a_gradient_may_be_summed_as_one_process_sums_it(found: list[dict[str, Any]]):
    # Bit by bit: adding up what each rank summed of its samples rounds otherwise.
    for of_rank in found:
        ends = of_rank["replicated_norms"]
        assert "head.weight" not in ends["ranks None"]["same"]
        assert {"head.weight", "head.bias"} <= set(ends["batch None"]["same"])
        units, pairs = of_rank["sums_refused"]
        assert "leave out units" in units and "InPairs does not" in pairs
