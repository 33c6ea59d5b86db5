"""`with stepscope.watch(...)`: two lines round a loop."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import stepscope
from stepscope.core.errors import InputError
from stepscope.core.run import Run
from stepscope.core.run_directory import load_run
from stepscope.core.units import format_seconds
from stepscope.engine.watched_run import Watched
from stepscope.runs.answer import answer_run
from tests.recording.watch.loops import Net, nothing_is_left, train_step


def test_two_lines_make_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepscope.watch(model, optimizer, steps=(3, 8), runs=tmp_path, tag="mine") as watched:
        for _ in range(12):
            train_step(model, optimizer)
    run, directory = watched.run, watched.directory
    assert run is not None and directory is not None
    assert load_run(directory) == run
    assert (run.status, run.tag, run.samples["step"].count) == ("done", "mine", 5)
    assert run.evidence.loop is not None and run.evidence.loop.first_step == 3
    assert repr(watched).startswith("Net: ") and repr(watched).endswith("a step, the median of 5")
    out, err = capsys.readouterr()
    soon, end = err.splitlines()
    assert out == "" and end == f"stepscope: {watched!r}; saved in {directory}"
    assert soon.startswith("stepscope: measured: a step takes ") and soon.endswith(
        f"by 5 steps; the script goes on alone: stepscope show {directory}"
    )
    assert nothing_is_left(model, optimizer)


def test_a_run_is_judged_before_the_process_can_be_killed_and_its_place_is_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    killed = None
    with stepscope.watch(model, optimizer, steps=(3, 8), runs=tmp_path / "runs") as watched:
        for step in range(12):
            train_step(model, optimizer)
            time.sleep(0.02)
            if step == 8:
                (file,) = (tmp_path / "runs").glob("*/run.json")
                killed = load_run(file)
                shutil.rmtree(tmp_path / "runs")
    assert killed is not None and killed.finding("rest-is-large") is not None and killed.summary
    assert killed.evidence.notes == ("what follows these steps, which is written once it is over",)
    assert watched.run is not None and watched.run.finding("rest-is-large") and not watched.run.evidence.notes
    said = capsys.readouterr().err.splitlines()
    refused = next(line for line in said if "the run was saved as " in line)  # a write that was under way says so, too
    soon, end = said[-2:]
    place = Path(refused.partition("the run was saved as ")[2]).parent
    assert load_run(place) == watched.run
    assert soon.endswith(f"stepscope show {place}") and end.endswith(f"; saved in {place}")
    shutil.rmtree(place)


def watched_until_an_exception(runs: Path, steps: tuple[int, int], *, after: int) -> Watched:
    """The watch of a loop whose step of this number ends in an exception; nothing of it is left in the process."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = stepscope.watch(model, optimizer, steps=steps, runs=runs, quiet=True)
    with pytest.raises(ZeroDivisionError), watching:
        for i in range(12):
            train_step(model, optimizer)
            assert 1 / (after - 1 - i)
    assert nothing_is_left(model, optimizer)
    return watching


def test_an_exception_passes_and_what_was_measured_is_kept(tmp_path: Path):
    watching = watched_until_an_exception(tmp_path, (3, 80), after=11)
    assert watching.run is not None and watching.run.status == "failed"
    assert watching.run.samples["step"].count == 8


@pytest.mark.parametrize(
    ("steps", "why"),
    [((500, 600), "none of the steps 500 to 599 was reached"), ((12, 13), "step 12 was not reached")],
)
def test_steps_that_the_loop_never_reaches_are_no_result(tmp_path: Path, steps: tuple[int, int], why: str):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepscope.watch(model, optimizer, steps=steps, runs=tmp_path, quiet=True) as watched:
        for _ in range(12):
            train_step(model, optimizer)
    assert watched.run is None and not list(tmp_path.iterdir())
    assert watched.why_not == f"{why}, since the loop ended after 12 steps"


@pytest.mark.parametrize("steps", [(3, 5), (3, 8)], ids=["after every stage", "between the times and the other stages"])
def test_an_exception_after_the_timed_steps_is_told_beside_them(tmp_path: Path, steps: tuple[int, int]):
    watching = watched_until_an_exception(tmp_path, steps, after=10)
    run = watching.run
    assert run is not None and (run.status, run.failure) == ("done", None) and watching.directory is not None
    answer = answer_run(load_run(watching.directory))
    last = "The loop ended with an exception after the measured steps, which are whole: ZeroDivisionError: "
    assert answer.asides[-1].startswith(f"{last}division by zero (tests/") and answer.checked


def test_no_time_is_told_where_an_exception_ends_the_loop_before_the_steps(tmp_path: Path):
    run = watched_until_an_exception(tmp_path, (80, 90), after=11).run
    assert run is not None and (run.status, run.samples["step"].count) == ("failed", 0)
    assert run.evidence.notes[0] == "10 steps that were asked for, since the loop ended before"
    assert "step" not in [row[0] for table in answer_run(run).tables for row in table.rows]


