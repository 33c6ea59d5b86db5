"""The lessons as modules of somebody's own loop: each rank has its part, and all end where one process would."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepscope.core.errors import InputError
from stepscope.core.strategies import strategy_named
from stepscope.training.parallel.step import Whole
from stepscope.training.training_step import Ranks
from tests.training.parallel.ranks import on_ranks

STEPS, PART = 4, 6


class Own(nn.Module):
    """A model with a tied matrix, a frozen parameter, a bias, and a module that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 5)
        self.frozen = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.second(torch.relu(self.first(x))))) * self.frozen[0].to(x.dtype)


def _made(seed: int) -> Own:
    torch.manual_seed(seed)
    return Own()


def _parallel(kind: str, module: nn.Module) -> Any:
    from stepscope import parallel

    makers: dict[str, Any] = {
        "overlap": parallel.OverlappedDataParallel,
        "bucketed": lambda own: parallel.BucketedDataParallel(own, bucket_mib=1e-4),  # several buckets
        "fsdp": parallel.FullyShardedDataParallel,
        "fsdp bf16": lambda own: parallel.FullyShardedDataParallel(own, compute_dtype=torch.bfloat16),
        "fsdp fp16": lambda own: parallel.FullyShardedDataParallel(own, compute_dtype=torch.float16),
    }
    return makers[kind](module)


def _optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    from stepscope import parallel

    if kind == "sharded":
        return parallel.ShardedOptimizer(parameters, torch.optim.AdamW, lr=0.01, weight_decay=0.0)
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0)


def trained(rank: int, ranks: int) -> dict[str, Any]:
    """How far the ranks end from one process, by kind, and what each of them keeps."""
    torch.manual_seed(1)
    data, wanted = torch.randn(STEPS, PART * ranks, 8), torch.randn(STEPS, PART * ranks, 5)
    mine = slice(rank * PART, (rank + 1) * PART)
    found: dict[str, Any] = {}
    for kind, optimizer_kind in (
        ("overlap", "whole"), ("overlap", "sharded"), ("bucketed", "sharded"), ("fsdp", "whole"),
        ("fsdp bf16", "whole"), ("fsdp fp16", "whole"),
    ):  # fmt: skip
        alone, spread = _made(0), _parallel(kind, _made(rank))  # the first rank's weights count
        one = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.0)
        other = _optimizer(optimizer_kind, spread.parameters())
        for step in range(STEPS):
            nn.functional.mse_loss(alone(data[step]), wanted[step]).backward()
            output = spread(data[step, mine])
            nn.functional.mse_loss(output.float(), wanted[step, mine]).backward()
            spread.finish_gradient_synchronization()
            for optimizer in (one, other):
                optimizer.step()
                optimizer.zero_grad()
        shards = hasattr(spread, "full_parameters")
        full = spread.full_parameters() if shards else dict(spread.module.named_parameters())
        state = [v for of in other.state.values() for v in of.values() if torch.is_tensor(v) and v.dim()]
        expected = dict(alone.named_parameters())
        found[f"{kind}, {optimizer_kind}"] = {
            "away": max(float((full[name] - value).detach().abs().max()) for name, value in expected.items()),
            "names": sorted(full) == sorted(expected),
            "dtype": str(spread(data[0, mine]).dtype),
            "masters": sorted({str(parameter.dtype) for parameter in spread.parameters()}),
            "kept": sum(parameter.numel() for parameter in spread.parameters()),
            "state": sum(value.numel() for value in state),
        }  # fmt: skip
    return found


def _ends(of_rank: dict[str, Any]) -> dict[str, Any]:
    return {kind: end for kind, end in of_rank.items() if kind not in ("scheduled", "unused")}


def unused(rank: int, ranks: int) -> list[str]:
    """What PyTorch's own says of a module that no step uses, as it is and where it looks for such."""
    from stepscope.training.parallel.strategies import pytorch

    said: list[str] = []
    for word in ("ddp", "ddp:unused=yes"):
        module = _made(0)
        whole = Whole(
            model=module, forward=module, blocks=(), make_optimizer=None, record=strategy_named(word),
            micro_batches=lambda batch: [batch], autocast=contextlib.nullcontext,
        )  # fmt: skip
        spread = pytorch.ddp(whole, Ranks())
        try:
            for _ in range(2):
                spread.forward(torch.ones(2, 8)).sum().backward()
            said.append("")
        except InputError as error:
            said.append(str(error))
    return said


