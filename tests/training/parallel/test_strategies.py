"""Every strategy against one process, and strategies that are wrong on purpose, on two ranks that talk over gloo."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from stepscope.core.errors import InputError
from stepscope.core.evidence import Correctness
from stepscope.core.model_config import configure
from stepscope.core.strategies import STRATEGIES, Activations, batch_parts, spelled, strategy_named, strategy_of
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.stages import _fault_of
from stepscope.training.optimizer import clip_gradients, updated_by
from stepscope.training.parallel import correctness
from stepscope.training.parallel.collective import broadcast_from_first, trained
from stepscope.training.parallel.correctness import check_ranks, furthest
from stepscope.training.parallel.step import Spread, Strategy, Whole, part_of, replicated, spread_parts
from stepscope.training.parallel.strategies import ddp_textbook, pytorch
from stepscope.training.parallel.strategies.ddp_textbook import in_buckets
from stepscope.training.training_step import Ranks, textbook_parts
from tests.conftest import at_length
from tests.training.parallel.ranks import Here, on_ranks

WORKLOAD = TextbookWorkload(model=configure("tiny", layers=2, vocabulary=101), batch_size=4, seq_len=8)
SMALL = configure("tiny", layers=2, d_model=16, d_ff=32, heads=4, vocabulary=64)
CPU = torch.device("cpu")
FEWER_STEPS = 3
"""As many as it takes for a loss to follow from an update that followed from one. A run's own check takes more."""


def sums(whole: Whole, ranks: Ranks) -> Spread:
    """Adds gradients up and forgets to divide."""
    right = ddp_textbook.ddp_flat(whole, ranks)

    def finish() -> None:
        right.finish()
        for parameter in trained(whole.model):
            assert parameter.grad is not None
            parameter.grad *= ranks.ranks

    return dataclasses.replace(right, finish=finish)


def forgets_one(whole: Whole, ranks: Ranks) -> Spread:
    """Averages all gradients but that of the last norm, the smallest there is."""
    broadcast_from_first(whole.model)
    most = [p for name, p in whole.model.named_parameters() if name != "norm.weight"]
    assert len(most) < len(list(whole.model.parameters()))
    return replicated(whole, finish=lambda: ddp_textbook.average_flat(most))


def one_bucket_late(whole: Whole, ranks: Ranks) -> Spread:
    """Takes each bucket's message for the one before it, where they are equally long."""
    module = ddp_textbook.BucketedDataParallel(whole.forward, bucket_mib=1e-3)

    def finish() -> None:
        module.finish_gradient_synchronization()
        gates: list[Any] = [block.get_parameter("feed_forward.gate.weight") for block in whole.blocks]
        gates[0].grad, gates[1].grad = gates[1].grad, gates[0].grad

    return replicated(whole, module, finish=finish)


def off_by_little(whole: Whole, ranks: Ranks) -> Spread:
    """Averages right, but for one part in a hundred thousand."""
    right = ddp_textbook.ddp_flat(whole, ranks)

    def finish() -> None:
        right.finish()
        for parameter in trained(whole.model):
            assert parameter.grad is not None
            parameter.grad *= 1 + 1e-5

    return dataclasses.replace(right, finish=finish)


def off_by_some_in_bf16(whole: Whole, ranks: Ranks) -> Spread:
    """Averages right in bf16, but for one part in a hundred."""
    right = pytorch.fsdp2(whole, ranks)

    def finish() -> None:
        for parameter in whole.model.parameters():
            assert parameter.grad is not None
            parameter.grad *= 1.01

    return dataclasses.replace(right, finish=finish)


def keeps_one_local(whole: Whole, ranks: Ranks) -> Spread:
    """Averages the gradients of the last micro-batch, and leaves those before it on their rank."""
    module = ddp_textbook.OverlappedDataParallel(whole.forward)
    before: dict[Any, Any] = {}

    @contextlib.contextmanager
    def local() -> Iterator[None]:
        with module.no_sync():
            yield
        for parameter in trained(whole.model):
            before[parameter], parameter.grad = parameter.grad, None

    def finish() -> None:
        module.finish_gradient_synchronization()
        for parameter, gradient in before.items():
            parameter.grad += gradient
        before.clear()

    return replicated(whole, module, finish=finish, local=local)


