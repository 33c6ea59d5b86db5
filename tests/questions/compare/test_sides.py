"""Two sides of a comparison: which runs a name means, which of them pair, and what is said of the pairs."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.environment import Extent, GpuSamples
from stepscope.core.errors import InputError
from stepscope.core.evidence import PhaseMemory
from stepscope.core.formulas import Work
from stepscope.core.run import Repeat, Run
from stepscope.core.run_directory import save_run
from stepscope.core.workloads import TextbookWorkload
from stepscope.questions.compare import Side, SidePair, compare_all, compare_sides, side_named
from stepscope.questions.compare_answer import (
    answer_comparison,
    comparison_as_json,
    pictured,
    sentence,
    sides_findings,
    work_buckets,
)
from stepscope.questions.compare_gate import Gate, Growth, Limits, judge, parse_growth, parse_share
from stepscope.traces.captures.digest import FamilyRow, TraceDigest
from tests.conftest import make_run, mini
from tests.shown import check_golden, shown

GOLDEN = Path(__file__).parents[2] / "golden"
RESULTS = Path(__file__).parents[3] / "results"


def process(
    number: int,
    step_s: float,
    *,
    of: TextbookWorkload | None = None,
    name: str = "a-set",
    extra_s: float = 0.0,
    **changes: Any,
) -> Run:
    """A run whose steps take that long, a quarter in forward, and so much more in backward."""
    run = make_run(of or mini(), forward=[step_s / 4] * 3, backward=[step_s / 2 + extra_s] * 3,
                   optimizer=[step_s / 4] * 3)  # fmt: skip
    return msgspec.structs.replace(
        run, id=f"202601{number:02}T000000.000-{name}", repeat=Repeat(set=name, number=number, of=9),
        created=f"2026-01-{number:02}T00:00:00.000+00:00", **changes,
    )  # fmt: skip


def side(name: str, *runs: Run) -> Side:
    return Side(name=name, kind="path", runs=tuple((run, Path(name) / run.id) for run in runs))


NOISE = (1.0, 1.004, 0.997, 1.002, 0.998)


def noisy(name: str, extra_s: float = 0.0, count: int = 5, **more: Any) -> Side:
    return side(name, *(process(i + 1, 0.1 * NOISE[i], name=name, extra_s=extra_s, **more) for i in range(count)))


def no_captures(_: SidePair) -> tuple[None, None]:
    return None, None


def test_a_delay_in_backward_is_seen_and_named():
    found = compare_sides(noisy("before"), noisy("after", extra_s=0.01))
    (change,), (stands,) = found.changes, found.stands
    assert change is not None and change.ratio == pytest.approx(1.1, rel=2e-3) and stands
    said = sentence(found, 0)
    assert "10.0 % slower" in said and "most of it in backward (+10.00 ms)" in said
    assert "5 processes against 5 processes" in said


def test_the_same_is_no_difference_and_what_would_have_been_seen_is_said():
    found = compare_sides(noisy("before"), noisy("after"))
    assert not found.stands[0] and "no difference seen in the step, and one above" in sentence(found, 0)


def one_after_the_other(extra_s: float, **more: Any) -> tuple[Side, Side]:
    """Two sides of five processes, begun a minute after each other, all of the first before all of the second."""

    def at(found: Side, first: int) -> Side:
        return side(found.name, *(
            msgspec.structs.replace(run, created=f"2026-01-01T00:{first + place:02}:00+00:00")
            for place, (run, _) in enumerate(found.runs)
        ))  # fmt: skip

    return at(noisy("before"), 0), at(noisy("after", extra_s=extra_s, **more), 5)


def test_a_change_that_may_be_drift_cannot_be_told_and_says_how_it_can():
    """0.6 % of processes that deviate by 0.3 %: seen in turns, and not where one side ran after the other."""
    turns = compare_sides(noisy("before"), noisy("after", extra_s=0.0006))
    assert turns.stands == [True] and not any(one.kind == "not-in-turns" for one in sides_findings(turns))
    apart = compare_sides(*one_after_the_other(0.0006))
    answer = answer_comparison(apart, no_captures)
    (row,) = answer.tables[0].rows
    assert apart.stands == [False] and "cannot be told" in row
    assert "no difference was seen" not in shown(answer), "what it is that cannot be told was seen"
    assert "the sides were not measured in turns, so drift may be all that differs" in sentence(apart, 0)
    (found,) = (one for one in sides_findings(apart) if one.kind == "not-in-turns")
    assert found.severity == "warning" and "1.8 times as wide" in found.sentence
    assert "stepscope run" in found.remedy and "5 times over" in found.remedy
    gate = judge([apart], Limits(slower=0.001))
    assert not gate.exceeded and "not measured in turns" in gate.open[0]
    assert not gate.fails(strict=False) and gate.fails(strict=True)
    assert comparison_as_json(apart, no_captures)["pairs"][0]["verdict"] == "cannot be told"


def test_a_large_change_is_found_whatever_the_order_and_equal_sides_are_not():
    found = compare_sides(*one_after_the_other(0.01))
    assert found.stands == [True] and "10.0 % slower" in sentence(found, 0)
    (finding,) = (one for one in sides_findings(found) if one.kind == "not-in-turns")
    assert finding.severity == "note" and not finding.remedy
    assert "no difference seen" in sentence(compare_sides(*one_after_the_other(0.0)), 0)


def test_runs_that_do_not_say_when_they_began_cost_what_their_times_would_have_told():
    """One of five without its time stands amid the others; where none has one, nothing is widened, and it is said."""

    def begun(name: str, extra_s: float, times: Sequence[str]) -> Side:
        runs = [run for run, _ in noisy(name, extra_s=extra_s).runs]
        return side(name, *(msgspec.structs.replace(run, created=time) for run, time in zip(runs, times, strict=True)))

    first = begun("before", 0.0, [f"2026-01-01T00:0{i}:00+00:00" for i in range(5)])
    times = [f"2026-01-01T01:0{i}:00+00:00" for i in range(5)]
    whole, part, none = (
        compare_sides(first, begun("after", 0.0012, found))
        for found in (times, [*times[:2], "yesterday", *times[3:]], ["yesterday"] * 5)
    )
    assert [one.changes[0].widened for one in (whole, part)] == [pytest.approx(whole.changes[0].widened)] * 2  # pyright: ignore[reportOptionalMemberAccess]
    assert not whole.stands[0] and not part.stands[0] and none.stands[0]
    said = [[one.kind for one in sides_findings(found)] for found in (whole, part, none)]
    assert [("not-in-turns" in kinds, "times-unknown" in kinds) for kinds in said] == [
        (True, False), (True, False), (False, True),
    ]  # fmt: skip


def test_the_command_that_measures_in_turns_names_both_steps():
    """`run --against` takes a run by its path: the other side's own, so nothing need be spelled."""
    before, after = one_after_the_other(0.0006, of=mini(dtype="bf16"))
    (found,) = (one for one in sides_findings(compare_sides(before, after, across=["dtype"]))
                if one.kind == "not-in-turns")  # fmt: skip
    directory = after.directory(compare_sides(before, after, across=["dtype"]).pairs[0].after.representative)
    assert found.remedy.startswith("measure in turns: `stepscope run --model ")
    assert found.remedy.endswith(f"--against {directory} --repeat 5`")