def everything(rank: int, ranks: int) -> dict[str, Any]:
    """What the ranks find in one process each, which takes longer to start than all of this."""
    return {**trained(rank, ranks), "scheduled": scheduled(rank, ranks), "unused": unused(rank, ranks)}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def found(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    ranks: int = request.param
    return ranks, on_ranks(ranks, everything)


def test_all_end_where_one_process_does(found: tuple[int, list[dict[str, Any]]]):
    for of_rank in found[1]:
        for kind, end in _ends(of_rank).items():
            assert end["away"] < (0.03 if "16" in kind else 1e-6), kind
            assert end["names"], kind


def test_a_compute_dtype_is_that_of_the_output_and_not_of_what_is_trained(found: tuple[int, list[dict[str, Any]]]):
    for of_rank in found[1]:
        assert of_rank["fsdp bf16, whole"]["dtype"] == "torch.bfloat16"
        assert of_rank["fsdp fp16, whole"]["dtype"] == "torch.float16"
        assert all(end["masters"] == ["torch.float32"] for end in _ends(of_rank).values())


def test_a_module_that_no_step_uses_is_one_line_for_pytorch_s_own(found: tuple[int, list[dict[str, Any]]]):
    for of_rank in found[1]:
        refused, taken = of_rank["unused"]
        assert "say --parallel ddp:unused=yes" in refused and "\n" not in refused and not taken


def test_what_is_sharded_is_kept_in_parts(found: tuple[int, list[dict[str, Any]]]):
    ranks, ends = found
    whole = sum(parameter.numel() for parameter in _made(0).parameters())
    trained_whole = sum(parameter.numel() for parameter in _made(0).parameters() if parameter.requires_grad)
    for end in ends:
        assert end["overlap, whole"]["kept"] == whole
        shards = end["fsdp, whole"]["kept"]
        assert whole / ranks <= shards <= whole / ranks + len(list(_made(0).parameters()))  # each padded
    states = [end["overlap, sharded"]["state"] for end in ends]
    assert sum(states) == 2 * trained_whole and max(states) < 2 * trained_whole


def scheduled(rank: int, ranks: int) -> list[float]:
    """The weight of one parameter a rank after steps whose rate a scheduler changes, and with a closure."""
    from stepscope import parallel

    del rank
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(ranks)]
    groups = [{"params": parameters[:1], "lr": 1.0}, {"params": parameters[1:], "lr": 2.0}]
    unsaid = parallel.ShardedOptimizer([nn.Parameter(torch.ones(1))], torch.optim.AdamW)
    torch.optim.lr_scheduler.StepLR(unsaid, step_size=1)  # of a rate that nobody gave
    sharded = parallel.ShardedOptimizer(copy.copy(groups), torch.optim.SGD, lr=0.5)
    rates = torch.optim.lr_scheduler.StepLR(sharded, step_size=1, gamma=0.1)
    losses: list[float] = []
    for _ in range(2):
        sharded.zero_grad()

        def closure() -> Tensor:
            loss = torch.stack([parameter.sum() for parameter in parameters]).sum()
            loss.backward()
            return loss

        losses.append(float(sharded.step(closure)))
        rates.step()
    return [*losses, *(float(parameter[0].detach()) for parameter in parameters)]


def test_a_sharded_optimizer_takes_groups_closures_and_schedules(found: tuple[int, list[dict[str, Any]]]):
    # The first parameter goes down by 1 and 0.1, the others by 2 and 0.2.
    for of_rank in found[1]:
        loss, later, first, *others = of_rank["scheduled"]
        assert (first, *others) == pytest.approx((1 - 1.1, *[1 - 2.2] * len(others)), abs=1e-6)
        assert loss - later == pytest.approx(4 * (1 + 2 * len(others)))


def storages(rank: int, ranks: int) -> dict[str, list[int]]:
    """How many storages the averaged gradients lie in, and how many gradients have one of their own, by bucket size."""
    from stepscope import parallel

    found: dict[str, list[int]] = {}
    for mib in (1.0, 1e-5):
        spread = parallel.BucketedDataParallel(_made(0), bucket_mib=mib)
        for _ in range(2):
            spread.zero_grad(set_to_none=True)
            spread(torch.ones(3, 8)).sum().backward()
            spread.finish_gradient_synchronization()
        gradients = [p.grad for p in spread.parameters() if p.grad is not None]
        alone = [g for g in gradients if g.untyped_storage().nbytes() == g.nbytes]
        found[str(mib)] = [len({g.untyped_storage().data_ptr() for g in gradients}), len(alone)]
    return found


def test_averaged_gradients_are_the_message_itself():
    of_all, of_each = on_ranks(2, storages)[0].values()
    assert of_all == [1, 0]  # one bucket, of which every gradient is a view
    assert of_each == [7, 7]  # a bucket each: nothing was copied