def lets_go(whole: Whole, ranks: Ranks) -> Spread:
    """Has matrices while the model runs forward, and other numbers in their places when backward runs a block again."""
    right = ddp_textbook.ddp_flat(whole, ranks)
    gates = [block.get_parameter("feed_forward.gate.weight") for block in whole.blocks]
    held: list[torch.Tensor] = []

    def let_go(*_: Any) -> None:
        held[:] = [gate.data for gate in gates]
        for gate in gates:
            gate.data = gate.data / 2

    def finish() -> None:
        for gate, data in zip(gates, held, strict=True):
            gate.data = data
        right.finish()

    whole.forward.register_forward_hook(let_go)
    return dataclasses.replace(right, finish=finish)


def fused_against_one(strategy: str, loss: str, rank: int, ranks: int) -> bool:
    """Whether ranks whose parts are fused compute what one process does."""
    parts: dict[str, str] = dict.fromkeys(("norm", "rope", "mlp"), "fused")
    model = configure("tiny", layers=1, d_model=32, d_ff=32, heads=2, vocabulary=33)
    workload = msgspec.structs.replace(WORKLOAD, model=model, batch_size=2, seq_len=4, **parts, loss=loss)
    make_parts = functools.partial(textbook_parts, workload, CPU)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(correctness, "STEPS", FEWER_STEPS)
        return check_ranks(strategy, make_parts, workload, CPU, Here(rank, ranks)).passed


WRONG: dict[str, Strategy] = {
    "sums": sums, "forgets one": forgets_one, "one bucket late": one_bucket_late, "off by little": off_by_little,
}  # fmt: skip


WRONG_AT_TIMES = ("off by some bf16", "keeps one local", "lets go", "twice of eight bits")
"""What is wrong with some options of a step alone."""


WITH_MICRO_BATCHES = {
    "ddp": "every-2", "ddp-bucketed": "every-1", "ddp-overlap": "none", "zero1": "every-1", "fsdp2": "selective-1",
    "fsdp-textbook": "offload-2", "tensor": "offload-1", "pipeline": "every-1", "context-textbook": "selective",
}  # fmt: skip
"""The checkpointing with which a strategy is held against one process on several micro-batches."""


def with_micro_batches(checkpointing: str) -> TextbookWorkload:
    """A small step of two micro-batches whose blocks keep so little."""
    choices: dict[str, Any] = {"accumulation": 2, "attention": "sdpa", "checkpointing": checkpointing}
    return msgspec.structs.replace(WORKLOAD, model=SMALL, **choices)


IN_16 = "fsdp2:compute=bf16"
EIGHT_BITS = msgspec.structs.replace(WORKLOAD, dtype="fp8", seq_len=32, model=SMALL, parallel=IN_16, ranks=2)


def twice(whole: Whole, ranks: Ranks) -> Spread:
    """Doubles every gradient of sharded parameters."""
    right = pytorch.fsdp2(dataclasses.replace(whole, record=strategy_named(IN_16)), ranks)

    def finish() -> None:
        right.finish()
        for parameter in trained(whole.model):
            assert parameter.grad is not None
            parameter.grad *= 2

    return dataclasses.replace(right, finish=finish)


def every_checkpointing(rank: int, ranks: int) -> list[str]:
    """Strategies that are not right with several micro-batches and some checkpointing."""
    wrong: list[str] = []
    for name in WITH_MICRO_BATCHES:
        for checkpointing in ("none", "selective", "selective-1", "attention", "offload-1", "every-1", "every-2"):
            if strategy_of(name).stages(ranks) > 1 and checkpointing in ("selective-1", "offload-1"):
                continue
            step = with_micro_batches(checkpointing)
            verdict = check_ranks(name, lambda of=step: textbook_parts(of, CPU), step, CPU, Here(rank, ranks))
            wrong += [] if verdict.passed else [f"{name} {checkpointing}: {verdict}"]
    return wrong


