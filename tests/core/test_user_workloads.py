"""What a run measured where the model is not ours: kinds, keys, stored forms, and what readers make of it."""

import re
from pathlib import Path

import msgspec
import pytest

from stepscope.core.attention_support import is_predicted
from stepscope.core.errors import InputError
from stepscope.core.evidence import Evidence, MemoryNotes
from stepscope.core.formulas.spelled import (
    cell_name,
    describe_model,
    describe_workload,
    parameters_of,
    run_call,
    run_command,
)
from stepscope.core.parts import PARTS
from stepscope.core.run import Run
from stepscope.core.run_directory import encode_run, load_run
from stepscope.core.workloads import (
    FactoryWorkload,
    Input,
    TextbookWorkload,
    UserModel,
    WatchedWorkload,
    Workload,
    with_kind,
)
from stepscope.engine.workload_options import ManyWorkloads, of_factory
from stepscope.runs.answer import answer_cells, answer_list, answer_run
from stepscope.runs.checks import check_run
from stepscope.runs.metrics import summarise
from stepscope.runs.tables import TableQuery, answer_table
from tests.conftest import make_run, workload
from tests.shown import shown

IDS = Input(shape=(4, 128), dtype="int64")
MODEL = UserModel(name="GPT", parameters=1_234, inputs={"idx": IDS, "targets": IDS}, structure="ab", source="cd")
OWN = FactoryWorkload(factory="train.py:make", arguments={"width": 64, "fast": True}, model=MODEL)
WATCHED = WatchedWorkload(program="train.py --lr 0.1", model=MODEL, optimizer="AdamW", rank=1, world_size=2)
IMAGES = UserModel(name="ResNet", inputs={"0": Input(shape=(8, 3, 32, 32), dtype="float32")})

TIMES = {"forward": [0.1, 0.1], "backward": [0.2, 0.2], "optimizer": [0.1, 0.1]}


def _run(of: Workload) -> Run:
    run = make_run(workload(), **TIMES)
    return msgspec.structs.replace(run, workload=of, id=f"20260101T000000.000-{of.key}", work={})


@pytest.mark.parametrize("of", [OWN, WATCHED, workload()], ids=["own", "watched", "textbook"])
def test_a_run_of_each_kind_is_read_as_it_was_written(of: Workload, tmp_path: Path):
    run = _run(of)
    (tmp_path / "run.json").write_bytes(encode_run(run))
    assert load_run(tmp_path) == run
    notes = MemoryNotes(workload=of)
    assert msgspec.json.decode(msgspec.json.encode(notes), type=MemoryNotes) == notes


def test_a_run_that_ended_before_its_module_was_made_is_named_by_its_factory():
    never_made = msgspec.structs.replace(OWN, model=UserModel(name=""))
    runs = [_run(OWN), msgspec.structs.replace(_run(never_made), status="timed-out")]
    table = shown(answer_table(runs, TableQuery(rows=("model",), where=(("model", ("make",)),)), bare=False))
    assert re.search(r"^ make +timed-out", table, re.MULTILINE)


@pytest.mark.parametrize("of", [OWN, WATCHED, msgspec.structs.replace(OWN, model=IMAGES)])
def test_every_reader_of_runs_takes_a_run_whose_model_is_not_ours(of: Workload):
    run = _run(of)
    run = msgspec.structs.replace(run, summary=summarise(run), findings=check_run(run))
    assert not [finding for finding in run.findings if finding.severity == "error"]
    told = shown(answer_run(run), 120)
    assert of.model.name in told and "step" in told
    assert run.id.partition("-")[2] in shown(answer_list([run]))
    assert of.model.name in shown(answer_cells([run]))
    table = answer_table([run], TableQuery(rows=("model",), columns=("layers", "tied")), bare=False)
    assert of.model.name in shown(table)
    assert not is_predicted(of)


