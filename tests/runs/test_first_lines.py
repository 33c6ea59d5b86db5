"""The three lines that a watched script is told first."""

import msgspec
import pytest

from stepscope.core.answer import Finding, note, warning
from stepscope.core.formulas import Work
from stepscope.core.run import Run
from stepscope.core.samples import Samples
from stepscope.runs.live import first_lines, rate_words
from tests.conftest import make_run


def loop(*findings: Finding, flops: int = 0, on: str = "cpu", **parts: float) -> Run:
    """A run of 0.1 s a step, whose parts take these shares of it."""
    step = {"step": Samples(values_s=(0.1,) * 20, clock="perf_counter_ns")}
    samples = step | {
        part: Samples(values_s=(0.1 * share,) * 20, clock="perf_counter_ns") for part, share in parts.items()
    }
    run = msgspec.structs.replace(make_run(), samples=samples, findings=findings, device_spec=None, ceilings=None,
                                  work={"forward": Work(flops=flops)} if flops else {})  # fmt: skip
    assert run.environment is not None
    return msgspec.structs.replace(run, environment=msgspec.structs.replace(run.environment, device_type=on))


DATA = warning("waiting-for-data", "It waited.", {"share": 0.4}, "more workers")
LOOPS = note("optimizer-loops", "One after another.", {}, "fused=True")
FROZEN = warning("no-gradient", "2 parameters had none.", {}, "look why")
GROWS = note("memory-grows", "By 8 B a step.", {}, "empty it")
READS = note("host-waits", "Every step reads.", {}, "read it later")
NOISE = warning("wide-spread", "The middle half spreads.", {}, "measure more steps")


def test_what_a_step_takes_and_how_far_that_is_from_the_ceiling():
    run = loop(forward=0.5, flops=10**9)
    batch = run.workload.tokens or run.workload.batch_size
    assert batch is not None and rate_words(run).startswith("a step takes 100 ms, " + f"{batch * 10:,}")
    assert "10 GFLOP/s; this device's ceiling in fp32 is not known" in first_lines(run)[0]
    assert "its FLOPs are not known" in first_lines(loop(forward=0.5))[0]
    assert first_lines(msgspec.structs.replace(run, samples={})) == ()


def test_the_part_that_takes_most_is_named():
    assert first_lines(loop(forward=0.3, backward=0.6))[1] == "Backward takes most of it: 60 ms, 60.0 %."
    assert first_lines(loop(forward=0.3, data=0.6))[1].startswith("Waiting for data takes most of it")


@pytest.mark.parametrize(
    ("findings", "on", "first", "gives"),
    [
        ((DATA, LOOPS), "cpu", "more workers", "up to 40.0 % of a step"),
        ((DATA, LOOPS, FROZEN), "cpu", "look why", ""),  # what trains nothing need not train faster
        ((DATA, GROWS), "cpu", "more workers", "up to 40.0 % of a step"),  # by a few bytes, which is a note
        ((LOOPS,), "cuda", "fused=True", "up to 20.0 % of a step"),
        ((READS,), "cuda", "read it later", "not known from times alone"),
        ((READS, NOISE), "cpu", "", ""),  # which costs nothing there
        ((), "cpu", "", ""),
    ],
)
def test_what_to_change_first(findings: tuple[Finding, ...], on: str, first: str, gives: str):
    line = first_lines(loop(*findings, on=on, forward=0.5, optimizer=0.2))[2]
    assert line.startswith(f"Change first: {first}") if first else line.startswith("None of the habits")
    assert gives in line
