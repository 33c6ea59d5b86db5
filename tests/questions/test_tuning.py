"""The search for the fastest step: what it tries, what it takes, and what it has when it is stopped."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.answer import error
from stepscope.core.checkpointing import selective_of
from stepscope.core.errors import InputError
from stepscope.core.evidence import CompileReport, Evidence
from stepscope.core.formulas.spelled import run_call, run_command
from stepscope.core.parts import PARTS
from stepscope.core.processes import Change
from stepscope.core.run import Run
from stepscope.core.samples import Interval
from stepscope.core.study_results import LossCurve, Tried, Tuned, change_words, named_apart
from stepscope.core.workloads import FactoryWorkload, TextbookWorkload, UserModel, Workload
from stepscope.engine.sweep_plan import Cell, CellState, Policy, SweepState, TellSweep
from stepscope.questions import tuning_curves as curves_module
from stepscope.questions.tuning import (
    BEFORE,
    ROUNDS,
    Search,
    changes_of,
    groups_that_may,
    lighter,
    one_that_fits,
    together,
    tune,
    without_numeric_changes,
)
from stepscope.questions.tuning_answer import answer_tuned
from stepscope.questions.tuning_curves import Training, curves, departs_at, losses_of, trained, why_not_compared
from stepscope.questions.tuning_races import Racing, Turns, beside, compiled_s, p_value_of, steps_s
from stepscope.recording.step import drive
from stepscope.rendering.cells import plain_text
from stepscope.training.training_step import TrainingStep
from tests.conftest import at_length, make_run, mini, workload

FACTORS = {
    ("attention", "flash"): 0.9, ("attention", "sdpa-cudnn"): 0.95, ("dtype", "bf16"): 0.6,
    ("dtype", "bf16-master"): 0.5, ("optimizer", "adamw-fused"): 0.97, ("optimizer", "adamw-one-launch"): 0.9,
    ("optimizer", "adamw-under-backward"): 0.85, ("compile", "default"): 0.8, ("compile", "blocks"): 0.82,
    ("loss", "fused"): 0.95, ("compile", "reduce-overhead"): 0.79, ("graph", "step"): 0.9,
    ("checkpointing", "every-1"): 1.3, ("parallel", "fsdp2"): 0.8, ("parallel", "ddp-bucketed"): 0.9,
}  # fmt: skip


class Written:
    """A bench whose steps take what FACTORS say, and that counts its races."""

    def __init__(self, races: int = 100, unfit: Sequence[str] = (), noise: float = 0.001) -> None:
        self.left, self.unfit, self.noise = races, unfit, noise

    def seconds(self, step: Workload) -> float:
        return math.prod(
            factor for (field, value), factor in FACTORS.items() if getattr(step, field, None) == value
        ) * (1 + 0.05 * (step.accumulation - 1))  # fmt: skip

    def fits(self, workload: Workload) -> str | None:
        return "too large" if workload.checkpointing in self.unfit else None

    def planned_s(self, workload: Workload) -> float | None:
        return None

    def runs_alone(self, workload: Workload) -> str | None:
        return None

    def time_left(self, baseline: Workload, best: Workload) -> bool:
        return self.left > 0

    def race(self, best: Workload, other: Workload) -> Tried:
        self.left -= 1
        ratio = self.seconds(other) / self.seconds(best)
        interval = Interval(low=ratio * (1 - self.noise), high=ratio * (1 + self.noise))
        return Tried(
            round="", change={}, verdict="undecided", ratio=ratio, interval=interval,
            p_value=p_value_of(ratio, interval), step_s=self.seconds(other), runs=("a", "b"),
        )  # fmt: skip


def searched(bench: Written, kept: frozenset[str] = frozenset(), on_gpu: bool = True, **step: object) -> Search:
    search = Search(baseline=workload(**step), on_gpu=on_gpu, kept=kept)
    search.run(bench)
    return search


def test_the_fastest_of_each_round_is_taken():
    search = searched(Written(), dtype="fp32", checkpointing="every-1", accumulation=2)
    best = search.best
    assert (best.checkpointing, best.accumulation, best.dtype) == ("none", 1, "bf16-master")
    assert best.optimizer == "adamw-under-backward" and best.graph == "step" and best.compile == "blocks"
    taken = [tried for tried in search.tried if tried.verdict == "taken"]
    assert math.prod(tried.ratio or 0 for tried in taken) == pytest.approx(
        Written().seconds(best) / Written().seconds(search.baseline)
    )
    assert len({tried.round for tried in taken}) == len(taken), "one of each round"


@pytest.mark.parametrize("field", ["dtype", "optimizer", "compile", "attention", "graph"])
def test_what_is_kept_stays(field: str):
    search = searched(Written(), kept=frozenset({field}))
    assert getattr(search.best, field) == getattr(search.baseline, field)
    assert not any(field in tried.change for tried in search.tried)


def test_clipping_stays_and_leaves_nothing_to_update_under_backward():
    search = searched(Written(), dtype="fp32", clip=1.0)
    assert search.best.clip == 1.0 and search.best.optimizer == "adamw-one-launch"
    assert not [tried for tried in search.tried if tried.change.get("optimizer") == "adamw-under-backward"]
    assert "--clip 1.0" in (run_command(search.best) or "") and "clip=1.0" in (run_call(search.best) or "")


def test_the_host_decides_nothing_once_the_step_is_replayed():
    class Hosted(Written):
        def seconds(self, step: Workload) -> float:
            waits = step.compile == "eager" and step.graph == "none"
            flash = getattr(step, "attention", "") == "flash"
            joint = getattr(step, "projections", "") == "joint"  # so that the usual changes are tried one by one
            return super().seconds(step) * ((1.4 if waits else 1) if flash else 1) * (9 if joint else 1)

    search = searched(Hosted())
    verdicts = [(t.round, t.verdict) for t in search.tried if t.change == {"attention": "flash"}]
    assert verdicts == [("attention", "taken")] and getattr(search.best, "attention", "") == "flash"


def test_what_must_be_compiled_is_raced_last_and_no_graph_of_parts_within_one_of_all():
    rounds = [tried.round for tried in searched(Written()).tried]
    compiled = rounds.index("compile")
    assert not {"graph", "attention", "kernels", "projections"} & {*rounds[compiled:]}
    asked = {t.change["compile"] for t in searched(Written()).tried if t.round == "compile"}
    assert asked == {"default", "blocks"}
    tried = searched(Written(), kept=frozenset({"graph"})).tried
    assert {"compile": "reduce-overhead"} in [t.change for t in tried if t.verdict == "taken"]


def test_a_compiled_step_leaves_to_the_compiler_what_it_fuses_better():
    class Fusing(Written):
        def seconds(self, step: Workload) -> float:
            fused = getattr(step, "norm", "") == "fused"
            longest = 0.98 if step.compile == "max-autotune-no-cudagraphs" else 1
            return super().seconds(step) * longest * ((0.95 if step.compile == "eager" else 1.1) if fused else 1)

    best = searched(Fusing(), frozenset({"optimizer"}), dtype="fp32").best
    assert (best.parts["norm"], best.parts["loss"]) == ("reference", "fused")


def test_kernels_are_raced_apart_only_where_together_they_are_not_taken():
    kept = frozenset({"projections"})
    apart = {t.round for t in searched(Written(), kept).tried}
    assert "kernels apart" not in apart, "the fused loss makes all of them together faster"

    class Worse(Written):
        def seconds(self, step: Workload) -> float:
            return super().seconds(step) * (3.0 if getattr(step, "norm", "") == "fused" else 1)

    search = searched(Worse(), kept)
    assert next(t.verdict for t in search.tried if t.round == "together") == "slower"
    assert {t.round: t.change for t in search.tried if t.verdict == "taken"}["kernels apart"] == {"loss": "fused"}


def test_without_time_nothing_is_measured_and_all_of_it_is_said():
    search = searched(Written(races=2))
    assert sum(1 for tried in search.tried if tried.ratio is not None) == 2
    late = [tried for tried in search.tried if tried.verdict == "not reached"]
    assert late and all(tried.why == "the time was over" for tried in late)


def test_what_is_usually_faster_is_one_race_and_is_taken_back_choice_by_choice():
    search = searched(Written(races=1), dtype="fp32")
    best = search.best
    assert (best.dtype, best.optimizer, best.graph) == ("bf16-master", "adamw-one-launch", "step")
    assert getattr(best, "attention", "") == "flash" and getattr(best, "projections", "") == "joint"

    class Joint(Written):
        def seconds(self, step: Workload) -> float:
            return super().seconds(step) * (1.1 if getattr(step, "projections", "") == "joint" else 1)

    search = searched(Joint(), frozenset({"compile", "optimizer"}), dtype="fp32")
    back = {tuple(t.change.items()): t for t in search.tried if t.round == "without"}
    assert len(back) == 5 and (("dtype", "fp32"),) in back, "its optimizer is kept, so it stays as it is"
    assert back[("projections", "apart"),].verdict == "taken" and back[("attention", "reference"),].verdict == "slower"
    assert getattr(search.best, "projections", "") == "apart"


def test_blocks_offload_where_the_memory_holds_less_than_what_they_keep():
    """Two thirds of them and a third, while operators run one by one."""

    def tried(**step: str) -> list[object]:
        bench, kept = Written(unfit=("none", "selective")), frozenset({"graph", "compile"})
        search = searched(bench, kept, True, model="small", attention="sdpa", dtype="bf16", **step)
        return [one.change["checkpointing"] for one in search.tried if one.round == "offload"]

    assert tried(checkpointing="every-1") == ["offload-8", "offload-4"]
    assert not tried(checkpointing="none") and not tried(checkpointing="every-1", graph="step")


def test_the_usual_changes_are_those_that_the_step_may_have():
    def fields(kept: Sequence[str] = (), **step: object) -> set[str]:
        return {name for group in groups_that_may(workload(**step), frozenset(kept)) for name in group}

    parts = {"norm", "rope", "mlp", "loss"}
    assert fields() == {"dtype", "optimizer", "graph", "attention", "projections", *parts}
    assert fields(["norm", "dtype"]) == {"optimizer", "graph", "attention", "projections", *parts} - {"norm"}
    assert "graph" not in fields(compile="reduce-overhead"), "it captures graphs of its own"
    ranks = {"parallel": "fsdp2", "ranks": 2, "batch_size": 4, "dtype": "bf16"}
    assert fields(**ranks) == {"optimizer", "attention", *parts}, "no graph holds it"
    ranks |= {"parallel": "ddp"}
    assert fields(**ranks) == {"optimizer", "attention", "graph", "parallel", *parts}, "another that sends the same"
    assert fields(["parallel"], **ranks) == {"optimizer", "attention", *parts}
    own = FactoryWorkload(model=UserModel(name=""), factory="own.py:make")
    assert [set(group) for group in groups_that_may(own, frozenset())] == [
        {"dtype", "optimizer"}, {"graph"}, {"attention"}, parts, {"projections"},
    ]  # fmt: skip


class Own(Written):
    """A bench for a user's model, whose kernels say a factor, or are refused because it has no such modules."""

    def __init__(self, factor: float | None) -> None:
        super().__init__()
        self.factor, self.raced = factor, list[Workload]()

    def race(self, best: Workload, other: Workload) -> Tried:
        self.raced.append(other)
        if self.factor is None and "fused" in other.parts.values():
            why = "kernels fused replace nothing in ViT: it has no RMSNorm, no SwiGLU of gate, up and down"
            return Tried(round="", change={}, verdict="refused", why=why)
        return super().race(best, other)

    def seconds(self, step: Workload) -> float:
        fused = "fused" in step.parts.values()
        alone = super().seconds(msgspec.structs.replace(step, loss="reference"))
        return alone * (self.factor or 1 if fused else 1)