def test_few_processes_give_no_verdict():
    found = compare_sides(noisy("before", count=4), noisy("after", extra_s=0.05))
    assert not found.stands[0] and "no verdict" in sentence(found, 0) and "4 processes against 5" in sentence(found, 0)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.lists(st.floats(0.01, 10), min_size=1, max_size=6))
def test_buckets_add_up_to_the_step(before: list[float], after: list[float]):
    def made(name: str, steps: list[float]) -> Side:
        return side(name, *(process(i + 1, s, name=name, extra_s=s / (i + 3)) for i, s in enumerate(steps)))

    (pair,) = compare_sides(made("a", before), made("b", after)).pairs
    assert math.fsum(was for _, was, _ in pair.buckets) == pytest.approx(pair.steps_s[0], rel=1e-12)
    assert math.fsum(now for _, _, now in pair.buckets) == pytest.approx(pair.steps_s[1], rel=1e-12)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8))
def test_a_side_is_never_slower_than_itself(steps: list[float]):
    one = side("a", *(process(i + 1, step) for i, step in enumerate(steps)))
    found = compare_sides(one, one)
    assert found.changes[0] is not None and found.changes[0].ratio == pytest.approx(1) and not found.stands[0]


def test_runs_that_were_not_repeated_are_processes_all_the_same():
    def alone(name: str, extra_s: float) -> Side:
        runs = [process(i + 1, 0.1 * NOISE[i], name=name, extra_s=extra_s) for i in range(5)]
        return side(name, *(msgspec.structs.replace(run, repeat=None) for run in runs))

    found = compare_sides(alone("a", 0.0), alone("b", 0.01))
    assert found.changes[0] is not None and found.changes[0].processes == (5, 5) and found.stands[0]


