"""`stepscope study parallel`: which cells it measures, and what it says of them, by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from stepscope.core.answer import Answer
from stepscope.core.errors import InputError
from stepscope.core.evidence import CollectiveCalls, Communication, RankFigures, RanksEvidence
from stepscope.core.model_config import configure
from stepscope.core.run import Failure, Settings
from stepscope.core.samples import Samples
from stepscope.questions.parallel import (
    DATA_PARALLEL,
    SHARDED,
    STRONG,
    SharedCell,
    answer_parallel,
    parallel_cells,
    part_of,
)
from tests.command import stepscope
from tests.conftest import make_run, workload


def cell(
    parallel: str = "none", ranks: int = 1, *, batch: int = 4, step_s: float = 0.4, sync_s: float | None = None,
    exposed_s: float | None = None, sent: int = 1000, state: int = 2000, why: str = "",
) -> SharedCell:  # fmt: skip
    of = workload(batch_size=batch, parallel=parallel, ranks=ranks)
    run = make_run(of, step=[step_s * share for share in (0.99, 1, 1.01) * 7])
    if why:
        failure = Failure(message=why, during="check ranks")
        return SharedCell(run=msgspec.structs.replace(run, status="failed", failure=failure, samples={}))
    if ranks == 1:
        return SharedCell(run=run)
    calls = CollectiveCalls(
        phase="backward", kind="all-reduce", ranks=ranks, calls=3, message_bytes=sent, sent_bytes=sent,
        received_bytes=sent,
    )  # fmt: skip
    told = Communication(calls=(calls,), communication_s=0.1, exposed_s=exposed_s)
    figures = [
        RankFigures(
            rank=rank, host="a", device_name="cpu", parameter_bytes=1000, optimizer_bytes=state, communication=told
        )
        for rank in range(ranks)
    ]
    shared = RanksEvidence(
        backend="gloo", ranks=tuple(figures), threads=1, whole_parameter_bytes=1000, whole_gradient_bytes=1000
    )  # fmt: skip
    samples = dict(run.samples)
    if sync_s:
        samples["gradient sync"] = Samples(values_s=(sync_s,) * 21, clock="perf_counter_ns")
    return SharedCell(run=msgspec.structs.replace(run, shared=shared, samples=samples))


def sentences(answer: Answer) -> dict[str, str]:
    return {finding.kind: finding.sentence for finding in answer.findings}


def column(answer: Answer, title: str, name: str) -> list[object]:
    table = answer.table(title)
    return [row[table.columns.index(name)] for row in table.rows]


LESSONS: Sequence[SharedCell] = (
    cell(),
    cell("ddp-naive", 2, step_s=0.4, sync_s=0.2, exposed_s=0.1),
    cell("ddp-flat", 2, step_s=0.32, sync_s=0.08, exposed_s=0.08),
    cell("ddp-overlap", 2, step_s=0.25, sync_s=0.01, exposed_s=0.02),
    cell("ddp-bucketed", 2, step_s=0.25, exposed_s=0.02),
    cell("zero1", 2, step_s=0.3, sent=1500, state=1000),
    cell("ddp-flat", 2, batch=8, step_s=0.4),
)


def test_the_same_batch_and_one_for_each_rank_are_two_scalings():
    answer = answer_parallel(LESSONS)
    assert column(answer, STRONG, "strategy") == ["ddp-naive", "ddp-flat", "ddp-overlap", "ddp-bucketed", "zero1"]
    assert column(answer, STRONG, "times as fast") == pytest.approx([1.0, 1.25, 1.6, 1.6, 4 / 3])
    # One process has 8 threads, and the ranks one each: twice the tokens in the same time are 8 times as many a thread.
    assert column(answer, "Weak scaling: the same batch for each rank", "efficiency") == pytest.approx([8.0])
    assert "Efficiency: tokens a second and thread" in answer.table(STRONG).notes[0].text


def test_each_lesson_is_set_beside_the_one_before():
    said = sentences(answer_parallel(LESSONS))
    assert (
        "ddp-overlap x 2: after backward, ranks wait 10.00 ms for gradients, 4.0 % of the step" in said["gradient-sync"]
    )
    assert "from ddp-naive to ddp-flat (one message in place of many): the step is 1.25" in said["one-message"]
    assert "exposed communication 80.00 to 20.00 ms" in said["overlap"]
    assert "the steps cannot be told apart, 250.0 to 250.0 ms" in said["buckets"]
    assert "kept by a rank 2.93 KiB to 1.95 KiB (-33%)" in said["sharded-optimizer"]
    assert "sent by a rank 1000 B to 1.46 KiB (+50%)" in said["sharded-optimizer"]
    assert "own-ddp" not in said  # one of the two was not measured
    assert "fastest of 5 strategies, 1.6 times as fast as one process" in said["fastest"]
    assert said["by-formula"] == "Ranks send what the formula says in 5 of 5 cells."


def test_a_cell_that_is_wrong_or_cannot_be_is_a_row_with_why():
    wrong = cell("fsdp2", 2, why="ranks compute something else")
    answer = answer_parallel([*LESSONS, wrong], refused=[("ddp x 3, batch 4", "4 do not divide by 3")])
    rows = answer.table("Not measured").rows
    assert [row[-1] for row in rows] == [
        "ended failed (check ranks): ranks compute something else", "4 do not divide by 3"
    ]  # fmt: skip


def test_where_ranks_had_a_batch_each_alone_all_is_said_of_that():
    answer = answer_parallel([cell(), cell("ddp-flat", 2, batch=8, sync_s=0.1), cell("ddp-overlap", 2, batch=8)])
    assert STRONG not in [table.title for table in answer.tables]
    title = "Communication of a step, the same batch for each rank"
    assert column(answer, title, "strategy") == ["ddp-flat", "ddp-overlap"]
    assert len(column(answer, "The step by its phases, the same batch for each rank", "step")) == 3
    said = sentences(answer)
    assert "the steps cannot be told apart" in said["overlap"] and "gradient-sync" in said
    assert "fastest" not in said and said["by-formula"] == "Ranks send what the formula says in 2 of 2 cells."


def test_steps_of_several_models_have_bars_of_their_own():
    """With a batch for each rank, the cell of more ranks has another name than that of its one process."""
    found = [cell(), cell("fsdp2", 2, batch=8), cell(batch=6), cell("fsdp2", 2, batch=12)]
    names = [point.name for point in answer_parallel(found).panels[0].points]
    assert len(names) == len(set(names)) == 4
    assert [name.split("-")[1] for name in names] == ["b4", "b6", "b4", "b6"]
    assert [name.rpartition(" fsdp2 x ")[2] for name in names[2:]] == ["2", "2"]
    assert [point.name for point in answer_parallel(found[:2]).panels[0].points] == ["none", "fsdp2 x 2"]


def test_without_one_process_there_is_nothing_to_compare():
    with pytest.raises(InputError, match="no cell here was measured both by ranks and by one process"):
        answer_parallel(LESSONS[1:])


def test_a_question_takes_its_part():
    answer = answer_parallel(LESSONS)
    data, sharded = part_of(answer, DATA_PARALLEL, (STRONG,)), part_of(answer, SHARDED, ())
    assert [table.title for table in data.tables] == [STRONG] and not sharded.tables
    assert {finding.kind for finding in sharded.findings} == {"sharded-optimizer"}


def test_the_cells_are_one_process_and_both_batches_of_each_strategy():
    cells, refused = parallel_cells(
        strategies=("ddp", "fsdp2"), ranks=(1, 2, 3), models=[configure("tiny")], seq_lens=[16], batch_size=4,
        dtypes=["fp32"], settings=Settings(),
    )  # fmt: skip
    of = [(one.workload.parallel, one.workload.ranks, one.workload.batch_size) for one in cells]
    assert sorted(of) == [
        ("ddp", 2, 4), ("ddp", 2, 8), ("ddp", 3, 12), ("fsdp2", 2, 4), ("fsdp2", 2, 8), ("fsdp2", 3, 12),
        ("none", 1, 4),
    ]  # fmt: skip
    assert [name for name, _ in refused] == ["ddp x 3, batch 4", "fsdp2 x 3, batch 4"]


def test_the_choices_of_a_step_hold_for_one_process_too_and_what_cannot_be_is_refused():
    cells, refused = parallel_cells(
        strategies=("ddp-bucketed", "fsdp2"), ranks=(2, 4), models=[configure("tiny")], seq_lens=[16], batch_size=3,
        dtypes=["bf16"], settings=Settings(), scaling="weak", graph="step", attention="flash",
    )  # fmt: skip
    of = [(one.workload.parallel, one.workload.ranks, one.workload.batch_size) for one in cells]
    assert sorted(of) == [("ddp-bucketed", 2, 6), ("ddp-bucketed", 4, 12), ("none", 1, 3)]
    assert {(one.workload.graph, "flash" in one.workload.key) for one in cells} == {("step", True)}
    assert [name for name, _ in refused] == ["fsdp2 x 2, batch 6", "fsdp2 x 4, batch 12"]
    assert "graph step holds no step that is shared by fsdp2" in refused[0][1]


def test_strong_scaling_has_the_batch_of_one_process_alone():
    cells, _ = parallel_cells(
        strategies=("ddp",), ranks=(2,), models=[configure("tiny")], seq_lens=[16], batch_size=4, dtypes=["fp32"],
        settings=Settings(), scaling="strong",
    )  # fmt: skip
    assert sorted((one.workload.ranks, one.workload.batch_size) for one in cells) == [(1, 4), (2, 4)]


def test_a_scaling_that_is_none_is_named():
    with pytest.raises(InputError, match="scaling"):
        parallel_cells(
            strategies=("ddp",), ranks=(2,), models=[configure("tiny")], seq_lens=[16], batch_size=4, dtypes=["fp32"],
            settings=Settings(), scaling="fast",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ranks", "1"), "--ranks 1 compares nothing with one process"),
        (("--ranks", "3", "--batch-size", "2", "--parallel", "fsdp2-tensor"), "takes ranks by 2, not 3"),
        (("--parallel", "ring"), "ring"),
    ],
)
def test_what_cannot_be_asked_is_one_line(options: tuple[str, ...], said: str, tmp_path: Path):
    done = stepscope("study", "parallel", "--model", "tiny", "--device", "cpu", *options, "--runs", tmp_path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.mark.long
def test_real_ranks_are_measured_and_read_again(tmp_path: Path):
    done = stepscope(
        "study", "parallel", "--model", "tiny", "--seq-len", 16, "--batch-size", 2, "--device", "cpu", "--parallel",
        "ddp-flat,zero1", "--attention", "sdpa", "--checkpointing", "every-1", "--optimizer", "adamw-fused",
        "--steps", 3, "--runs", tmp_path,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    assert "Strong scaling" in done.stdout and "Ranks send what the formula says in 2 of 2 cells" in done.stdout
    again = stepscope("study", "parallel", "--from", tmp_path, "--parallel", "zero1", "--json")
    assert again.returncode == 0, again.stderr
    (strong,) = (table for table in json.loads(again.stdout)["tables"] if table["title"] == STRONG)
    assert [row[1] for row in strong["rows"]] == ["zero1"]
    asked = ("study", "parallel", "--from", tmp_path, "--kernels", "reference", "--attention")
    assert "Strong scaling" in stepscope(*asked, "sdpa", "--checkpointing", "every-1").stdout
    other = stepscope(*asked, "reference")
    assert other.returncode == 2 and "no run here (of those asked for)" in other.stderr
    assert "--scaling says nothing with --from" in stepscope(*asked, "sdpa", "--scaling", "weak").stderr