def computed_once(expected: Callable[..., Any]) -> Callable[..., Any]:
    """What one process finds, computed once for all strategies of a workload: it runs nothing again in backward, where
    the ranks do."""
    known: dict[Any, Any] = {}

    def found(_: Any, choices: TextbookWorkload, device: Any, ranks: Any, make_optimizer: Any, **how: Any) -> Any:
        plain = msgspec.structs.replace(choices, checkpointing="none")
        key = (plain, make_optimizer.func, how["compute"])  # partials are equal to themselves alone
        if key not in known:
            known[key] = expected(lambda: textbook_parts(plain, CPU), plain, device, ranks, make_optimizer, **how)
        return known[key]

    return found


def held_against_one(rank: int, ranks: int) -> dict[str, Any]:
    """The verdict on every strategy, in fp32 and for some in bf16, and on those that are wrong."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(correctness, "STEPS", FEWER_STEPS)
        patched.setattr(correctness, "_expected", computed_once(correctness._expected))
        verdicts = every_verdict(rank, ranks)
    return {"verdicts": verdicts, "norms": norms(Here(rank, ranks))}


def every_verdict(rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def judge(what: str, name: str, workload: TextbookWorkload, strategy: Strategy | None = None) -> None:
        verdict = check_ranks(name, lambda: textbook_parts(workload, CPU), workload, CPU, Here(rank, ranks),
                              strategy=strategy)  # fmt: skip
        found[what] = msgspec.to_builtins(verdict)

    for name, record in STRATEGIES.items():
        if "gloo" in record.backends:
            judge(name, name, WORKLOAD)
    judge("context-textbook sdpa", "context-textbook", msgspec.structs.replace(WORKLOAD, attention="sdpa"))
    for name in ("fsdp-textbook", "tensor", "context-textbook"):
        judge(f"{name} bf16", name, msgspec.structs.replace(WORKLOAD, dtype="bf16"))
    deep = msgspec.structs.replace(WORKLOAD, model=configure("tiny", layers=4, vocabulary=101, tied=True))
    judge("interleaved", "pipeline:schedule=interleaved", deep)
    judge("gpipe", "pipeline:schedule=gpipe", deep)
    judge("kept and offloaded", "fsdp2:reshard=no:offload=yes", WORKLOAD)
    judge("in bf16", "fsdp2:compute=bf16", msgspec.structs.replace(WORKLOAD, dtype="bf16"))
    # One process that splits three samples in two weighs them otherwise, and its spread would hide anything.
    judge("three samples", "tensor", msgspec.structs.replace(WORKLOAD, batch_size=3))
    # With so few numbers, products in bf16 alone are further from products of fp32 parameters than splits are.
    tied = msgspec.structs.replace(SMALL, tied=True)
    for name in ("fsdp2:compute=bf16", "fsdp-textbook:compute=bf16"):
        judge(f"small {name}", name, msgspec.structs.replace(WORKLOAD, dtype="bf16", seq_len=16, model=tied))
    judge("of eight bits", IN_16, EIGHT_BITS)
    judge("twice of eight bits", IN_16, EIGHT_BITS, twice)
    for name in ("ddp", "zero1"):
        judge(f"small {name} fp16", name, msgspec.structs.replace(WORKLOAD, dtype="fp16", seq_len=16, model=SMALL))
    for name in ("ddp", "fsdp2", "tensor", "pipeline"):  # with --long every one, and one in bf16 below
        judge(f"{name} {WITH_MICRO_BATCHES[name]}", name, with_micro_batches(WITH_MICRO_BATCHES[name]))
    again = with_micro_batches("every-1")
    whole_norms = "fsdp-textbook:compute=bf16:norms=whole"
    judge("run again in bf16", whole_norms, msgspec.structs.replace(again, dtype="bf16", seq_len=16))
    judge("keeps one local", "ddp-overlap", with_micro_batches("none"), keeps_one_local)
    for what, checkpointing in {"lets go, and runs nothing again": "none", "lets go": "every-1"}.items():
        judge(what, "ddp-flat", msgspec.structs.replace(WORKLOAD, model=SMALL, checkpointing=checkpointing), lets_go)
    for name, strategy in WRONG.items():
        judge(name, "ddp-flat", WORKLOAD, strategy)
    halved = msgspec.structs.replace(WORKLOAD, dtype="bf16")
    judge("off by some bf16", "fsdp2:compute=bf16", halved, off_by_some_in_bf16)
    judge("fsdp-textbook clipped", "fsdp-textbook:norms=whole", msgspec.structs.replace(WORKLOAD, clip=0.5))
    return found


def norms(ranks: Ranks) -> dict[str, tuple[float, float, float]]:
    """By strategy: the norm of all gradients as it finds it, that of its whole gradients, and that of these clipped."""
    names = [name for name, record in STRATEGIES.items() if "gloo" in record.backends]
    found = {name: norms_of(name, WORKLOAD, ranks) for name in (*names, "fsdp-textbook:norms=whole")}
    tied = msgspec.structs.replace(WORKLOAD, model=configure("tiny", layers=2, vocabulary=101, tied=True))
    return {**found, "tied": norms_of("pipeline", tied, ranks)}


def norms_of(name: str, workload: TextbookWorkload, ranks: Ranks) -> tuple[float, float, float]:
    record, parts = strategy_named(name), textbook_parts(workload, CPU)
    spread = spread_parts(record, parts, workload, ranks)
    batch = part_of(parts.batches[0], parts, record, ranks)
    if spread.run is not None:
        spread.run(batch)
    else:
        spread.forward(*batch).backward()
    spread.finish()
    assert spread.optimizer is not None
    wanted = norm_of_all(spread)
    found = clip_gradients(updated_by(spread.optimizer), wanted / 4, spread.norm_of, torch.float64)
    return float(found), wanted, norm_of_all(spread)


def norm_of_all(spread: Spread) -> float:
    return math.hypot(*(float(gradient.double().norm()) for gradient in spread.full_gradients().values()))


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Any]]:
    return on_ranks(2, held_against_one)


@pytest.fixture(scope="module")
def verdicts(of_ranks: list[dict[str, Any]]) -> list[dict[str, Correctness]]:
    return [
        {name: msgspec.convert(one, Correctness) for name, one in of_rank["verdicts"].items()} for of_rank in of_ranks
    ]


def test_every_strategy_computes_what_one_process_does(verdicts: list[dict[str, Correctness]]):
    assert verdicts[0] == verdicts[1]
    right = {name: verdict for name, verdict in verdicts[0].items() if name not in (*WRONG, *WRONG_AT_TIMES)}
    assert set(right) >= {name for name, record in STRATEGIES.items() if "gloo" in record.backends}
    assert not [name for name, verdict in right.items() if not verdict.passed], right
    alone = right.pop("three samples")
    assert alone.gradient_spread == 0 and alone.gradient_allowed == 1e-5
    eight = right.pop("of eight bits")
    # One process that splits the batch as the ranks do has their scales, and may have their very bits.
    assert eight.gradient_error < 1e-3 and eight.gradient_allowed == 0.02
    assert all(0 < verdict.gradient_spread < 0.01 for verdict in right.values())
    losses = [verdict.loss_error for verdict in right.values()]
    assert all(error is not None and error < 0.01 for error in losses)


def test_clipping_takes_the_norm_of_all_ranks(of_ranks: list[dict[str, Any]]):
    first, second = (of_rank["norms"] for of_rank in of_ranks)
    assert first == second and first.keys() >= {"fsdp-textbook", "fsdp2", "pipeline", "tied", "tensor", "zero1"}
    for name, (found, wanted, clipped) in first.items():
        assert found == pytest.approx(wanted, rel=1e-6), name
        assert clipped == pytest.approx(wanted / 4, rel=1e-6), name


def two_by_two(rank: int, ranks: int) -> Any:
    tied = msgspec.structs.replace(WORKLOAD, model=configure("tiny", layers=2, vocabulary=101, tied=True))
    return [
        msgspec.to_builtins(
            check_ranks(name, lambda of=of: textbook_parts(of, CPU), of, CPU, Here(rank, ranks))
        )
        for name in ("fsdp2-tensor", "tensor-sequence")
        for of in (WORKLOAD, tied)
    ]  # fmt: skip


@pytest.mark.long
def test_four_ranks_in_two_dimensions_compute_what_one_process_does():
    verdicts = [msgspec.convert(one, Correctness) for one in on_ranks(4, two_by_two)[0]]
    assert len(verdicts) == 4 and all(verdict.passed for verdict in verdicts), verdicts


@pytest.mark.long
def test_micro_batches_go_with_every_checkpointing():
    assert on_ranks(2, every_checkpointing) == [[], []]


def test_a_strategy_that_is_wrong_is_seen(verdicts: list[dict[str, Correctness]]):
    for name in (*WRONG, *WRONG_AT_TIMES):
        assert not verdicts[0][name].passed, name
    assert verdicts[0]["sums"].gradient_error == pytest.approx(1.0, rel=1e-3)
    assert verdicts[0]["forgets one"].worst == "norm.weight"
    assert "gate" in verdicts[0]["one bucket late"].worst


def test_what_is_missing_or_no_number_is_infinitely_far():
    one = {"a": torch.ones(2), "b": torch.zeros(1)}
    assert furthest({"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(1)}, one)[1] == "a"
    assert furthest({"a": torch.ones(2)}, one) == (float("inf"), "b")
    found = {"a": one["a"] * 1.5, "b": one["b"]}
    assert furthest(found, one, {"a": float(one["a"].norm())})[0] == 0
    assert furthest({"a": torch.tensor([1.0, float("nan")]), "b": torch.zeros(1)}, one) == (float("inf"), "a")


def test_buckets_are_of_one_dtype_and_go_back_from_the_last_parameter():
    made = [torch.nn.Parameter(torch.zeros(n, dtype=d)) for n, d in
            ((10, torch.float32), (10, torch.float32), (100, torch.float32), (10, torch.bfloat16))]  # fmt: skip
    found = [[parameter.numel() for parameter in bucket] for bucket in in_buckets(made, 100)]
    assert found == [[10], [100], [10, 10]]


BYTES: tuple[tuple[str, int, Callable[[int], float]], ...] = (
    ("ddp", 2, lambda p: p), ("ddp", 4, lambda p: 1.5 * p), ("zero1", 2, lambda p: 1.5 * p),
    ("fsdp2", 4, lambda p: 2.25 * p), ("ddp-naive", 1, lambda p: 0),
)  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "wanted"), BYTES)
def test_a_rank_sends_what_the_ring_s_formulas_say(name: str, ranks: int, wanted: Callable[[int], float]):
    assert STRATEGIES[name].sends(1000, 1000, ranks) == pytest.approx(wanted(1000))


def test_options_change_what_a_rank_sends_and_are_spelled_in_one_way():
    def sent(parallel: str) -> float:
        sends = strategy_named(parallel).sends(1000, 1000, 4)
        assert sends is not None
        return sends

    assert sent("fsdp2:reshard=no") == 1500 and sent("fsdp2:compute=bf16") == 1500 and sent("ddp:bucket=3") == 1500
    step = Activations(tokens=64, width=8, key_width=8, layers=4, element_bytes=4, residual_bytes=4)
    of_stages = [strategy_named(name) for name in ("pipeline", "pipeline:schedule=interleaved")]
    # Between 4 stages there are 3 borders, and between 8 there are 7, each passed twice; the mean of the ranks.
    assert [record.sends_activations(step, 4) for record in of_stages] == [3 * 1024.0, 7 * 1024.0]
    assert spelled("fsdp2:offload=yes:reshard=yes") == "fsdp2:offload=yes" and spelled("ddp:bucket=025") == "ddp"
    assert strategy_of("pipeline:schedule=interleaved:chunks=3").stages(2) == 6 and strategy_of("ddp").stages(2) == 1
    one = msgspec.structs.replace(WORKLOAD, parallel="fsdp2:reshard=yes", ranks=2)
    assert one.parallel == "fsdp2" and one.key == msgspec.structs.replace(WORKLOAD, parallel="fsdp2", ranks=2).key


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": "ddp:bucket=0"}, "bucket is a whole number from 1 on"),
        ({"parallel": "ddp:bucket=1:bucket=2"}, "bucket is said twice, leave out one of them"),
        ({"parallel": "ddp:bucket=1,unused=no"}, "several options are joined by colons, as in ddp:bucket=1:unused=no"),
        ({"parallel": "ddp:buckets=2"}, "ddp takes bucket=N, unused=no|yes, and not 'buckets=2' here"),
        ({"parallel": "ddp-naive:bucket=1"}, "ddp-naive takes no options"),
        ({"parallel": "fsdp2:reshard=maybe"}, "reshard is one of yes, no"),
        ({"parallel": "fsdp2:reshard"}, "and not 'reshard' here"),
        ({"parallel": "pipeline:chunks=2"}, "chunks has an effect with schedule=interleaved alone"),
        ({"parallel": "fsdp2:compute=bf16"}, "computes in bf16: say --dtype bf16"),
        ({"parallel": "none:x=1", "ranks": 1}, "--parallel none takes no options"),
        (
            {"parallel": "fsdp2", "graph": "step"},
            "graph step holds no step that is shared by fsdp2: choose",
        ),
        ({"parallel": "pipeline", "compile": "default"}, "runs its stages eagerly"),
        ({"parallel": "pipeline:schedule=interleaved:chunks=9"}, "makes 18 stages of 2 layers over 2 ranks"),
        ({"parallel": "fsdp2", "optimizer": "adamw-one-launch"}, "does not update the DTensors of --parallel fsdp2"),
        ({"parallel": "tensor", "optimizer": "adamw-bf16-state"}, "choose --optimizer adamw-fused, or a lesson"),
        ({"parallel": "tensor-sequence", "seq_len": 15}, "and seq_len 15 cannot be divided by 2: choose a multiple"),
        ({"parallel": "fsdp2-tensor", "ranks": 4, "seq_len": 15}, "by sequence over 2 ranks, and seq_len 15 cannot"),
        (
            {"parallel": "ddp", "accumulation": 4},
            "batch_size 4, of which each of 2 ranks has 2, cannot be split into 4 "
            "equal micro-batches: choose accumulation 2",
        ),
        (
            {"parallel": "fsdp2-tensor", "ranks": 4, "batch_size": 3},
            "divided by 2: choose a multiple of 2, or --ranks 2 or 6",
        ),
        ({"parallel": "pipeline", "batch_size": 3}, "cannot cut batch_size 3 into 2 micro-batches"),
    ],
)
def test_options_that_cannot_be_are_one_line(changes: dict[str, Any], said: str):
    with pytest.raises(InputError) as caught:
        msgspec.structs.replace(WORKLOAD, **{"ranks": 2, **changes})
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_batch_is_split_where_the_strategy_splits_it():
    assert batch_parts("ddp", 4) == 4 and batch_parts("tensor", 4) == 1 and batch_parts("none", 1) == 1
    assert batch_parts("fsdp2-tensor", 4) == 2
    with pytest.raises(InputError, match="--parallel fsdp2-tensor takes ranks by 2, not 3: choose a multiple"):
        batch_parts("fsdp2-tensor", 3)
    with pytest.raises(InputError, match="batch_size 4 is that of all ranks together, and cannot be divided by 3"):
        msgspec.structs.replace(WORKLOAD, parallel="ddp", ranks=3)
    assert msgspec.structs.replace(WORKLOAD, parallel="tensor", ranks=3).ranks == 3


def test_losses_that_are_not_one_process_s_fail_alone():
    right = Correctness(
        gradient_error=0, gradient_spread=0, gradient_allowed=1e-6, update_error=0, update_spread=0,
        update_allowed=1e-6, worst="the loss of step 2", steps=5, loss_error=1e-3, loss_spread=0, loss_allowed=1e-6,
    )  # fmt: skip
    assert not right.passed
    assert "the losses of 5 steps of AdamW differ by 0.001" in _fault_of(right, "ddp")
    assert msgspec.structs.replace(right, loss_error=None).passed


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "loss"), [("fsdp2", "fused"), *at_length(("fsdp-textbook", "reference"))])
def test_ranks_compute_fused_parts_as_one_process_does(monkeypatch: pytest.MonkeyPatch, strategy: str, loss: str):
    """In Triton's interpreter, so with the smallest shapes."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert on_ranks(2, functools.partial(fused_against_one, strategy, loss)) == [True, True]