def test_other_workloads_pair_only_where_it_is_asked():
    short, long = mini(), mini(seq_len=32)
    with pytest.raises(InputError, match="--across seq_len"):
        compare_sides(noisy("a", of=short), noisy("b", of=long))
    found = compare_sides(noisy("a", of=short), noisy("b", of=long, extra_s=0.02), across=["seq_len"])
    (pair,) = found.pairs
    assert pair.across == ("seq_len",) and pair.step_to == "16 to 32"
    first = answer_comparison(found, no_captures).lead[1].text
    assert first.startswith("Take care: 1 pair is of different workloads") and "seq_len" in first


def test_the_same_workload_pairs_with_itself_before_another():
    cells = [mini(), mini(dtype="bf16")]
    sides = [side(name, *(process(i + 1, 0.1 + i, of=of, name=f"{name}{i}") for i, of in enumerate(cells)))
             for name in ("a", "b")]  # fmt: skip
    found = compare_sides(*sides, across=["dtype"])
    assert [pair.across for pair in found.pairs] == [(), ()]


def test_what_one_side_has_alone_is_said():
    before = side("a", process(1, 0.1), process(2, 0.1, of=mini(seq_len=32), name="other"))
    found = compare_sides(before, side("b", process(1, 0.1)))
    assert len(found.pairs) == 1 and len(found.alone) == 1 and "s32" in found.alone[0] and "(a)" in found.alone[0]


def test_a_cell_that_was_not_measured_again_leaves_a_limit_open_and_a_new_one_does_not():
    more = [process(i + 1, 0.1 * NOISE[i], of=mini(seq_len=32), name="more") for i in range(5)]
    with_it = side("a", *(run for run, _ in noisy("a").runs), *more)
    gone = judge([compare_sides(with_it, noisy("b"))], Limits(slower=0.03))
    assert gone.fails(strict=True) and not gone.fails(strict=False) and "not measured again" in gone.open[0]
    new = judge([compare_sides(noisy("b"), with_it)], Limits(slower=0.03))
    assert not new.fails(strict=True)


def test_many_pairs_are_corrected():
    """A difference that stands alone, and not beside seventy pairs that were asked at once."""

    def pairs(count: int) -> list[bool]:
        sides = []
        for name, extra in (("a", 0.0), ("b", 0.0006)):
            runs = [process(i + 1, 0.1 * NOISE[i], of=mini(seq_len=16 + 2 * cell), name=f"{name}{cell}",
                            extra_s=extra if cell == 0 else 0.0)
                    for cell in range(count) for i in range(5)]  # fmt: skip
            sides.append(side(name, *runs))
        return compare_sides(*sides).stands

    alone = compare_sides(noisy("a"), noisy("b", extra_s=0.0006))
    assert alone.changes[0] is not None and alone.changes[0].p_value is not None
    assert pairs(1) == [alone.changes[0].p_value < 0.05]
    assert not any(pairs(70))