def searched_own(factor: float | None, kept: frozenset[str] = frozenset()) -> tuple[Search, Own]:
    search = Search(FactoryWorkload(model=UserModel(name=""), factory="own.py:make"), on_gpu=True, kept=kept)
    bench = Own(factor)
    search.run(bench)
    return search, bench


def test_kernels_in_a_user_s_model_are_tried_together_and_taken_back():
    search, _ = searched_own(0.9)
    together, *others = search.tried
    assert (together.round, together.verdict) == ("together", "taken")
    assert together.change.items() >= {**dict.fromkeys(PARTS, "fused"), "graph": "step"}.items()
    assert not {"kernels", "kernels apart"} & {tried.round for tried in others}
    back = [tried for tried in others if tried.round == "without" and "norm" in tried.change]
    own = dict.fromkeys(PARTS, "reference")
    assert [(tried.change, tried.verdict) for tried in back] == [(own, "slower")]
    assert "--kernels fused" in (run_command(search.best) or "")
    assert "kernels='fused'" in (run_call(search.best) or "")


def test_kernels_that_are_slower_in_a_user_s_model_are_tried_alone_and_apart():
    search, _ = searched_own(4.0)
    changes = {
        name: [(t.change, t.verdict) for t in search.tried if t.round == name] for name in ("kernels", "kernels apart")
    }
    assert changes["kernels"] == [(dict.fromkeys(PARTS, "fused"), "slower")]
    assert changes["kernels apart"] == [({part: "fused"}, "slower") for part in PARTS]
    kept, _ = searched_own(0.9, frozenset({"norm"}))
    assert (getattr(kept.best, "norm", ""), getattr(kept.best, "mlp", "")) == ("reference", "fused")


