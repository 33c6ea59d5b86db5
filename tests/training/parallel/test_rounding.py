"""How far a loss may be from one process's: the bound by itself, and on four ranks in bf16 with several seeds."""

import dataclasses
import functools
import random
from typing import Any

import msgspec
import pytest
import torch

from stepscope.core.evidence import Correctness
from stepscope.core.model_config import configure
from stepscope.core.workloads import TextbookWorkload
from stepscope.training.parallel.collective import broadcast_from_first, trained
from stepscope.training.parallel.correctness import check_ranks, difference_bound
from stepscope.training.parallel.step import Spread, Strategy, Whole, replicated
from stepscope.training.parallel.strategies import ddp_textbook
from stepscope.training.training_step import Ranks, textbook_parts
from tests.training.parallel.ranks import Here, on_ranks

SMALL = configure("tiny", layers=2, d_model=32, d_ff=64, heads=4, vocabulary=128)
WORKLOAD = TextbookWorkload(model=SMALL, batch_size=16, seq_len=16)


@pytest.mark.parametrize("ways", [2, 3, 4, 5])
def test_one_more_draw_lies_within_and_a_mistake_beyond(ways: int):
    numbers = random.Random(ways)
    beyond = 0
    for _ in range(2000):
        draws = [[numbers.gauss(5, 1e-5) for _ in range(4)] for _ in range(ways + 1)]
        bound = difference_bound(draws[:-1], 4)
        away = max(abs(a / b - 1) for a, b in zip(draws[-1], draws[0], strict=True))
        beyond += away > bound
        assert bound < 5e-3  # a mistake of a thousandth of the loss is always seen
        twice = 2 * max(abs(a / b - 1) for way in draws[1:-1] for a, b in zip(way, draws[0], strict=True))
        assert ways < 4 or bound < 12 * twice
    assert beyond == 0


def test_the_bound_is_of_relative_errors_and_of_steps_that_differ():
    draws = [[5.0, 50.0], [5.1, 51.0], [4.9, 49.0]]
    assert difference_bound([[10 * loss for loss in way] for way in draws], 2) == pytest.approx(
        difference_bound(draws, 2)
    )
    # A batch that every step repeats has one error, and says less.
    assert difference_bound(draws, 1) > difference_bound(draws, 2)
    assert difference_bound(draws, 9) == difference_bound(draws, 2)
    assert difference_bound(draws[:1], 2) == 0 and difference_bound([[], []], 2) == 0


def loses_one_part(whole: Whole, ranks: Ranks) -> Spread:
    """Averages all gradients, but leaves out what the last rank found of the last norm."""
    broadcast_from_first(whole.model)

    def finish() -> None:
        norm = whole.model.get_parameter("norm.weight").grad
        if ranks.rank == ranks.ranks - 1 and norm is not None:
            norm.zero_()
        ddp_textbook.average_flat(list(trained(whole.model)))

    return replicated(whole, finish=finish)


def _off_by(share: float, whole: Whole, ranks: Ranks) -> Spread:
    right = ddp_textbook.ddp_flat(whole, ranks)

    def finish() -> None:
        right.finish()
        for parameter in trained(whole.model):
            assert parameter.grad is not None
            parameter.grad *= 1 + share

    return dataclasses.replace(right, finish=finish)


def steps_too_far(whole: Whole, ranks: Ranks) -> Spread:
    """Is right but for AdamW's rate, by two thousandths: no gradient and no step of SGD shows it."""
    right = ddp_textbook.ddp_flat(whole, ranks)
    assert right.optimizer is not None
    if isinstance(right.optimizer, torch.optim.AdamW):
        for group in right.optimizer.param_groups:
            group["lr"] *= 1.002
    return right


WRONG: dict[str, tuple[str, Strategy]] = {
    "loses one part": ("bf16", loses_one_part),
    "off by a thousandth": ("fp32", functools.partial(_off_by, 1e-3)),
    "off by a hundredth": ("bf16", functools.partial(_off_by, 1e-2)),
    "steps too far": ("fp32", steps_too_far),
}


def on_four(rank: int, ranks: int) -> dict[str, Any]:
    """The verdicts on a right strategy, by seed, and on wrong ones."""
    found: dict[str, Any] = {}

    def judge(what: str, workload: TextbookWorkload, strategy: Strategy | None = None) -> None:
        verdict = check_ranks(
            "ddp-flat", lambda: textbook_parts(workload, torch.device("cpu")), workload, torch.device("cpu"),
            Here(rank, ranks), strategy=strategy,
        )  # fmt: skip
        found[what] = msgspec.to_builtins(verdict)

    for seed in range(8):
        judge(f"seed {seed}", msgspec.structs.replace(WORKLOAD, seed=seed, dtype="bf16"))
    for what, (dtype, strategy) in WRONG.items():
        judge(what, msgspec.structs.replace(WORKLOAD, dtype=dtype), strategy)
    return found


@pytest.mark.long
def test_four_ranks_are_right_with_every_seed_and_a_mistake_is_seen():
    found = {what: msgspec.convert(one, Correctness) for what, one in on_ranks(4, on_four)[0].items()}
    wrong = {what: found.pop(what) for what in WRONG}
    assert [what for what, verdict in found.items() if not verdict.passed] == []
    assert [what for what, verdict in wrong.items() if verdict.passed] == []
    assert wrong["loses one part"].worst == "norm.weight"
    far = wrong["steps too far"]
    assert (far.loss_error or 0) > (far.loss_allowed or 0)
    # The losses of a right step are well within: a bound that holds them just so would refuse one of them now and then.
    assert all((one.loss_error or 0) < 0.7 * (one.loss_allowed or 0) for one in found.values())