@pytest.mark.parametrize(
    ("extra_s", "limit", "slower", "open_", "strict"),
    [
        (0.01, 0.03, 1, 0, True), (0.0, 0.03, 0, 0, False), (0.003, 0.03, 0, 1, True), (-0.02, 0.0, 0, 0, False),
    ],
)  # fmt: skip
def test_a_limit_fails_only_what_surely_exceeds_it(extra_s: float, limit: float, slower: int, open_: int, strict: bool):
    gate = judge([compare_sides(noisy("a"), noisy("b", extra_s=extra_s))], Limits(slower=limit))
    assert (len(gate.exceeded), len(gate.open)) == (slower, open_)
    assert gate.fails(strict=False) == bool(slower) and gate.fails(strict=True) == strict
    assert not slower or "most of it in backward" in gate.exceeded[0]


def test_a_cell_that_fails_on_one_side_is_said_and_leaves_a_limit_open():
    """A step that runs out of memory after the change must not pass because the other cells are no slower."""
    big = mini(seq_len=32)
    ran = [process(i + 1, 0.1 * NOISE[i], of=big, name="big") for i in range(5)]
    failed = process(1, 0.1, of=big, name="big-after", status="out-of-memory")
    before = side("a", *(run for run, _ in noisy("a").runs), *ran)
    found = compare_sides(before, side("b", *(run for run, _ in noisy("b").runs), failed))
    assert len(found.pairs) == 1 and not found.alone
    assert len(found.lost) == 1 and "s32" in found.lost[0] and "(OOM in b)" in found.lost[0]
    assert "Not measured to the end on one side" in shown(answer_comparison(found, no_captures))
    assert comparison_as_json(found, no_captures)["lost"] == found.lost
    gate = judge([found], Limits(slower=0.03))
    assert not gate.exceeded and "no result" in gate.open[0]
    assert not gate.fails(strict=False) and gate.fails(strict=True)


def test_a_part_alone_is_not_laid_to_another_part():
    """Forward is slower by 10 %, backward by more milliseconds: backward did not make forward slower."""

    def made(name: str, factor: float, extra_s: float) -> Side:
        runs = []
        for run, _ in noisy(name, extra_s=extra_s).runs:
            forward = run.samples["forward"]
            slow = msgspec.structs.replace(forward, values_s=tuple(value * factor for value in forward.values_s))
            runs.append(msgspec.structs.replace(run, samples={**run.samples, "forward": slow}))
        return side(name, *runs)

    found = compare_sides(made("a", 1.0, 0.0), made("b", 1.1, 0.01), value="forward")
    assert found.stands[0] and "forward is 10.0 % slower" in sentence(found, 0) and "backward" not in sentence(found, 0)
    gate = judge([found], Limits(slower=0.03))
    assert gate.exceeded and "backward" not in gate.exceeded[0]
    assert {row[-1] for row in answer_comparison(found, no_captures).tables[0].rows} == {""}


def test_too_few_processes_leave_a_limit_open():
    gate = judge([compare_sides(noisy("a", count=1), noisy("b", extra_s=1.0, count=1))], Limits(slower=0.03))
    assert not gate.exceeded and "too few processes" in gate.open[0]


def with_memory(part: Side, *peaks: int, flops: int = 1000) -> Side:
    """The side with these peaks of memory, by processes, and these FLOPs."""
    runs = [
        msgspec.structs.replace(
            run, work={"forward": Work(flops=flops)},
            evidence=msgspec.structs.replace(
                run.evidence, memory=PhaseMemory(parameter_bytes=8, forward_peak=2, backward_peak=peak)
            ),
        )
        for (run, _), peak in zip(part.runs, peaks or (None,) * 5, strict=True)
    ]  # fmt: skip
    return side(part.name, *runs)


