"""What a run of several ranks says of communication, by hand: two ranks of a model of 1000 bytes."""

from typing import Any

import msgspec
import pytest

from stepscope.core.evidence import CollectiveCalls, Communication, Evidence, PhaseMemory, RankFigures, RanksEvidence
from stepscope.core.formulas.communication import KINDS, sent_and_received
from stepscope.core.run import Run
from stepscope.core.samples import Samples
from stepscope.runs import metrics as communication
from stepscope.runs.answer import ranks_table
from stepscope.runs.checks import check_run
from tests.conftest import make_run, workload
from tests.textbook import textbook


def calls(phase: str, kind: str, sent: int) -> CollectiveCalls:
    return CollectiveCalls(
        phase=phase, kind=kind, ranks=2, calls=1, message_bytes=sent, sent_bytes=sent, received_bytes=sent
    )


def shared_run(parallel: str, *of_ranks: Communication, forward: tuple[float, ...] = (), **kept: Any) -> Run:
    ranks = tuple(
        RankFigures(
            rank=rank, host="a", device_name="cpu", communication=told, parameter_bytes=kept.get("parameters", 1000),
            optimizer_bytes=kept.get("state", 2000),
            samples={"forward": Samples(values_s=(forward[rank],) * 3, clock="host")} if forward else {},
        )
        for rank, told in enumerate(of_ranks)
    )  # fmt: skip
    shared = RanksEvidence(backend="gloo", ranks=ranks, whole_parameter_bytes=1000, whole_gradient_bytes=1000)
    run = make_run(workload(batch_size=4), step=[0.5] * 5)
    of = msgspec.structs.replace(run.workload, parallel=parallel, ranks=2)
    return msgspec.structs.replace(run, workload=of, shared=shared)


def said(run: Run) -> str:
    return " ".join(line.text for table in communication.communication_tables(run) for line in table.notes)


def straggler(run: Run) -> str:
    return next((line.text for line in ranks_table(run).notes if "slowest" in line.text), "")


@pytest.mark.parametrize(
    ("parallel", "sent", "formula", "words"),
    [
        ("ddp-flat", 1000, 1000, "as the formula of ddp-flat says"),
        ("ddp-flat", 1500, 1000, "50.0% more than the formula says."),
        ("fsdp2", 1200, 1500, "20.0% less than the formula says: what is not let go after forward"),
    ],
)
def test_what_is_counted_stands_beside_the_formula(parallel: str, sent: int, formula: float, words: str):
    told = Communication(calls=(calls("backward", "all-reduce", sent),))
    run = shared_run(parallel, told, told)
    assert (communication.sent_bytes(run), communication.sent_by_formula(run)) == (sent, formula)
    assert words in said(run)


@pytest.mark.parametrize(("dtype", "element_bytes"), [("fp32", 4 + 4), ("bf16", 2 + 4), ("bf16-pure", 2 + 2)])
def test_tensor_parallel_sends_two_products_and_two_gradients_a_block(dtype: str, element_bytes: int):
    run = shared_run("tensor", Communication(), Communication())
    run = msgspec.structs.replace(run, workload=msgspec.structs.replace(run.workload, dtype=dtype))
    model = textbook(run).model
    each = 4 * 16 * model.d_model * model.layers  # numbers; of two ranks an all-reduce sends as many
    assert communication.sent_by_formula(run) == 2 * each * element_bytes


def test_sharded_sequences_send_keys_and_values_beside_gradients():
    run = shared_run("context-textbook", Communication(), Communication())
    model = textbook(run).model
    each = 4 * 16 * model.d_model * model.layers * 4  # bytes; as many heads of keys as of queries
    assert communication.sent_by_formula(run) == 1000 + 4 * each / 2


@pytest.mark.parametrize(
    ("parallel", "formula"), [("fsdp2:reshard=no", 1000), ("fsdp2:compute=bf16", 1000), ("ddp:bucket=1", 1000)]
)
def test_options_leave_a_strategy_its_formula(parallel: str, formula: float):
    of = Communication(calls=(calls("forward", "all-gather", 1000),))
    run = msgspec.structs.replace(
        shared_run("ddp", of, of, forward=(1.0, 1.2)),
        workload=workload(batch_size=4, parallel=parallel, ranks=2, dtype="bf16" if "bf16" in parallel else "fp32"),
    )
    assert communication.sent_by_formula(run) == formula
    assert f"as the formula of {parallel} says" in said(run)
    assert communication.kept_by_formula(run) == (1500 if parallel.startswith("fsdp2") else 3000)