def test_parts_that_a_user_s_model_does_not_have_are_never_asked_for():
    """`tune` tries the parts that the model has together, and a single one once."""

    def tried(*absent: str) -> list[object]:
        search, bench = searched_own(4.0, frozenset(absent))
        assert not any(getattr(step, part) == "fused" for step in bench.raced for part in absent)
        return [t.change for t in search.tried if t.round in ("kernels", "kernels apart")]

    assert tried("rope") == [
        {"norm": "fused", "mlp": "fused", "loss": "fused"}, {"norm": "fused"}, {"mlp": "fused"}, {"loss": "fused"},
    ]  # fmt: skip
    assert tried("norm", "rope", "mlp") == [{"loss": "fused"}]


def test_a_user_s_model_without_such_modules_has_the_rest_of_what_is_usually_faster():
    """One row says why, and nothing asks again."""
    search, bench = searched_own(None)
    refused, again = (tried for tried in search.tried if tried.round == "together")
    assert refused.verdict == "refused" and "it has no RMSNorm, no SwiGLU" in refused.why
    assert again.verdict == "taken" and set(again.change) == {"dtype", "optimizer", "graph", "attention", "projections"}
    assert sum("fused" in step.parts.values() for step in bench.raced) == 1
    assert not [tried for tried in search.tried if tried.round.startswith("kernels")]
    assert search.best.graph == "step" and getattr(search.best, "norm", "") == "reference"


def test_a_model_with_dropout_in_attention_is_tried_together_with_what_takes_it():
    class Dropping(Own):
        def race(self, best: Workload, other: Workload) -> Tried:
            if other.attention not in (None, "sdpa"):
                why = f"attention {other.attention} takes no call of own.py:make: it has dropout; leave out attention"
                return Tried(round="", change={}, verdict="refused", why=why)
            return super().race(best, other)

    search = Search(FactoryWorkload(model=UserModel(name=""), factory="own.py:make"), on_gpu=True)
    search.run(Dropping(0.9))
    refused, taken = (tried for tried in search.tried if tried.round == "together")
    assert (refused.verdict, taken.verdict) == ("refused", "taken")
    assert taken.change == {**refused.change, "attention": "sdpa"}


def compiled_first(bench: Written, **own: Any) -> Search:
    step = FactoryWorkload(model=UserModel(name=""), factory="own.py:make", **own)
    search = Search(step, on_gpu=True, compiles=True)
    search.run(bench)
    return search


def test_a_user_s_model_is_compiled_first_block_by_block():
    search = compiled_first(Own(0.9))
    first = search.tried[0]
    assert (first.round, first.verdict, first.change["compile"]) == ("together", "taken", "blocks")
    assert {part for part, name in first.change.items() if name == "fused"} == {*PARTS}
    assert {"compile": "default"} in [tried.change for tried in search.tried if tried.round == "compile"]
    # What is compiled already, or must stay as it is, is no part of it.
    assert "compile" not in compiled_first(Own(0.9), compile="default").tried[0].change
    assert "compile" not in searched_own(0.9)[0].tried[0].change


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        ("refused", "forward cannot be captured into a CUDA graph: an error; leave out --graph step"),
        ("failed", "the process was killed"), ("doubted", "it fell back to eager"), ("does not fit", "out of memory"),
    ],
)  # fmt: skip
def test_where_a_user_s_model_does_not_compile_the_rest_is_tried_without(verdict: Any, why: str):
    class Uncompiled(Own):
        def race(self, best: Workload, other: Workload) -> Tried:
            if other.compile != "eager":
                return Tried(round="", change={}, verdict=verdict, why=why)
            return super().race(best, other)

    first, second, *_ = compiled_first(Uncompiled(0.9)).tried
    assert (first.verdict, second.round, second.verdict) == (verdict, "together", "taken")
    assert second.change.keys() ^ first.change.keys() == {"compile"}
    assert {part for part, name in second.change.items() if name == "fused"} == {*PARTS}


def test_a_compiled_model_without_such_modules_has_the_rest_compiled():
    search = compiled_first(Own(None))
    refused, again = (tried for tried in search.tried if tried.round == "together")
    assert (refused.verdict, again.verdict, again.change["compile"]) == ("refused", "taken", "blocks")
    assert "fused" not in again.change.values()


def test_a_change_back_to_a_model_s_own_attention_is_kept_and_said():
    search = compiled_first(Own(0.9))
    (back,) = [tried for tried in search.tried if tried.change == {"attention": None}]
    assert change_words(back.change) == "the model's own attention"
    found = search.so_far(search.baseline)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Tuned) == found


def test_a_model_whose_blocks_nobody_knows_is_compiled_as_a_whole():
    class OfOneBlock(Own):
        def race(self, best: Workload, other: Workload) -> Tried:
            if other.compile == "blocks":
                why = "compile mode blocks needs a model whose blocks are known: choose default"
                return Tried(round="", change={}, verdict="refused", why=why)
            return super().race(best, other)

    refused, taken, *_ = compiled_first(OfOneBlock(0.9)).tried
    assert (refused.verdict, taken.verdict) == ("refused", "taken")
    assert taken.change == {**refused.change, "compile": "default"}


def test_how_soon_a_search_was_near_its_end_is_told():
    def tried(ratio: float, ended_s: float | None, verdict: Any = "taken") -> Tried:
        return Tried(round="a", change={"graph": "step"}, verdict=verdict, ratio=ratio, ended_s=ended_s)

    def near(*races: Tried) -> float | None:
        step = workload()
        change = Change(ratio=0.5, processes=(5, 5), interval=Interval(low=0.49, high=0.51))
        found = Tuned(
            asked=step, baseline=step, best=step, tried=races, seconds=371.0, baseline_s=2.0, best_s=1.0,
            confirmed=change,
        )  # fmt: skip
        found = msgspec.structs.replace(found, best=msgspec.structs.replace(step, dtype="bf16"))
        said = [line.text for line in answer_tuned(found).lead if "ended after" in line.text]
        unconfirmed = answer_tuned(msgspec.structs.replace(found, confirmed=None)).lead
        assert [line.text for line in unconfirmed if "ended after" in line.text] == said
        at = found.near_end_s
        assert said == ([] if at is None else [f"Within 5 % of the end in {at:.0f} s, ended after 371 s."])
        return at

    assert near(tried(0.2, 119.0), tried(1.1, 150.0, "slower"), tried(0.97, 180.0), tried(0.99, 200.0)) == 119.0
    assert near(tried(0.2, 119.0), tried(0.94, 180.0), tried(0.99, 200.0)) == 180.0
    assert near(tried(0.2, None), tried(0.94, 180.0)) == 180.0 and near(tried(0.2, None)) is None
    assert near() is None