@pytest.mark.parametrize(
    ("before", "after", "limit", "fails", "undecided"),
    [
        (1000, 1011, Growth(share=0.01), True, False),
        (1000, 1010, Growth(share=0.01), False, False),
        (1000, 900, Growth(), False, False),
        (1000, 1001, Growth(), True, False),
        (2**20, 2**20 + 2**10, Growth(size=2**10), False, False),
        (2**20, 2**20 + 2**10 + 1, Growth(size=2**10), True, False),
        (1000, None, Growth(), False, True),
    ],
)
def test_memory_is_held_against_its_limit_exactly(
    before: int, after: int | None, limit: Growth, fails: bool, undecided: bool
):
    second = noisy("b") if after is None else with_memory(noisy("b"), *[after] * 5)
    gate = judge([compare_sides(with_memory(noisy("a"), *[before] * 5), second)], Limits(larger=limit))
    assert (bool(gate.exceeded), bool(gate.open)) == (fails, undecided)
    assert not fails or "larger than" in gate.exceeded[0]
    assert not undecided or "--record memory" in gate.open[0]


def test_memory_that_differs_between_processes_is_decided_where_all_of_them_agree():
    before = with_memory(noisy("a"), 1000, 1010, 1000, 1000, 1000)
    assert judge([compare_sides(before, with_memory(noisy("b"), *[1011] * 5))], Limits(larger=Growth())).exceeded
    gate = judge([compare_sides(before, with_memory(noisy("b"), *[1005] * 5))], Limits(larger=Growth()))
    assert not gate.exceeded and "1000 B to 1010 B before" in gate.open[0]


def test_flops_may_not_grow_by_one_and_may_shrink():
    def gate(flops: int) -> Gate:
        sides = with_memory(noisy("a"), *[1] * 5), with_memory(noisy("b"), *[1] * 5, flops=flops)
        found = compare_sides(*sides)
        assert ("FLOPs" in shown(answer_comparison(found, no_captures))) == (flops != 1000)
        assert comparison_as_json(found, no_captures)["pairs"][0]["flops"] == [1000, flops]
        return judge([found], Limits(flops=True))

    assert gate(1001).exceeded and not gate(1000).exceeded and not gate(999).exceeded


@pytest.mark.parametrize(
    ("text", "growth"),
    [("1%", Growth(share=0.01)), ("0.01", Growth(share=0.01)), ("200MiB", Growth(size=200 * 2**20)),
     ("1 GB", Growth(size=10**9)), ("0", Growth())],
)  # fmt: skip
def test_a_growth_is_a_share_or_a_size(text: str, growth: Growth):
    assert parse_growth(text, "--fail-if-larger") == growth


@pytest.mark.parametrize("text", ["", "3", "3x", "-1%", "MiB", "nan", "1e3%"])
def test_what_is_neither_a_share_nor_a_size_is_refused(text: str):
    with pytest.raises(InputError, match="--fail-if-larger"):
        parse_growth(text, "--fail-if-larger")


@pytest.mark.parametrize(("text", "share"), [("3%", 0.03), ("3 %", 0.03), ("0.03", 0.03), ("0", 0.0), ("150%", 1.5)])
def test_a_share_is_read(text: str, share: float):
    assert parse_share(text, "--fail-if-slower") == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "three", "-3%", "nan", "inf", "1e9%", "3", "1_0%", "\u0663%"])
def test_what_is_no_share_is_refused(text: str):
    with pytest.raises(InputError, match="--fail-if-slower"):
        parse_share(text, "--fail-if-slower")