def test_phases_of_a_users_own_are_shown_and_what_was_not_counted_is_said():
    run = _run(OWN)
    samples = {"generator": run.samples["forward"], "critic": run.samples["backward"], "step": run.samples["step"]}
    evidence = Evidence(uncounted={"mine::op": 1, "Triton kernel rms": 12})
    run = msgspec.structs.replace(run, samples=samples, evidence=evidence)
    told = shown(answer_run(run))
    assert told.index("generator") < told.index("critic") < told.index("mine::op")
    assert "The FLOPs of Triton kernel rms (12 calls), mine::op (1 call) are not known" in told
    assert set(summarise(run)) >= {"generator_median_s", "critic_median_s", "step_median_s"}


def test_a_workload_stored_before_there_were_kinds_is_the_textbooks():
    stored = msgspec.json.encode(workload(seq_len=64))
    before = stored.replace(b'"kind":"textbook",', b"")
    assert before != stored
    assert msgspec.json.decode(with_kind(before), type=TextbookWorkload) == workload(seq_len=64)
    assert with_kind(stored) == stored
    assert msgspec.json.decode(with_kind(b" { } ")) == {"kind": "textbook"}


def test_a_kind_that_is_unknown_is_said(tmp_path: Path):
    (tmp_path / "run.json").write_bytes(encode_run(_run(OWN)).replace(b'"own"', b'"borrowed"'))
    with pytest.raises(InputError, match=r"does not hold a run: .*borrowed"):
        load_run(tmp_path)


def test_the_words_of_an_own_workload():
    assert cell_name(OWN) == "GPT-b4-s128-fp32-train-width64-fastTrue"
    assert cell_name(WATCHED) == "GPT-b4-s128-fp32-train-AdamW-rank1"
    assert describe_model(OWN) == "GPT: 1,234 parameters (made by train.py:make with width=64, fast=True)"
    assert describe_model(WATCHED) == "GPT: 1,234 parameters (watched in train.py --lr 0.1, rank 1 of 2)"
    assert describe_workload(OWN).startswith("batch idx int64[4, 128], targets int64[4, 128], fp32, train, eager")
    assert (
        parameters_of(OWN) == 1_234
        and parameters_of(workload()) == 2 * 10_000 * 128 + 4 * (4 * 128**2 + 3 * 128 * 512 + 2 * 128) + 128
    )


def test_a_batch_has_tokens_where_it_holds_token_ids():
    assert (OWN.batch_size, OWN.seq_len, OWN.tokens) == (4, 128, 512)
    images, nothing = (msgspec.structs.replace(OWN, model=model) for model in (IMAGES, UserModel(name="Nothing")))
    assert (images.batch_size, images.seq_len, images.tokens) == (8, None, None)
    assert nothing.batch_size is None


def test_a_key_is_safe_in_a_file_name_and_tells_experiments_apart():
    odd = msgspec.structs.replace(OWN, arguments={"path": "../a b/ü", "n": 1})
    assert re.fullmatch(r"[\w.+-]+", odd.key) and "/" not in odd.key
    others = [
        msgspec.structs.replace(OWN, code="changed"),
        msgspec.structs.replace(OWN, arguments={"width": 32, "fast": True}),
        msgspec.structs.replace(OWN, dtype="bf16"),
    ]
    assert len({OWN.key, *(other.key for other in others)}) == 4


def test_what_is_asked_does_not_depend_on_what_was_found():
    found = msgspec.structs.replace(OWN, by_factory=("optimizer",), optimizer="AdamW")
    assert msgspec.structs.replace(found, optimizer="adamw-foreach").requested == OWN.requested
    assert OWN.requested.model == UserModel(name="")


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "fp7"), ("phase", "test"), ("compile", "fast"), ("accumulation", 0), ("optimizer", "sgd"), ("seed", -1)],
)
def test_a_choice_that_does_not_exist_is_refused(field: str, value: object):
    with pytest.raises(InputError):
        msgspec.structs.replace(OWN, **{field: value})