def test_steps_of_fewer_micro_batches_are_told(tmp_path: Path):
    """As the last step of an epoch, whose batches the accumulation does not divide."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepscope.watch(model, optimizer, steps=(3, 12), runs=tmp_path, quiet=True) as watched:
        for i in range(14):
            train_step(model, optimizer, micro_batches=1 if i % 3 == 2 else 4)
    run = watched.run
    assert run is not None and run.evidence.loop is not None and run.evidence.loop.backwards_between == (1, 4)
    assert any("Those timed ran 1 to 4 backwards each." in line.text for line in answer_run(run).lead)
    remedies = [finding.remedy for finding in run.findings if finding.kind == "wide-spread"]
    assert all("they ran 1 to 4 backwards" in remedy for remedy in remedies)


def test_evaluations_of_a_closure_are_told_as_such(tmp_path: Path):
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        return loss

    with stepscope.watch(model, optimizer, steps=(2, 4), runs=tmp_path, quiet=True) as watched:
        for _ in range(4):
            optimizer.step(closure)
    run = watched.run
    assert run is not None and (run.workload.accumulation, run.workload.batch_size) == (1, 4)
    ending = ": 3 forwards of Net, 3 backwards; LBFGS evaluates its closure 3 times."
    assert any(ending in line.text for line in answer_run(run).lead)


def test_without_an_optimizer_the_loop_says_where_a_step_ends(tmp_path: Path):
    model = Net()
    with stepscope.watch(model, steps=(2, 6), runs=tmp_path, quiet=True) as watched:
        for _ in range(9):
            model(torch.randn(4, 8)).sum().backward()
            watched.step()
    assert watched.run is not None and watched.run.samples["step"].count == 4
    assert watched.run.workload.optimizer is None


def test_one_loop_is_watched_at_a_time(tmp_path: Path):
    model = Net()
    with stepscope.watch(model, runs=tmp_path, quiet=True), stepscope.watch(model, runs=tmp_path, quiet=True) as second:
        pass
    assert second.run is None and second.why_not == "another watch is running in this process"


def test_wrong_input_says_what_to_give():
    with pytest.raises(InputError, match=r"the model is a str: give a torch\.nn\.Module"):
        stepscope.watch("gpt")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"the optimizer is a float: give one of PyTorch's"):
        stepscope.watch(Net(), 0.1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="begin too early"):
        stepscope.watch(steps=(0, 5))
    with pytest.raises(InputError, match="unknown record 'nsys'"):
        stepscope.watch(record="nsys")


def test_to_import_stepscope_imports_no_torch():
    code = """