def test_other_versions_and_clocks_are_marked():
    def clocked(name: str, mhz: float, torch: str) -> Side:
        runs = [process(i + 1, 0.1 * NOISE[i], name=name) for i in range(5)]
        made = []
        for run in runs:
            assert run.environment is not None
            clock = Extent(lowest=mhz, median=mhz, highest=mhz)
            environment = msgspec.structs.replace(
                run.environment, versions={**run.environment.versions, "torch": torch},
                during=GpuSamples(count=9, period_s=0.1, sm_clock_mhz=clock),
            )  # fmt: skip
            made.append(msgspec.structs.replace(run, environment=environment))
        return side(name, *made)

    sides = compare_sides(clocked("a", 1980, "2.12.0"), clocked("b", 1700, "2.13.0"))
    found = {finding.kind: finding for finding in sides_findings(sides)}
    assert "torch 2.12.0 and 2.13.0" in found["different-environments"].sentence
    assert "1980 MHz" in found["different-clocks"].sentence and found["different-clocks"].severity == "warning"


def test_a_side_of_several_environments_and_runs_on_both_sides_are_marked():
    first, second = process(1, 0.1), process(2, 0.1)
    assert second.environment is not None
    other = msgspec.structs.replace(second, environment=msgspec.structs.replace(second.environment, git_commit="abc"))
    sides = compare_sides(side("a", first, other), side("b", first))
    found = {finding.kind: finding for finding in sides_findings(sides)}
    assert "git_commit" in found["mixed-side"].sentence and found["shared-runs"].evidence == {"runs": 1}


def digest(steps: int, busy_ns: int, **families: int) -> TraceDigest:
    rows = tuple(FamilyRow(family=name, phase="forward", calls=1.0, busy_ns=float(ns)) for name, ns in families.items())
    return TraceDigest(
        profiler="Kineto", steps=steps, kernels=3, busy_ns=busy_ns, union_ns=busy_ns, unattributed_ns=0, copies=0,
        copies_ns=0, gemm_fraction=0.5, phases=(), families=rows, top=(), top_without_products=(), attention=(),
        findings=(),
    )  # fmt: skip


def test_buckets_of_captured_work_add_up():
    """By hand, a step: 30 ns of 40 are a product's before; 70 of 75 after, 20 of them a copy's that is new."""
    before, after = digest(2, 80, product=30), digest(1, 75, product=50, copy=20)
    assert [(name, round(was * 1e9, 6), round(now * 1e9, 6)) for name, was, now in work_buckets(before, after)] == [
        ("product, forward", 30, 50), ("copy, forward", 0, 20), ("in no phase", 10, 5),
    ]  # fmt: skip
    of_steps = work_buckets(before, after, (100e-9, 90e-9))
    name, was, now = of_steps[0]
    assert (name, round(was * 1e9, 6), round(now * 1e9, 6)) == ("device idle", 60, 15)
    assert math.fsum(was for _, was, _ in of_steps) == pytest.approx(100e-9)
    assert math.fsum(now for _, _, now in of_steps) == pytest.approx(90e-9)