def test_how_parts_are_computed_counts_only_where_it_is_not_the_model_s_own_code():
    """Runs that were stored before it could be said keep their keys."""
    plain = msgspec.structs.replace(OWN, **dict.fromkeys(PARTS, "reference"))
    assert plain.key == "make-fp32-train-width64-fastTrue-7acf340b"
    assert not PARTS.keys() & {*plain.identity}
    stored = msgspec.json.decode(msgspec.json.encode(OWN))
    assert msgspec.convert({n: v for n, v in stored.items() if n not in PARTS}, FactoryWorkload) == OWN
    norm = msgspec.structs.replace(OWN, norm="fused")
    both = msgspec.structs.replace(norm, mlp="fused", loss="fused")
    assert norm.key.startswith("make-fp32-train-width64-fastTrue-fused-norm-") and norm.identity["norm"] == "fused"
    assert cell_name(both).endswith("-fused-parts") and len({plain.key, norm.key, both.key}) == 3
    assert "fp32, train, fused norm, eager" in describe_workload(norm)
    assert "fp32, train, fused norm, fused mlp, fused loss, eager" in describe_workload(both)
    assert "fp32, train, fused parts, eager" in describe_workload(msgspec.structs.replace(both, rope="fused"))


def test_options_and_arguments_say_how_parts_are_computed():
    asked = {"module": ("own.py:make",), "kernels": ("reference", "fused"), "mlp": ("reference",)}
    found = [own for own in ManyWorkloads(asked).workloads() if isinstance(own, FactoryWorkload)]
    assert [own.parts for own in found] == [
        {"norm": n, "rope": n, "mlp": "reference", "loss": n} for n in ("reference", "fused")
    ]
    each = {"norm": ("fused",), "rope": ("fused",), "loss": ("fused",)}
    assert len(ManyWorkloads({**asked, **each}).workloads()) == 1, "what is said is so in all kernels"
    both = msgspec.structs.replace(OWN, norm="fused", rope="fused", mlp="fused", loss="fused")
    assert "--kernels fused" in (run_command(both) or "") and "kernels='fused'" in (run_call(both) or "")
    norm = msgspec.structs.replace(OWN, norm="fused")
    assert "--norm fused" in (run_command(norm) or "") and "kernels={'norm': 'fused'}" in (run_call(norm) or "")
    assert of_factory("a.py:make", None, {"kernels": {"norm": "fused"}}).parts == norm.parts
    assert of_factory("a.py:make", None, {"kernels": "fused"}).parts == both.parts
    assert of_factory("a.py:make", None, {"kernels": {"rope": "fused"}}).parts["rope"] == "fused"
    # Before rope was a part of such a model, all parts were three: the keys of what was stored then stay.
    three = msgspec.structs.replace(OWN, norm="fused", mlp="fused", loss="fused")
    assert "fused-parts" in three.key and "rope" not in three.identity and three.key != both.key


def test_sizes_of_a_factory_are_its_arguments_of_these_names():
    """So that --seq-len 64,128 makes a table of a module of one's own, too."""
    many = ManyWorkloads({"module": ("a.py:make",), "seq_len": (64, 128), "batch_size": (2,), "dtype": ("bf16",)})
    assert [(step.arguments, step.dtype) for step in many.workloads()] == [
        ({"batch_size": 2, "seq_len": 64}, "bf16"), ({"batch_size": 2, "seq_len": 128}, "bf16"),
    ]  # fmt: skip
    assert of_factory("a.py:make", {"width": 8}, {"seq_len": 64}).arguments == {"width": 8, "seq_len": 64}
    with pytest.raises(InputError, match="--seq-len and --arg seq_len say the same"):
        ManyWorkloads({"module": ("a.py:make",), "seq_len": (64,), "arg": ("seq_len=8",)}).workloads()