@pytest.mark.parametrize(("dtype", "element_bytes"), [("fp32", 4), ("bf16", 4), ("bf16-pure", 2)])
def test_a_pipeline_sends_the_residual_stream_and_the_gradient_of_a_tied_weight(dtype: str, element_bytes: int):
    """Under autocast the residual stream stays fp32. Of two ranks there is one border, passed once each way."""
    run = shared_run("pipeline", Communication(), Communication())
    alone = msgspec.structs.replace(textbook(run), dtype=dtype)
    model = alone.model
    tied = msgspec.structs.replace(alone, model=msgspec.structs.replace(model, tied=True))
    sent = [communication.sent_by_formula(msgspec.structs.replace(run, workload=of)) for of in (alone, tied)]
    stream = 4 * 16 * model.d_model * element_bytes
    assert sent == [stream, stream + model.vocabulary * model.d_model * element_bytes]


def test_some_activations_have_no_formula():
    told = Communication(calls=(calls("forward", "all-reduce", 10),))
    assert communication.sent_by_formula(shared_run("tensor-sequence", told, told)) is None


@pytest.mark.parametrize(
    ("parallel", "kept", "formula"),
    [("ddp", (1000, 2000), 3000), ("zero1", (1000, 1000), 2000), ("fsdp2", (500, 1000), 1500)],
)
def test_what_a_rank_keeps_is_what_its_strategy_does_not_shard(parallel: str, kept: tuple[int, int], formula: int):
    run = shared_run(parallel, Communication(), Communication(), parameters=kept[0], state=kept[1])
    assert communication.kept_bytes(run) == communication.kept_by_formula(run) == formula


@pytest.mark.parametrize(
    ("parallel", "surplus", "found"),
    [("ddp", 1.0, []), ("ddp", 1.7, ["graph-kept-alive"]), ("ddp-naive", 1.0, ["graph-kept-alive"]),
     ("fsdp2", 0.2, [])],
)  # fmt: skip
def test_buckets_that_stay_from_step_to_step_are_no_graph(parallel: str, surplus: float, found: list[str]):
    """Parameters, moments and batches are 4 GiB, gradients 1 GiB, a graph 1 GiB: DDP holds each gradient once more."""
    gib = 2**30
    memory = PhaseMemory(
        parameter_bytes=gib, after_parameters=int((4 + surplus) * gib), resident_expected=4 * gib,
        saved_for_backward=gib,
    )  # fmt: skip
    told = Communication(calls=(calls("backward", "all-reduce", 1000),))
    run = shared_run(parallel, told, told)
    assert run.shared is not None
    run = msgspec.structs.replace(
        run, shared=msgspec.structs.replace(run.shared, whole_gradient_bytes=gib), evidence=Evidence(memory=memory)
    )
    assert [one.kind for one in check_run(run) if one.kind == "graph-kept-alive"] == found
    assert communication.buffers_by_formula(run) == (gib if parallel == "ddp" else 0)
    assert ("buckets hold 1.00 GiB" in said(run)) is (parallel == "ddp")


def test_overlap_is_what_is_not_exposed():
    run = shared_run("ddp", *(Communication(communication_s=0.2, exposed_s=exposed) for exposed in (0.05, 0.15)))
    assert communication.overlap_share(run) == pytest.approx(0.5)


def test_a_straggler_is_found_by_forward_where_nobody_waits_there():
    told = Communication(calls=(calls("backward", "all-reduce", 1000),), computation_s=1.0)
    assert straggler(shared_run("ddp-flat", told, told, forward=(1.0, 1.2))).startswith(
        "Rank 1 computes slowest: its forward, in which it waits for nobody, takes 20"
    )


def test_a_straggler_is_found_by_what_it_computes_where_forward_waits():
    """The slow rank's forward is the shortest: it waits least."""
    times = (Communication(calls=(calls("forward", "all-gather", 1000),), computation_s=s) for s in (1.0, 1.3))
    found = straggler(shared_run("fsdp2", *times, forward=(1.4, 1.3)))
    assert found.startswith(
        "Rank 1 computes slowest: what it computes in the profiled step, without any wait, takes 30"
    )


def test_a_run_from_before_counting_is_judged_by_what_its_strategy_shards():
    found = [shared_run(name, Communication(), Communication(), forward=(1.0, 1.2)) for name in ("fsdp2", "ddp-flat")]
    assert [bool(straggler(run)) for run in found] == [False, True]
    assert not list(communication.communication_tables(found[0]))


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS if kind.name != "send and receive"])
def test_what_ranks_send_is_what_they_receive(kind: str):
    moved = [sent_and_received(kind, 1200, 4, is_root=rank == 0) for rank in range(4)]
    assert sum(sent for sent, _ in moved) == pytest.approx(sum(received for _, received in moved))


def test_two_runs_of_ranks_are_set_side_by_side():
    of = [Communication(calls=(calls("backward", "all-reduce", sent),), exposed_s=0.1) for sent in (1000, 1500)]
    before, after = (shared_run("ddp", told, told) for told in of)
    rows = communication.compared_ranks(before, after, "ranks").rows
    assert [(row[0], row[-1]) for row in rows] == [
        ("sent by a rank", 0.5), ("exposed communication", 0.0), ("kept by a rank", 0.0)
    ]  # fmt: skip
    assert not communication.compared_ranks(make_run(workload(), step=[0.5] * 5), after, "ranks").rows