def test_the_answer_as_it_is_shown():
    found = compare_sides(noisy("before"), noisy("after", extra_s=0.01))
    check_golden(shown(answer_comparison(found, no_captures), width=150), GOLDEN / "compare.txt")
    told = comparison_as_json(found, no_captures)
    assert told["pairs"][0]["verdict"] == "slower" and told["pairs"][0]["parts"]["backward"]["ratio"] > 1.1
    msgspec.json.encode(told)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder with a set of two, a tagged run, and another of the same tag and a commit."""
    for run in (
        process(1, 0.1), process(2, 0.1), msgspec.structs.replace(process(3, 0.1, name="x"), repeat=None, tag="fast"),
        msgspec.structs.replace(process(4, 0.1, name="y"), repeat=None, tag="fast", sweep="5ee9"),
    ):  # fmt: skip
        assert run.environment is not None
        environment = msgspec.structs.replace(run.environment, git_commit="abcdef0123" if run.tag else None)
        directory = tmp_path / run.id
        directory.mkdir()
        save_run(msgspec.structs.replace(run, environment=environment), directory)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("a-set", "set", 2), ("set:a-s", "set", 2), ("fast", "tag", 2), ("tag:fast", "tag", 2), ("abcdef", "commit", 2),
        ("commit:abcd", "commit", 2), ("5ee9", "sweep", 1), ("last", "run", 1), ("20260103", "run", 1),
        ("fast:model=tiny+d_model32+d_ff64+layers2+heads2+vocabulary101", "tag", 2),
    ],
)  # fmt: skip
def test_a_name_means_what_there_is_of_it(name: str, kind: str, count: int, stored: Path):
    found = side_named(name, stored)
    assert (found.kind, len(found.runs)) == (kind, count)


def test_a_path_means_all_under_it_and_what_cannot_be_read_is_said(stored: Path):
    (stored / "broken").mkdir()
    (stored / "broken" / "run.json").write_text('{"schema_version": 99}')
    found = side_named(str(stored), Path("nowhere"))
    assert len(found.runs) == 4 and "schema version 99" in found.faults[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "there are 4 runs, 1 tag (fast), 1 commit (abcdef0123)"), ("tag:slow", "no tag in"),
        ("2026010", "write more of the name"), ("fast:dtype=bf16", "no run there has dtype=bf16"),
        ("", "names no path"),
    ],
)  # fmt: skip
def test_a_name_that_means_nothing_is_one_line(name: str, said: str, stored: Path):
    with pytest.raises(InputError) as fault:
        side_named(name, stored)
    assert said in str(fault.value) and "\n" not in str(fault.value)


def test_a_name_of_two_kinds_is_asked_back(stored: Path):
    run = msgspec.structs.replace(process(7, 0.1, name="z"), repeat=None, tag="abcd")
    (stored / run.id).mkdir()
    save_run(run, stored / run.id)
    assert side_named("abcd", stored).kind == "tag", "the whole of a name goes before a part of one"
    other = msgspec.structs.replace(process(8, 0.1, name="abc-z"), repeat=None)
    (stored / other.id).mkdir()
    save_run(other, stored / other.id)
    assert side_named("abc-z", stored).kind == "run"


def test_a_side_without_a_measured_step_is_one_line():
    unmeasured = side("a", process(1, 0.1, status="failed"))
    with pytest.raises(InputError, match="none of its 1 run measured step to the end"):
        compare_sides(unmeasured, noisy("b"))


def test_stored_runs_of_an_h200_compare_across_precisions():
    sides = [side_named(str(RESULTS / "h200" / name), Path("nowhere")) for name in ("plain", "tf32")]
    found = compare_sides(*sides, across=["dtype"])
    assert len(found.pairs) == 20 and {pair.step_to for pair in found.pairs} == {"fp32 to tf32", "bf16 to tf32"}
    ratios = [change.ratio for change, pair in zip(found.changes, found.pairs, strict=True)
              if change and pair.step_to == "fp32 to tf32"]  # fmt: skip
    assert len(ratios) == 10 and max(ratios) < 0.6 and not any(found.stands), "one process a side decides nothing"


def test_processes_that_did_not_end_are_a_finding_and_leave_a_limit_open():
    lost = [msgspec.structs.replace(process(i + 6, 0.1), status="killed", samples={}) for i in range(2)]
    unknown = msgspec.structs.replace(process(8, 0.1), status="failed", samples={}, environment=None)
    after = side("b", *(run for run, _ in noisy("b").runs), *lost, unknown)
    found = compare_sides(noisy("a"), after)
    assert found.pairs[0].lost == (0, 3)
    (said,) = [one for one in sides_findings(found) if one.kind == "lost-processes"]
    assert "3 of 8 processes of b did not end" in said.sentence
    gate = judge([found], Limits(slower=0.5))
    assert gate.open and "3 processes without a result" in gate.open[0] and gate.fails(strict=True)
    again = [process(i + 6, 0.1) for i in range(2)]
    assert compare_sides(noisy("a"), side("b", *(r for r, _ in after.runs), *again)).pairs[0].lost == (0, 1)


def test_a_cell_that_was_lost_across_a_field_is_said_so_and_not_to_stand_alone():
    other, more = mini(seq_len=32), mini(seq_len=32, batch_size=8)
    failed = msgspec.structs.replace(process(9, 0.1, of=more), status="out-of-memory", samples={}, environment=None)
    both = side("a", *(r for r, _ in noisy("a").runs), *(process(9, 0.1, of=mini(batch_size=8)),))
    found = compare_sides(both, side("b", *(r for r, _ in noisy("b", of=other).runs), failed), across=["seq_len"])
    assert len(found.pairs) == 1 and not found.alone
    assert len(found.lost) == 1 and "OOM in b" in found.lost[0]


def test_verdicts_on_several_sides_hold_for_all_of_them_at_once():
    base = noisy("base", count=5)
    barely = side("barely", *(process(i + 1, 0.1 * NOISE[i] * 1.005, name="barely") for i in range(5)))
    alone = compare_all(base, [barely])[0]
    assert alone.stands == [True]
    found = compare_all(base, [barely, *(noisy(f"same-{i}") for i in range(9))])
    assert [one.asked for one in found] == [10] * 10 and found[0].stands == [False]
    assert found[0].level == pytest.approx(0.995)
    picture = pictured([answer_comparison(one, no_captures) for one in found])
    assert len({point.line for point in picture.panels[0].points}) == 10


def test_a_part_that_nothing_has_is_refused_before_anything_is_paired():
    with pytest.raises(InputError, match="unknown part of the step 'bakward': choose one of backward"):
        compare_all(noisy("a"), [noisy("b")], value="bakward")


def store(run: Run, directory: Path) -> None:
    directory.mkdir(parents=True)
    save_run(run, directory)


def test_a_tag_and_a_folder_may_be_named_like_a_condition(tmp_path: Path):
    run = msgspec.structs.replace(process(1, 0.1), tag="lr:seed=1")
    store(run, tmp_path / "one")
    assert [one.tag for one, _ in side_named("lr:seed=1", tmp_path).runs] == ["lr:seed=1"]
    store(run, tmp_path / "runs:dtype=bf16" / "one")
    assert side_named(str(tmp_path / "runs:dtype=bf16"), tmp_path).kind == "path"


def test_why_no_run_of_a_side_can_be_read_is_said(tmp_path: Path):
    store(process(1, 0.1), tmp_path / "one")
    (tmp_path / "one" / "run.json").write_text("{")
    with pytest.raises(InputError, match=r"no run there can be read: .*run\.json"):
        side_named(str(tmp_path), tmp_path)


def test_last_is_the_run_that_began_latest_and_no_other_where_that_cannot_be_read(tmp_path: Path):
    store(process(1, 0.1), tmp_path / "one")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "run.json").write_text('{"schema_version": 1, "created": "2030-01-01T00:00:00+00:00", "work')
    with pytest.raises(InputError, match=r"two.run\.json is no run, or was cut short"):
        side_named("last", tmp_path)


def test_runs_sort_by_when_they_were_measured_whatever_their_zone(tmp_path: Path):
    for number, (name, created) in enumerate({
        "first": "2026-01-02T08:00:00+09:00", "second": "2026-01-02T00:30:00+00:00", "garbage": "yesterday",
    }.items()):  # fmt: skip
        store(msgspec.structs.replace(process(number + 1, 0.1, name=name), created=created), tmp_path / name)
    assert [run.created[:4] for run, _ in side_named(str(tmp_path), tmp_path).runs] == ["yest", "2026", "2026"]
    assert side_named("last", tmp_path).runs[0][0].id.endswith("second")