def test_kernels_of_which_a_model_has_none_are_asked_for_once():
    search, _ = searched_own(None, frozenset({"dtype", "optimizer", "attention", "projections"}))
    assert [(t.round, t.verdict) for t in search.tried if "fused" in t.change.values()] == [("together", "refused")]
    assert search.best.graph == "step"


@pytest.mark.slow
def test_a_race_of_kernels_that_replace_nothing_is_refused_with_the_reason(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    own = FactoryWorkload(model=UserModel(name=""), factory=f"{tmp_path}/own.py:make")
    with Racing(device="cpu", out=str(tmp_path / "runs"), budget_s=600) as racing:
        found = racing.race(own, msgspec.structs.replace(own, norm="fused", mlp="fused", loss="fused"))
    assert (found.verdict, found.ratio) == ("refused", None)
    assert found.why.startswith("kernels fused replace nothing in Linear: it has no RMSNorm, no SwiGLU")


def test_noise_takes_nothing():
    search = searched(Written(noise=3.0))
    assert search.best == search.baseline and {t.verdict for t in search.tried} <= {"undecided", "refused"}


def test_a_race_whose_interval_holds_1_is_not_taken_whatever_the_normal_law_says():
    class Skewed(Written):
        def race(self, best: Workload, other: Workload) -> Tried:
            interval = Interval(low=0.083, high=1.423)
            return msgspec.structs.replace(
                super().race(best, other), ratio=0.22, interval=interval, p_value=p_value_of(0.22, interval)
            )

    search = searched(Skewed(), on_gpu=False)
    assert (p_value_of(0.22, Interval(low=0.083, high=1.423)) or 1) < 0.05 and search.best == search.baseline


class Unsteady(Written):
    """A bench whose steps differ too much for an interval."""

    def race(self, best: Workload, other: Workload) -> Tried:
        found = super().race(best, other)
        assert found.ratio is not None
        return msgspec.structs.replace(found, interval=None, p_value=None, apart=found.ratio < 0.55)


def test_without_intervals_steps_that_do_not_overlap_are_taken():
    search = searched(Unsteady(), kept=frozenset({"graph", "checkpointing"}), dtype="fp32")
    (together, *later) = [tried for tried in search.tried if tried.ratio is not None]
    assert together.verdict == "taken" and together.p_value is None and search.best.dtype == "bf16-master"
    assert {tried.verdict for tried in later} == {"undecided"}


def test_steps_of_two_processes_are_told_apart_by_an_interval_or_where_they_do_not_overlap():
    def run(*step: float) -> Run:
        return make_run(workload(), step=list(step))

    drifting = [0.077 + 0.0005 * n for n in range(26)]  # each step is like the one before
    steady = [0.0770, 0.0775, 0.0772, 0.0777, 0.0771, 0.0776, 0.0773, 0.0779, 0.0774, 0.0778] * 3
    told = beside(run(*steady), run(*(half / 2 for half in steady)))
    assert told.ratio == pytest.approx(0.5) and told.interval is not None and told.p_value is not None
    assert not told.apart and not told.why
    faster = beside(run(*drifting), run(*(part / 7 for part in drifting)))
    assert faster.apart and faster.ratio == pytest.approx(1 / 7) and faster.interval is faster.p_value is None
    assert faster.why == "without an interval: each of its steps was shorter than every step of the best"
    slower = beside(run(*drifting), run(*(3 * whole for whole in drifting)))
    assert slower.apart and "each of its steps was longer" in slower.why
    open_ = beside(run(*drifting), run(*(0.99 * part for part in drifting)))
    assert not open_.apart and "too few for an interval" in open_.why and open_.verdict == "undecided"


def test_what_is_predicted_not_to_fit_is_not_measured():
    bench = Written(unfit=("none",))
    search = searched(bench, checkpointing="every-1")
    unfit = [tried for tried in search.tried if tried.verdict == "does not fit"]
    assert unfit and all(tried.ratio is None for tried in unfit)
    assert search.best.checkpointing != "none"


class Blocks(Written):
    """A bench of steps with a memory: a block whose products are kept takes 1 of it, and the reference loss 4."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.asked = room, list[str]()

    def kept_blocks(self, step: Workload) -> float:
        assert isinstance(step, TextbookWorkload)
        layers = step.model.layers
        whole = {"none": 1.5 * layers, "selective": layers, "attention": 0, "every-1": -layers}
        return whole.get(step.checkpointing) or selective_of(step.checkpointing) or 0

    def fits(self, workload: Workload) -> str | None:
        self.asked.append(workload.checkpointing)
        needed = self.kept_blocks(workload) + 4 * (getattr(workload, "loss", "") == "reference")
        return None if needed <= self.room else "too large"

    def seconds(self, step: Workload) -> float:
        return super().seconds(step) * (1 - 0.01 * self.kept_blocks(step))


def test_as_many_blocks_keep_their_products_as_fit():
    """Between the mixtures of quarters, and once more when the fused loss has made room."""
    asked: dict[str, Any] = {"layers": 16, "attention": "flash", "batch_size": 1}
    bench = Blocks(14)
    found = one_that_fits(workload(**asked, checkpointing="none"), bench)  # pyright: ignore[reportArgumentType]
    assert found.checkpointing == "selective-10"
    search = searched(bench, **asked, checkpointing="attention")
    taken = [(t.round, t.change.get("checkpointing")) for t in search.tried if t.verdict == "taken"]
    assert [(name, choice) for name, choice in taken if choice] == [
        ("memory", "selective-8"), ("blocks", "selective-10"),
        ("memory again", "selective-12"), ("blocks again", "selective-14"),
    ]  # fmt: skip
    assert search.best.checkpointing == "selective-14"
    kept = searched(bench, frozenset({"checkpointing"}), **asked, checkpointing="selective-4")
    assert kept.best.checkpointing == "selective-4"


def test_where_nothing_predicts_a_step_no_blocks_are_looked_for():
    bench = Written()
    search = searched(bench, layers=16, attention="flash", batch_size=1, checkpointing="selective-4")
    assert "blocks" not in {t.round for t in search.tried}


def test_a_step_that_does_not_fit_is_split_or_computed_again_first():
    class Small(Written):
        def fits(self, workload: Workload) -> str | None:
            return None if workload.checkpointing == "selective" and workload.accumulation >= 2 else "too large"

    found = one_that_fits(workload(batch_size=4), Small())  # pyright: ignore[reportArgumentType]
    assert (found.checkpointing, found.accumulation) == ("selective", 2)
    with pytest.raises(InputError, match="however it is split"):
        one_that_fits(workload(batch_size=1), Written(unfit=("none", "selective", "every-1")))  # pyright: ignore[reportArgumentType]


def test_on_a_cpu_nothing_of_a_gpu_is_tried():
    search = searched(Written(), on_gpu=False)
    words = {value for tried in search.tried for value in tried.change.values()}
    assert not words & {"flash", "tf32", "bf16-master", "adamw-one-launch", "blocks", "step"}


@given(st.sampled_from(["fp32", "bf16", "tf32", "bf16-master"]), st.sampled_from(["eager", "default"]), st.booleans())
def test_each_change_of_a_round_changes_something_once(dtype: str, compiled: str, on_gpu: bool):
    best = workload(dtype=dtype, compile=compiled, batch_size=8, checkpointing="every-1")
    usual = together(groups_that_may(best, frozenset()))
    for round_ in (*BEFORE, usual, *ROUNDS):
        made = [m for _, m in changes_of(round_, best, on_gpu=on_gpu, kept=frozenset()) if not isinstance(m, str)]
        keys = [one.key for one in made]
        assert best.key not in keys and len(set(keys)) == len(keys)
        assert all(one.batch_size == best.batch_size for one in made)


def test_what_computes_least_again_comes_first():
    changes = lighter(workload(batch_size=4))
    assert changes[0] == {"checkpointing": "none", "accumulation": 1}
    assert [change["accumulation"] for change in changes[:3]] == [1, 2, 4]
    assert list(dict.fromkeys(change["checkpointing"] for change in changes)) == [
        "none", "selective", "attention", "every-1",
    ]  # fmt: skip
    mixed = lighter(workload(batch_size=1, attention="flash", checkpointing="attention"))
    assert [change["checkpointing"] for change in mixed] == [
        "none", "selective", "selective-3", "selective-2", "selective-1", "attention", "every-1",
    ]  # fmt: skip


def test_kept_attention_is_tried_where_attention_is_fused():
    (memory,) = (round_ for round_ in BEFORE if round_.name == "memory")

    def tried(attention: str, checkpointing: str = "every-1") -> list[str]:
        best = workload(batch_size=1, checkpointing=checkpointing, attention=attention)
        made = [m for _, m in changes_of(memory, best, on_gpu=True, kept=frozenset())]
        return [m.checkpointing for m in made if not isinstance(m, str)]

    assert tried("flash") == ["none", "selective", "selective-3", "selective-2", "selective-1", "attention"]
    assert tried("reference") == ["none", "selective"]
    assert tried("flash", "selective-2") == ["none", "selective", "selective-3"]


def test_a_p_value_is_that_of_its_interval():
    assert p_value_of(1.0, Interval(low=0.9, high=1.1)) == pytest.approx(1.0)
    assert p_value_of(1.1, Interval(low=1.0, high=1.21)) == pytest.approx(0.05, abs=1e-6)
    assert p_value_of(1.1, None) is None


def curve(name: str, *, off: float = 0.0, slope: float = -0.05, steps: int = 50) -> LossCurve:
    return LossCurve(name=name, losses=tuple(9.0 + off + slope * n for n in range(steps)))


def test_losses_depart_where_they_leave_what_starts_do():
    starts = [curve("baseline"), curve("baseline, start 2", off=0.02), curve("baseline, start 3", off=-0.02)]
    assert departs_at([*starts, curve("fastest", off=0.03)]) is None
    assert departs_at([*starts, curve("fastest", slope=0.0)]) in range(2, 6)
    assert departs_at([*starts, curve("fastest", steps=20)]) == 21, "it stopped being finite"
    assert departs_at([curve("baseline", steps=0), curve("fastest", steps=0)]) is None


def test_losses_that_say_nothing_are_told_so():
    starts = [curve("baseline"), curve("baseline, start 2", off=0.02)]
    assert why_not_compared([*starts, curve("fastest")]) == ""
    assert "same parameters" in why_not_compared([starts[0], curve("fastest")])
    assert departs_at([starts[0], curve("fastest", off=0.001)]) is None, "nothing says how far is too far"
    assert departs_at([starts[0], curve("fastest", steps=7)]) == 8, "but it must stay finite"
    assert why_not_compared([curve("baseline", steps=9), starts[1], curve("fastest")]).startswith(
        "the baseline's losses"
    )
    still = curve("baseline", slope=0.0)
    assert "never change" in why_not_compared([still, still, still])
    assert "another start" in why_not_compared([starts[0], curve("", steps=9), curve("fastest")])
    found = tuned(curves=(curve("baseline"), curve("fastest")), why_no_losses="that is why")
    answer = answer_tuned(found)
    assert [f.sentence for f in answer.findings if f.kind == "losses-not-compared"] == [
        "Losses could not be compared: that is why."
    ]
    (losses,) = (table for table in answer.tables if table.title == "Losses")
    assert losses.notes and "stay as near" not in str(losses.notes)


OWN = """
import torch
from torch import nn

def square(out):
    return out.square().mean()

def make():
    return nn.Linear(8, 8), torch.randn(4, 8), square

def seeded():
    torch.manual_seed(0)
    return make()

def with_optimizer():
    model, batch, loss = make()
    return model, batch, loss, torch.optim.SGD(model.parameters(), 0.01)

class Steps:
    def __init__(self):
        self.model = nn.Linear(8, 8)
        self.phases = [("all", lambda: self.model(torch.ones(2, 8)).sum().backward())]
"""


def test_a_factory_s_losses_from_another_start_are_of_other_parameters(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)

    def losses(factory: str, start: int | None = None) -> list[float] | None:
        own = FactoryWorkload(model=UserModel(name=""), factory=f"{tmp_path}/own.py:{factory}")
        return trained(Training(workload=own, device="cpu", start_seed=start, steps=3))

    assert len(losses("make") or []) == len(losses("make", 1) or []) == 3
    assert len(losses("seeded") or []) == 3 and losses("seeded", 1) is None
    with pytest.raises(InputError, match="tells no loss"):
        losses("Steps")


def test_where_nothing_was_raced_nothing_is_said_of_speed():
    search = searched(Written(races=0))
    (_, last) = answer_tuned(search.so_far(search.baseline)).lead
    assert last.text == "No change was raced: it stays as it is."


def test_the_factory_s_own_optimizer_stays_and_what_is_wrong_with_its_run_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = FactoryWorkload(model=UserModel(name=""), factory="own.py:make")
    found = msgspec.structs.replace(asked, optimizer="SGD", by_factory=("optimizer",))
    evidence = Evidence(absent=("attention", "projections"))
    run = make_run(step=[1.0] * 9, workload=found, findings=(error("wrong", "It is wrong."),), evidence=evidence)
    racing = Racing(device="cpu", out=str(tmp_path), budget_s=0)
    monkeypatch.setattr(racing, "_measured", lambda *_, **__: [run])
    answer = answer_tuned(tune(asked, racing, device="cpu", on_gpu=False))
    assert "SGD" in answer.lead[0].text
    (gave,) = (table for table in answer.tables if table.title == "What each change gave")
    assert [row[0] for row in gave.rows] == ["precision", "compile"], "its model has no projections of one input"
    (wrong,) = (finding for finding in answer.findings if finding.severity == "error")
    assert wrong.kind == "baseline-doubted" and wrong.sentence.endswith("found an error: It is wrong.")


def tuned(**fields: object) -> Tuned:
    search = searched(Written(), dtype="bf16")
    return msgspec.structs.replace(
        Tuned(asked=search.baseline, baseline=search.baseline, best=search.best, tried=tuple(search.tried)), **fields
    )


def test_a_change_whose_losses_depart_is_taken_back():
    found = without_numeric_changes(tuned(departs_at=7))
    assert found.best.dtype == "bf16" and found.best.graph == "step" and found.departs_at is None
    wrong = [tried for tried in found.tried if tried.verdict == "not right"]
    assert [tried.round for tried in wrong] == ["together"] and "step 7" in wrong[0].why
    assert set(wrong[0].change) == {"dtype", "optimizer"}, "what computes something else"
    (stays,) = (t for t in found.tried if t.round == "together" and t.verdict == "taken")
    assert stays.change["graph"] == "step" and stays.ratio is None, "it was not timed apart"
    assert found.best.optimizer == "adamw-under-backward", "another round's"


def test_the_answer_says_what_to_use_and_how_sure_it_is():
    change = Change(ratio=0.5, processes=(5, 5), interval=Interval(low=0.4, high=0.625))
    found = tuned(
        confirmed=change, baseline_s=0.04, best_s=0.02, baseline_peak_bytes=2 << 30, best_peak_bytes=1 << 30,
        curves=(curve("baseline"), curve("fastest")),
    )  # fmt: skip
    answer = answer_tuned(found)
    told = [line.split() for line in plain_text(answer).splitlines()]
    assert ["baseline", "40", "ms", "2.00", "GiB"] in told and ["fastest", "20", "ms", "1.00", "GiB"] in told
    assert "2.00 times as fast (interval 1.60 to 2.50; 5 processes a side)" in answer.lead[-1].text
    assert answer.asides[0].startswith("Measure it: stepscope run --model") and "--graph step" in answer.asides[0]
    assert answer.asides[1].startswith("In Python: stepscope.run(") and "graph='step'" in answer.asides[1]
    assert not [finding for finding in answer.findings if finding.severity != "note"]
    slower = answer_tuned(msgspec.structs.replace(found, confirmed=Change(
        ratio=1.2, processes=(5, 5), interval=Interval(low=1.1, high=1.3))))  # fmt: skip
    assert [finding.kind for finding in slower.findings if finding.severity == "error"] == ["slower-when-confirmed"]
    assert {f.kind for f in answer_tuned(tuned(interrupted=True)).findings} >= {"interrupted"}
    open_ = answer_tuned(msgspec.structs.replace(found, confirmed=Change(
        ratio=1.2, processes=(5, 5), interval=Interval(low=0.8, high=1.8))))  # fmt: skip
    assert [f.kind for f in open_.findings if f.severity == "warning"] == ["undecided-when-confirmed"]
    late = msgspec.structs.replace(found.tried[0], verdict="not reached")
    (told,) = [f for f in answer_tuned(tuned(tried=(late,), needed_s=540.0)).findings if f.kind == "not-reached"]
    assert "of over 540 s" in told.remedy and "no time for it and" in told.sentence
    none = answer_tuned(tuned(tried=(msgspec.structs.replace(late, ratio=None),)))
    assert "took turns" not in str(none.tables[0].notes), "nothing was raced"


def test_a_change_of_all_parts_is_one_word():
    said: dict[str, str | int] = {"graph": "step", **dict.fromkeys(PARTS, "fused")}
    assert change_words(said) == "graph step, kernels fused"
    assert change_words({"norm": "fused", "accumulation": 2}) == "norm fused, accumulation 2"
    assert change_words(said | {"norm": "liger"}).startswith("graph step, norm liger, rope fused")


def test_a_training_s_losses_are_those_of_its_batches():
    """From another start they are those of other parameters, over the same batches."""
    training = Training(workload=mini(), device="cpu", steps=6)
    losses = trained(training)
    assert losses is not None and len(losses) == 6 and losses == trained(training) and losses[4] < losses[0]
    cpu = torch.device("cpu")
    other = TrainingStep(mini(seed=1), cpu)
    other.batches = TrainingStep(mini(), cpu).batches
    drive(other)
    assert other.loss is not None and float(other.loss) != losses[0]
    restarted = msgspec.structs.replace(training, start_seed=1)
    assert (trained(restarted) or [])[0] == float(other.loss)
    assert losses_of(training, restarted) == [losses, trained(restarted)], "one process trains as several do"


def test_losses_of_an_earlier_search_are_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def trained_here(*trainings: Training) -> list[list[float] | None]:
        asked.append(len(trainings))
        return [[3.0, 2.0], None, [3.5, 2.5]][: len(trainings)]

    monkeypatch.setattr(curves_module, "losses_of", trained_here)
    first, second = workload(layers=1), workload(layers=2)
    found = curves(first, second, "cpu", out=tmp_path)
    assert asked == [3, 1] and [curve.name for curve in found] == ["baseline", "baseline, start 3", "fastest"]
    assert curves(first, second, "cpu", out=tmp_path) == found and asked == [3, 1]
    curves(first, workload(layers=3), "cpu", out=tmp_path)  # the baseline is known
    assert asked == [3, 1, 1]
    curves(first, second, "cpu", 1 << 30, out=tmp_path)
    curves(first, second, "cpu", out=tmp_path, fresh=True)
    assert asked == [3, 1, 1, 3, 1, 3, 1]
    for kept in tmp_path.iterdir():
        kept.write_bytes(b"[[1.0")
    assert curves(first, second, "cpu", out=tmp_path) == found and asked[-2:] == [3, 1], (
        "what is damaged counts as none"
    )


def test_time_is_kept_by_what_the_two_steps_took(tmp_path: Path):
    now = [0.0]
    racing = Racing(device="cpu", out=str(tmp_path), budget_s=600, clock=lambda: now[0])
    first, second, third = (workload(layers=layers) for layers in (1, 2, 3))

    def took(seconds: float, *steps: Workload, processes: int = 1) -> None:
        began, now[0] = now[0], now[0] + seconds
        racing.note_time(began, *steps, processes=processes)

    took(20, first)
    took(60, first, second)  # compiled for the first time
    took(60, second, third, processes=2)  # one after the other: 30 s each
    # 140 s are over. Another race may take 60 s; 5 processes of 20 s and 5 of 30 s confirm; three trainings of 20 s and
    # one of 30 s: 540 s.
    assert racing.time_left(first, second) and racing.needed_s == 540
    now[0] += 60.5
    assert not racing.time_left(first, second)
    # With the first alone: 60 + 10 x 20 + 4 x 20 s.
    assert racing.time_left(first, first)
    now[0] = 530.0
    assert racing.time_left(first, first), "nothing was found that is to be confirmed"
    now[0] = 541.0
    assert not racing.time_left(first, first)


def test_a_budget_without_time_for_the_end_is_spent_on_races(tmp_path: Path):
    now = [0.0]
    racing = Racing(device="cpu", out=str(tmp_path), budget_s=60, clock=lambda: now[0])
    step = workload()
    now[0] = 10.0
    racing.note_time(0.0, step)  # another race takes 10 s; to confirm 100 s, and to train 40 s
    assert racing.time_left(step, step) and racing.needed_s == 160
    assert racing.time_for_losses(step, step) and not racing.time_to_confirm(step, step)
    now[0] = 49.0
    assert racing.time_left(step, step) and not racing.time_for_losses(step, step)
    now[0] = 50.0
    assert not racing.time_left(step, step)


def test_a_race_is_stopped_when_its_time_is_over_and_measured_by_a_later_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What an earlier search stopped is found again, and is no result."""
    now, asked = [0.0], list[tuple[float, bool]]()
    stopped = msgspec.structs.replace(make_run(), status="timed-out", failure=None)

    def sweep(_plan: object, policy: Policy, tell: TellSweep, _series: object) -> list[Run]:
        asked.append((policy.timeout_s, policy.fresh))
        tell(SweepState(cells=[CellState(cell=Cell(workload=workload()), resumed=not policy.fresh)], timeout_s=9.0))
        return [stopped]

    monkeypatch.setattr("stepscope.questions.tuning_races.run_sweep", sweep)
    racing, step = Racing(device="cpu", out=str(tmp_path), budget_s=60, clock=lambda: now[0]), workload()
    racing._longest_s, now[0] = 10.0, 20.0
    assert racing.time_left(step, step), "for races alone: the end would take 140 s"
    now[0] = 21.0
    assert racing._raced(Cell(workload=step)) == [stopped] and asked == [(39.0, False), (39.0, True)]
    racing.budget_s = 600
    racing._keeps_time = None
    assert racing.time_left(step, step), "the end's 140 s are kept"
    racing._raced(Cell(workload=step), Cell(workload=step))
    assert asked[-1] == ((600 - 140 - 21) / 2, True)


def test_a_race_that_was_stopped_needs_more_than_was_foretold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A search of 60 s is not told that 57 s have time for what it stopped."""
    now = [20.0]
    stopped = msgspec.structs.replace(make_run(), status="timed-out", failure=None)

    def sweep(_plan: object, policy: Policy, tell: TellSweep, _series: object) -> list[Run]:
        tell(SweepState(cells=[CellState(cell=Cell(workload=workload()))], timeout_s=policy.timeout_s))
        now[0] += policy.timeout_s
        return [stopped]

    monkeypatch.setattr("stepscope.questions.tuning_races.run_sweep", sweep)
    racing, step = Racing(device="cpu", out=str(tmp_path), budget_s=0.0, clock=lambda: now[0]), workload()
    racing._began, racing._longest_s, racing.budget_s = 0.0, 1.0, 60.0
    assert racing.time_left(step, step) and racing.needed_s == 20 + 1 + 14
    assert racing.race(step, workload(layers=2)).verdict == "not reached"
    assert racing.needed_s == 60, "the end's 14 s were kept, and 26 s for the race were not enough"


def test_what_the_user_named_is_raced_first_and_alone_in_its_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def fn(q, k, v, causal): ...\n")
    options, named = named_apart({"attention": "mine.py:fn,sdpa,flash", "dtype": "fp32", "norm": "reference"})
    assert options == {"attention": "sdpa", "dtype": "fp32", "norm": "reference"}
    mine, flash = named["attention"]
    assert mine.startswith("mine.py:fn@") and flash == "flash"
    with pytest.raises(InputError, match="unknown attention 'sdap'"):
        named_apart({"attention": "sdpa,sdap"})
    search = Search(baseline=workload(attention="sdpa"), on_gpu=True, named=named)
    search.run(Written())
    assert [tried.change for tried in search.tried[:2]] == [{"attention": mine}, {"attention": "flash"}]
    assert search.tried[0].round == "named attention" and search.best.attention == "flash"
    assert not any("attention" in tried.change for tried in search.tried[2:])
    refused = msgspec.structs.replace(search.tried[0], verdict="refused", why="it is wrong")
    found = msgspec.structs.replace(search.so_far(search.baseline), tried=(refused,), needed_s=9.0)
    kinds = {finding.kind: finding for finding in answer_tuned(found).findings}
    assert kinds["named-refused"].severity == "error" and "it is wrong" in kinds["named-refused"].sentence
    assert "not-confirmed" in kinds


def test_a_step_alone_takes_less_than_a_race_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    racing = Racing(device="cpu", out=str(tmp_path), budget_s=600, clock=lambda: now[0])
    first, second = workload(layers=1), workload(layers=2)
    now[0] = 60.0
    turns = Turns(
        start_s=9.0, first_s={first.key: 1.0, second.key: 19.0}, later_s={first.key: 12.0, second.key: 4.0},
        step_s={first.key: 0.5, second.key: 0.1},
    )  # fmt: skip
    racing.note_time(0.0, first, second, turns=turns)
    # Start and steps take 45 of the 60 s. Alone, a step takes the start, two thirds of the rest, and its own steps.
    alone = (9 + 10 + 1 + 12, 9 + 10 + 19 + 4)
    # One process trains the first from three starts, another the second: each a third of what making and looking
    # took, the first step, and 50 more.
    trained = 2 * 9 + 3 * (5 + 1 + 50 * 0.5) + (5 + 19 + 50 * 0.1)
    # 60 s are over, and another race may take 60.
    racing.budget_s = 1000
    assert racing.time_left(first, second) and racing.needed_s == 60 + 60 + 5 * sum(alone) + trained
    # Ten processes that confirm and two that train import PyTorch, which the races, forked, had imported.
    racing._series.forks = SimpleNamespace(import_s=7.0, close=lambda: None)  # pyright: ignore[reportAttributeAccessIssue]
    assert racing.time_left(first, second) and racing.needed_s == 60 + 60 + 5 * sum(alone) + trained + 12 * 7
    # Side by side, processes get ready in waves as large as the memory holds, half as long again; then each is alone.
    from_here = (9 + 5 + 1, 9 + 5 + 19)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.setattr("stepscope.questions.tuning_races.host_memory", lambda: (0, 200 << 30))
    racing._held_bytes, gpu = 30 << 30, make_run().environment
    assert gpu is not None and racing.side_by_side(first, second) == 1, "the device's memory is not known"
    racing.where = msgspec.structs.replace(gpu, memory_bytes=140 << 30)
    assert racing.side_by_side(first, second) == 8, "four times both steps, and some memory left"
    own = sum(alone) - sum(from_here)
    trained = max(9 + 7 + 3 * (5 + 1 + 50 * 0.5), 9 + 7 + 5 + 19 + 50 * 0.1)  # beside each other, too
    assert racing.time_left(first, second)
    assert racing.needed_s == pytest.approx(60 + 60 + 5 * own + 2 * 1.5 * (7 + max(from_here)) + trained)
    racing._held_bytes = 130 << 30
    assert racing.side_by_side(first, second) == 1, "no room for two"
    run = make_run(step=[1.0, 2.0])
    warmed = msgspec.structs.replace(run.samples["step"], warmup_s=(9.0, 0.5))
    run = msgspec.structs.replace(run, samples={"step": warmed})
    assert (steps_s(run), steps_s(run, first=False)) == (12.5, 3.5), "with the first step, and without"


def test_what_the_forking_process_imported_counts_in_no_race(tmp_path: Path):
    """A search that goes on finds its first step measured, so its first race waits for the import."""
    now = [0.0]
    racing = Racing(device="cpu", out=str(tmp_path), budget_s=600, clock=lambda: now[0])
    racing._series.forks = SimpleNamespace(import_s=7.0, close=lambda: None)  # pyright: ignore[reportAttributeAccessIssue]
    racing._imported_s = 7.0
    began = datetime.now(UTC)
    run = msgspec.structs.replace(make_run(step=[1.0]), created=(began + timedelta(seconds=10)).isoformat())
    assert racing._until(began, run) == pytest.approx(3.0)
    now[0] = 27.0
    first, second = workload(layers=1), workload(layers=2)
    racing.note_time(0.0, first, second)
    # Another race of 20 s, ten processes of 20 s and two trainings' worth, each of twelve with its import.
    assert racing.time_left(first, second) and racing.needed_s == 27 + 20 + 10 * (7 + 20) + 2 * 7 + 4 * 20


def test_what_is_compiled_once_counts_in_no_forecast():
    first = CompileReport(
        frames_total=1, frames_compiled=1, graphs=1, graph_breaks=0, recompiles=0, limit_hit=False, compile_s=57.0,
        cached_graphs=0,
    )  # fmt: skip

    def of(report: CompileReport | None) -> float:
        return compiled_s(make_run(step=[1.0], evidence=Evidence(compilation=report)))

    assert of(first) == 57.0 and of(None) == 0.0
    assert of(msgspec.structs.replace(first, cached_graphs=1)) == 0.0


def test_ranks_look_for_the_way_in_which_they_share_the_step():
    search = searched(Written(), dtype="bf16", batch_size=4, parallel="ddp", ranks=2)
    assert (search.best.parallel, search.best.ranks) == ("fsdp2", 2)
    tried = [t.change["parallel"] for t in search.tried if t.round == "layout"]
    assert "ddp" not in tried and {"ddp-bucketed", "zero1", "fsdp2:compute=bf16", "tensor-sequence"} <= {*tried}
    assert "--parallel fsdp2 --ranks 2" in (run_command(search.best) or "")
    assert "parallel='fsdp2', ranks=2" in (run_call(search.best) or "")
    kept = searched(Written(), kept=frozenset({"parallel"}), batch_size=4, parallel="ddp", ranks=2)
    assert kept.best.parallel == "ddp" and "layout" not in {t.round for t in kept.tried}
    assert "layout" not in {t.round for t in searched(Written()).tried}


def test_what_is_planned_to_be_far_slower_is_not_measured():
    """Beside the shortest plan of what fits: one that does not fit makes nothing else slow."""

    class Planned(Written):
        seconds_planned: ClassVar = {
            "ddp": 1.0,
            "ddp-bucketed": 0.98,
            "fsdp2": 1.12,
            "zero1": 1.2,
            "fsdp2:reshard=no": 0.1,
        }

        def planned_s(self, workload: Workload) -> float | None:
            return self.seconds_planned.get(workload.parallel)

        def fits(self, workload: Workload) -> str | None:
            return "too large" if workload.parallel == "fsdp2:reshard=no" else super().fits(workload)

    search = searched(Planned(), batch_size=4, parallel="ddp", ranks=2)
    verdicts = {t.change["parallel"]: t.verdict for t in search.tried if t.round == "layout"}
    assert verdicts["zero1"] == "slower by plan" and verdicts["fsdp2:reshard=no"] == "does not fit"
    assert verdicts["fsdp2"] == "taken" and verdicts["tensor-sequence"] == "undecided", "of which no plan is"
    (far,) = [t for t in search.tried if t.verdict == "slower by plan"]
    assert far.ratio is None and far.why == "planned to take 1.2 s, and another 980 ms"


def test_ranks_whose_state_does_not_fit_shard_it_first():
    class Small(Written):
        def fits(self, workload: Workload) -> str | None:
            return None if workload.parallel == "fsdp2" and workload.checkpointing == "every-1" else "too large"

    asked = workload(batch_size=4, parallel="ddp", ranks=2)
    found = one_that_fits(asked, Small())  # pyright: ignore[reportArgumentType]
    assert (found.parallel, found.checkpointing, found.accumulation) == ("fsdp2", "every-1", 1)
    with pytest.raises(InputError, match="however it is split"):
        one_that_fits(asked, Small(), frozenset({"parallel"}))  # pyright: ignore[reportArgumentType]

    class Unsharded(Written):
        def fits(self, workload: Workload) -> str | None:
            return None if workload.parallel == "ddp" and workload.checkpointing == "every-1" else "too large"

    assert one_that_fits(asked, Unsharded()).checkpointing == "every-1"  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [{"parallel": "ddp-bucketed", "accumulation": 2}, *at_length({"parallel": "fsdp2"}, {"parallel": "zero1"})],
)
def test_ranks_train_with_the_losses_of_one_process(choices: dict[str, Any]):
    """Their mean is the loss of the whole batch. The same ranks train from several starts, one after another."""
    alone = mini(batch_size=4)
    shared = msgspec.structs.replace(alone, ranks=2, **choices)
    one, both = (
        losses_of(*(Training(workload=each, device="cpu", start_seed=start, steps=4) for start in (None, 1, 2)))
        for each in (alone, shared)
    )
    assert len(both) == 3 and both[0] != both[1]
    for losses, expected in zip(both, one, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
