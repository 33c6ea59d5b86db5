"""Two steps turn by turn in one process: a run of each, what they share, and what is kept of neither."""

from pathlib import Path

import pytest
import torch

from stepscope.core.errors import InputError
from stepscope.core.run import Repeat, Run, Settings
from stepscope.core.run_directory import load_runs
from stepscope.core.user_model import code_digest
from stepscope.core.workloads import FactoryWorkload, UserModel, Workload
from stepscope.engine.request import StepRequest
from stepscope.engine.step import measure_in_turns
from tests.conftest import mini

QUICK = Settings(warmup_floor=1, warmup_cap=1, steps_floor=4, steps_cap=4, seconds=0, profile=False)

FACTORY = """
import time, torch
{top}
class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
    def forward(self, x):
        {forward}
        return self.inner(x).square().mean()
def make():
    return Slow(), torch.randn(2, 4)
"""


def own(folder: Path, name: str, forward: str = "pass", top: str = "") -> FactoryWorkload:
    file = folder / f"{name}.py"
    file.write_text(FACTORY.format(forward=forward, top=top))
    factory = f"{file}:make"
    return FactoryWorkload(factory=factory, code=code_digest(factory), model=UserModel(name=""))


def in_turns(out: Path, first: Workload, second: Workload, **more: object) -> tuple[Run, Run]:
    request = StepRequest(workload=first, against=second, settings=QUICK, device="cpu", out=str(out), **more)  # type: ignore[arg-type]
    run, directory = measure_in_turns(request)
    assert directory == out / run.id
    runs, faults = load_runs([out])
    assert not faults
    one, other = (found for found in runs)
    return (one, other) if one.id == run.id else (other, one)


def test_each_side_is_a_run_beside_the_other(out: Path):
    first, second = in_turns(out, mini(), mini(seq_len=32), repeat=Repeat(set="a", number=2, of=3))
    assert (first.beside, second.beside) == (second.id, first.id)
    assert first.workload.seq_len == 16 and second.workload.seq_len == 32
    assert {len(run.samples["step"].values_s) for run in (first, second)} == {4}
    assert first.repeat == Repeat(set="a", number=2, of=3) and second.repeat == Repeat(set="a-against", number=2, of=3)
    for run in (first, second):
        assert run.status == "done" and run.work and run.evidence.observation is not None
        assert run.evidence.memory is None and any("memory" in note for note in run.evidence.notes)


def test_turns_see_a_step_that_is_slower(out: Path, tmp_path: Path):
    quick, slow = (
        own(tmp_path, "quick"),
        own(tmp_path, "slow", "time.sleep(0.2)"),
    )  # longer than a busy machine may hold up the quick one
    first, second = in_turns(out, quick, slow)
    ratios = [b / a for a, b in zip(first.samples["step"].values_s, second.samples["step"].values_s, strict=True)]
    assert min(ratios) > 1 and min(second.samples["forward"].values_s) > 0.2


@pytest.mark.parametrize("place", [0, 1])
def test_a_step_that_fails_ends_both_and_each_says_why(place: int, out: Path, tmp_path: Path):
    sides = [own(tmp_path, "good"), own(tmp_path, "bad", "raise torch.OutOfMemoryError('no more')")]
    first, second = in_turns(out, *(sides if place else sides[::-1]))
    good, bad = (first, second) if place else (second, first)
    assert bad.status == "out-of-memory" and bad.failure is not None and "no more" in bad.failure.message
    assert good.status == "failed" and good.failure is not None and "the step beside it" in good.failure.message


def test_a_model_that_sets_something_for_the_whole_process_is_refused(out: Path, tmp_path: Path):
    setting = own(
        tmp_path, "sets", top="torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())"
    )

    before = torch.are_deterministic_algorithms_enabled()
    try:
        with pytest.raises(InputError, match="use_deterministic_algorithms"):
            in_turns(out, own(tmp_path, "plain"), setting)
    finally:
        torch.use_deterministic_algorithms(before)
    assert not list(out.iterdir())