import sys, stepscope
print('torch' in sys.modules, 'watch' in dir(stepscope))
stepscope.watch
print('torch' in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\nTrue\n"


class Small(torch.nn.Linear):
    pass


class Judge(torch.nn.Linear):
    pass


def page(run: Run | None) -> str:
    """What is said above and below the table of times."""
    assert run is not None
    answer = answer_run(run)
    return "\n".join([*(line.text for line in answer.lead), *(n.text for t in answer.tables for n in t.notes)])


def test_a_round_names_the_optimizers_and_forwards_by_their_models(tmp_path: Path):
    made, judge = Small(4, 8), Judge(8, 1)
    of_made, of_judge = torch.optim.Adam(made.parameters()), torch.optim.Adam(judge.parameters())
    with stepscope.watch(steps=(4, 9), runs=tmp_path, record="memory", quiet=True) as watched:
        for _ in range(16):
            for real in (torch.randn(6, 8), made(torch.randn(6, 4)).detach()):
                judge(real).square().mean().backward()
            of_judge.step()
            judge(made(torch.randn(6, 4))).mean().backward()
            of_made.step()
            made.zero_grad()
            judge.zero_grad()
    said, run = page(watched.run), watched.run
    assert "Small and Judge: 49 parameters" in said
    assert "ends with a step of Adam of Small, in which Adam of Judge also steps (a round of 2 optimizers)" in said
    assert "1 forward of Small, 3 forwards of Judge, 3 backwards." in said, "what is detached is no forward of the step"
    assert run is not None and run.evidence.loop is not None
    assert (run.evidence.loop.trainable, run.workload.batch_size) == (49, 6)
    assert run.summary["samples_per_s"] == pytest.approx(6 / (run.samples["step"].median_s or 0))
    state = 2 * 4 * 49  # bytes of two moments of each parameter
    assert run.evidence.memory is not None and (run.evidence.memory.after_parameters or 0) >= 4 * 49 + state


def test_samples_a_second_of_episodes_are_those_of_all_steps(tmp_path: Path):
    policy = Small(4, 2)
    optimizer = torch.optim.Adam(policy.parameters())
    with stepscope.watch(policy, optimizer, steps=(4, 14), runs=tmp_path, quiet=True) as watched:
        for step in range(20):
            states = 3 + 4 * (step % 2)  # the step that was looked at takes 3
            sum((policy(torch.randn(4)).square().sum() for _ in range(states)), torch.zeros(())).backward()
            optimizer.step()
            optimizer.zero_grad()
    run = watched.run
    assert run is not None and run.workload.model.inputs["0"].shape == (3, 4), "a state has no dimension for the batch"  # type: ignore[union-attr]
    assert "3 forwards of Small, 1 backward. Those timed ran 3 to 7 forwards each." in page(run)
    assert run.summary["samples_per_s"] == pytest.approx(5 / (run.samples["step"].mean_s or 0))


def test_an_adapter_and_an_evaluation_are_said(tmp_path: Path):
    model = Net()
    model.inner[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with stepscope.watch(steps=(4, 14), runs=tmp_path, quiet=True) as watched:
        for step in range(20):
            train_step(model, optimizer, micro_batches=2)
            if step == 9:
                with torch.no_grad():
                    model(torch.randn(4, 8))
    said = page(watched.run)
    assert "Net: 136 of 280 parameters train" in said
    assert "2 micro-batches of 4" in said
    line = test_an_adapter_and_an_evaluation_are_said.__code__.co_firstlineno + 9
    assert "1 step of 10 took " in said
    assert f" more: evaluation of Net (calls with gradients off) at engine/test_watched_inside.py:{line}. " in said
    assert watched.run is not None and watched.run.evidence.loop is not None
    evaluated = watched.run.evidence.loop.evaluated
    assert evaluated is not None and (evaluated.steps, evaluated.of) == (1, 10)
    assert "The times above are without it." in said


def test_a_loop_that_ends_in_warm_up_is_not_said_to_skip_its_updates(tmp_path: Path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with stepscope.watch(model, optimizer, runs=tmp_path, quiet=True) as watched:
        for _ in range(8):
            train_step(model, optimizer)
    assert watched.run is not None and watched.run.finding("optimizer-skipped") is None


def test_a_loop_without_a_module_says_what_makes_one(tmp_path: Path):
    model = Small(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with stepscope.watch(steps=(4, 9), runs=tmp_path, quiet=True) as watched:
        for _ in range(16):
            model.forward(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    run = watched.run
    assert run is not None and not run.work and run.finding("rest-is-large") is None
    assert "model(x) in place of model.forward(x) makes Small one" in run.evidence.notes[0]
    assert "no module is called that trains, 1 backward" in page(run)


def test_a_checkpoint_now_and_then_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def slow(*_: object) -> None:
        time.sleep(0.05)

    monkeypatch.setattr(torch, "save", slow)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepscope.watch(steps=(4, 24), runs=tmp_path, quiet=True) as watched:
        for step in range(30):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                torch.save(model.state_dict(), tmp_path / "checkpoint.pt")
    assert torch.save is slow, "nothing of the watch is left"
    assert watched.run is not None and watched.run.evidence.loop is not None
    saved = watched.run.evidence.loop.saved
    assert saved is not None and (saved.steps, saved.of) == (4, 20) and saved.median_s >= 0.05
    line = test_a_checkpoint_now_and_then_has_a_name.__code__.co_firstlineno + 13
    assert saved.where == f"engine/test_watched_inside.py:{line}"
    said = f"4 steps of 20 save for {format_seconds(saved.median_s)} (torch.save at {saved.where})."
    assert said in [line.text for table in answer_run(watched.run).tables for line in table.notes]


def test_tokens_are_those_of_batches_that_differ_in_length(tmp_path: Path):
    model = torch.nn.Embedding(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepscope.watch(steps=(3, 8), runs=tmp_path, quiet=True) as watched:
        for _ in range(12):
            for rows, length in ((4, 24), (4, 16), (2, 20)):
                model(torch.zeros(rows, length, dtype=torch.int64)).square().mean().backward()
            optimizer.step()
    run = watched.run
    assert run is not None and run.evidence.loop is not None and run.workload.accumulation == 3
    assert run.workload.batch_size == 4 + 4 + 2 and run.evidence.loop.tokens == 4 * 24 + 4 * 16 + 2 * 20
    assert run.summary["tokens_per_s"] == pytest.approx(200 / (run.samples["step"].median_s or 0))


@pytest.mark.long
def test_a_step_that_is_compiled_whole_is_not_traced_from_inside(tmp_path: Path):
    """A profiler that began within the compiled region ended the process by a segmentation fault."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(train_step, backend="eager")
    with stepscope.watch(steps=(3, 5), runs=tmp_path, record="kineto", quiet=True) as watched:
        for _ in range(20):
            step(model, optimizer)
    assert watched.run is not None and not watched.run.evidence.captures
    assert "trace kineto, which failed: a step ends inside of what torch.compile has compiled" in str(
        watched.run.evidence.notes
    )
