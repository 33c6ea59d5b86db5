"""A loop that is not ours, watched: which phases its steps have, what a step of it is, and what stays afterwards."""

import copy
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from stepscope.core.range_names import TIMED
from stepscope.core.run import Settings
from stepscope.recording.watch.loop import LoopStep, class_name
from stepscope.recording.watch.phases import Phases
from stepscope.recording.watch.stopwatch import Marks, Stopwatch, TimedSteps
from stepscope.recording.watch.watch import Stage, StepCount, Watch
from tests.recording.watch.loops import DiaryStage, Net, Told, nothing_is_left, parts_of, timed, train_step, watch

PLAIN = ["forward", "/forward", "backward", "/backward", "optimizer", "/optimizer"]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters())


def test_a_step_ends_with_the_optimizer_and_holds_what_lies_between():
    model, diary = Net(), DiaryStage(3)
    optimizer, told = adamw(model), Told(diary)
    watch(told)
    for _ in range(6):
        train_step(model, optimizer)
    assert told.answer is not None and told.answer.model is model and told.answer.optimizers == (optimizer,)
    assert (told.answer.forwards, told.answer.backwards) == (1, 1)
    assert told.first_step == diary.first == 2
    assert diary.steps == [PLAIN] * 3
    assert told.over and not told.faults
    assert nothing_is_left(model, optimizer)


def test_micro_batches_are_one_step():
    model, diary = Net(), DiaryStage()
    optimizer, told = adamw(model), Told(diary)
    watch(told)
    for _ in range(3):
        train_step(model, optimizer, micro_batches=3)
    assert told.answer is not None and (told.answer.forwards, told.answer.backwards) == (3, 3)
    assert diary.steps == [PLAIN[:4] * 3 + PLAIN[4:]]


def test_data_is_the_time_in_a_loaders_next():
    model, diary = Net(), DiaryStage()
    optimizer = adamw(model)
    watch(Told(diary))
    for (batch,) in DataLoader(TensorDataset(torch.randn(40, 8)), batch_size=8):
        model(batch).sum().backward()
        optimizer.step()
    assert diary.steps == [["data", "/data", *PLAIN]]


def test_evaluation_between_steps_is_no_forward():
    model, diary = Net(), DiaryStage(2)
    optimizer = adamw(model)
    watch(Told(diary))
    for _ in range(5):
        train_step(model, optimizer)
        with torch.no_grad():
            model(torch.randn(2, 8))
        model.eval()
        model(torch.randn(2, 8))
        model.train()
    assert diary.steps == [PLAIN] * 2


def test_a_forward_that_checkpointing_runs_again_is_backward():
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    class Reentrant(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)

    for model in (Checkpointed(), Reentrant()):
        diary = DiaryStage()
        optimizer = adamw(model)
        watch(Told(diary))
        for _ in range(3):
            train_step(model, optimizer)
        assert diary.steps == [PLAIN]


def test_gradients_of_gradients_are_backward_whoever_holds_grad():
    from torch.autograd import grad

    model, diary = Net(), DiaryStage()
    optimizer = adamw(model)
    watch(Told(diary))
    for _ in range(3):
        x = torch.randn(4, 8, requires_grad=True)
        (slope,) = grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        optimizer.step()
    assert diary.steps == [["forward", "/forward", *["backward", "/backward"] * 2, "optimizer", "/optimizer"]]


def test_a_closure_runs_inside_the_optimizers_step():
    model, diary = Net(), DiaryStage()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, line_search_fn=None)
    told = Told(diary)
    watch(told)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert told.answer is not None
    assert (told.answer.forwards, told.answer.evaluations) == (2, 2)
    assert told.answer.micro_batches == len(told.answer.batches) == 1, "the closure takes one batch again and again"
    once = ["optimizer", "/optimizer", *PLAIN[:4]]
    assert diary.steps == [[*once * 2, "optimizer", "/optimizer"]]


def test_what_a_closure_does_besides_forward_and_backward_is_rest():
    model, (stage, _) = Net(), timed(4, 10)
    optimizer = adamw(model)
    watch(Told(stage))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        time.sleep(0.02)
        loss.backward()
        return loss

    for _ in range(11):
        optimizer.step(closure=closure)
    samples = stage.samples()
    assert all(value >= 0.02 for value in samples["rest"].values_s), "by far the most of the step"
    assert sorted(samples["optimizer"].values_s)[len(samples["optimizer"].values_s) // 2] < 0.02


def evaluating_loop(every: int, teacher: nn.Module | None = None) -> tuple[TimedSteps, Phases]:
    """A loop that evaluates after every so many steps, for 300 ms and more; with a teacher it calls that in each."""
    model, (stage, _) = Net(), timed(4, 24)
    optimizer, told = adamw(model), Told(stage)
    watching = watch(told)
    for step in range(26):
        x = torch.randn(4, 8)
        with torch.no_grad():
            wanted = teacher(x) if teacher is not None else 0
        (model(x) - wanted).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if teacher is None and step % every == 0:
            with torch.no_grad():
                for _ in range(3):
                    model(x)
                    time.sleep(0.1)  # far longer than another process takes from a step
                model(x)
    return stage, watching.phases


def test_an_evaluation_now_and_then_is_no_part_of_its_step():
    stage, phases = evaluating_loop(10)
    samples = stage.samples()
    assert list(samples) == ["step", *TIMED]
    took = [seconds for seconds in stage.evaluations(20) if seconds]
    assert len(took) == 2 and min(took) >= 0.3, "what lies between two of its calls belongs to it"
    assert max(samples["rest"].values_s) < 0.3
    for i, whole in enumerate(samples["step"].values_s):
        assert sum(samples[name].values_s[i] for name in TIMED) == pytest.approx(whole, abs=2e-9)
    line = evaluating_loop.__code__.co_firstlineno + 15
    assert list(phases.evaluated.values()) == [("Net", f"watch/test_watch.py:{line}")]


def test_a_teacher_that_each_step_calls_is_a_part_of_it():
    class Teacher(Net):
        pass

    stage, phases = evaluating_loop(1, Teacher())
    samples = stage.samples()
    assert list(samples) == ["step", *TIMED, "evaluation"] and min(samples["evaluation"].values_s) > 0
    for i, whole in enumerate(samples["step"].values_s):
        assert sum(samples[name].values_s[i] for name in (*TIMED, "evaluation")) == pytest.approx(whole, abs=2e-9)
    assert [name for name, _ in phases.evaluated.values()] == ["Teacher"]


def scaled_loop(steps: int, overflow: int) -> tuple[DiaryStage, Told]:
    """A loop with a GradScaler whose step of this number overflows, so that its update is left out."""
    model, diary = Net(), DiaryStage(2)
    optimizer, told = torch.optim.SGD(model.parameters(), lr=0.1), Told(diary)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    watch(told)
    for i in range(steps):
        loss = model(torch.randn(4, 8)).square().mean() * (float("inf") if i == overflow else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert nothing_is_left(model, optimizer)
    return diary, told


def test_a_step_whose_update_the_scaler_leaves_out_ends_all_the_same():
    for overflow in (0, 1, 2, 3):
        diary, _ = scaled_loop(5, overflow)
        assert diary.steps == [PLAIN] * 2
        assert diary.first == 2


def test_a_compiled_model_is_watched_from_outside_and_not_compiled_again():
    def make(in_place: bool) -> nn.Module:
        if not in_place:
            return torch.compile(Net(), backend="eager")  # type: ignore[return-value]
        model = Net()
        model.compile(backend="eager")
        return model

    from torch._dynamo.utils import counters

    for in_place in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model, diary = make(in_place), DiaryStage(2)
        optimizer, told = adamw(model), Told(diary)
        watch(told)
        for _ in range(6):
            train_step(model, optimizer)
        assert told.answer is not None and told.answer.compiled
        assert class_name(told.answer.model) == "Net"
        assert diary.steps == [PLAIN] * 2
        assert counters["stats"]["unique_graphs"] == 1
        assert nothing_is_left(model, optimizer)


def test_the_model_can_be_copied_and_pickled_while_it_is_watched():
    model, diary = Net(), DiaryStage(4)
    optimizer = adamw(model)
    watching = watch(Told(diary))
    for i in range(5):
        train_step(model, optimizer)
        twin = copy.deepcopy(model)
        assert isinstance(pickle.loads(pickle.dumps(model)), Net)
        copy.deepcopy(optimizer)
        train_step(twin, torch.optim.SGD(twin.parameters(), lr=0.1)) if i > 2 else None
    watching.stop()
    assert all(step.count("forward") == 1 for step in diary.steps[:-1])


def test_an_exception_that_the_loop_catches_costs_no_more_than_its_step():
    class Failing(Net):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise MemoryError
            return super().forward(x)

    model, diary = Failing(), DiaryStage(2)
    optimizer, told = adamw(model), Told(diary)
    watching = watch(told)
    train_step(model, optimizer)
    train_step(model, optimizer)
    model.fails = True
    with pytest.raises(MemoryError):
        train_step(model, optimizer)
    assert watching.phases.failed == "forward"
    model.fails = False
    train_step(model, optimizer)
    train_step(model, optimizer)
    assert diary.steps == [["forward", "failed forward", "/forward", *PLAIN], PLAIN]
    assert told.over


def test_another_thread_counts_nothing():
    model, diary = Net(), DiaryStage()
    optimizer = adamw(model)
    watch(Told(diary))
    train_step(model, optimizer)
    train_step(model, optimizer)
    other = threading.Thread(target=lambda: model(torch.randn(2, 8)).sum().backward())
    other.start()
    other.join()
    train_step(model, optimizer)
    assert diary.steps == [PLAIN]


def test_the_parts_of_a_step_add_up_to_it_and_steps_to_the_time_that_passed():
    model = Net()
    optimizer = adamw(model)
    stage, _ = timed(4, 14)
    watch(Told(stage))
    for (batch,) in DataLoader(TensorDataset(torch.randn(128, 8)), batch_size=8):
        model(batch).sum().backward()
        optimizer.step()
    samples = stage.samples()
    assert samples["step"].count == 10 and len(samples["step"].warmup_s) == 2
    assert parts_of(samples) == list(TIMED)
    for i, whole in enumerate(samples["step"].values_s):
        assert sum(samples[name].values_s[i] for name in TIMED) == pytest.approx(whole, abs=2e-9)


@pytest.mark.parametrize("steps", [3, 5, 6, 7, 9])
def test_a_loop_that_ends_as_warm_up_does_keeps_its_last_steps(steps: int):
    # Two steps show what a step is, warm-up ends after the fifth, and one more passes before those that count.
    stopwatch = Stopwatch(Marks())
    stage = TimedSteps(stopwatch, Settings(warmup_floor=2, warmup_cap=5, steps_floor=50))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = watch(Told(stage))
    for _ in range(steps):
        train_step(model, optimizer)
    watching.stop()
    warm = 4 if steps > 6 else 0
    assert stage.samples()["step"].count == steps - 2 - warm


def test_the_loop_says_where_a_step_ends():
    model, diary = Net(), DiaryStage(2)
    told = Told(diary)
    watching = watch(told, model=model)
    for _ in range(5):
        model(torch.randn(4, 8)).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None
        watching.step()
    assert told.answer is not None and told.answer.optimizers == ()
    assert diary.steps == [PLAIN[:4]] * 2


def test_what_wraps_the_model_is_what_is_watched():
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.model = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x).sum()

    model, diary = Net(), DiaryStage()
    wrapped, optimizer, told = Wrapper(model), adamw(model), Told(diary)
    watch(told, model=model, optimizer=optimizer)
    for _ in range(3):
        wrapped(torch.randn(4, 8)).backward()
        optimizer.step()
    assert told.answer is not None and told.answer.roots[0].module is wrapped
    assert diary.first == 1, "a loop whose model and optimizer are given is looked at for one step"


def test_an_error_of_the_watch_does_not_reach_the_loop():
    class Broken(DiaryStage):
        def begins(self, step: int) -> None:
            raise ValueError("no room")

    model, diary = Net(), DiaryStage()
    optimizer, told = adamw(model), Told(Broken(), diary)
    watch(told)
    for _ in range(3):
        train_step(model, optimizer)
    assert told.faults == ["diary: no room"]
    assert diary.steps == [PLAIN]
    assert told.over and nothing_is_left(model, optimizer)


def test_a_watch_that_ends_early_keeps_what_its_stage_has_and_leaves_nothing():
    model = Net()
    optimizer = adamw(model)
    for steps in range(6):
        diary = DiaryStage(9)
        watching = watch(Told(diary))
        for _ in range(steps):
            train_step(model, optimizer)
        watching.stop()
        assert diary.ended == (steps > 1)
        assert nothing_is_left(model, optimizer)


def test_two_parts_of_one_class_are_left_as_they_were():
    encoder, decoder, diary = nn.Linear(8, 4), nn.Linear(4, 8), DiaryStage(2)
    model = nn.ModuleList([encoder, decoder])
    optimizer, told = torch.optim.SGD(model.parameters(), lr=0.1), Told(diary)
    watch(told, model=model, optimizer=optimizer)
    for _ in range(5):
        decoder(encoder(torch.randn(4, 8))).square().mean().backward()
        optimizer.step()
    assert told.answer is not None and len(told.answer.roots) == 2
    assert nothing_is_left(model, optimizer)


def test_a_loop_whose_model_is_no_more_is_over_and_keeps_nothing_alive():
    for steps in (3, 7):
        model, diary = Net(), DiaryStage(50)
        optimizer, told = adamw(model), Told(diary)
        watching = watch(told)
        for _ in range(steps):
            train_step(model, optimizer)
        alive = [weakref.ref(each) for each in (model, optimizer, next(model.parameters()))]
        told.answer = None
        gc.disable()
        try:
            del model, optimizer
            assert [each() for each in alive] == [None] * 3, "not even a circle of objects holds them"
        finally:
            gc.enable()
        assert watching.running and not told.gone
        other = Net()
        train_step(other, adamw(other))  # where the next loop enters something, the watch ends
        assert told.gone and diary.ended and not watching.running
        assert nothing_is_left(other)


def test_a_scheduler_that_is_made_while_the_loop_is_watched_finds_a_method():
    model, diary = Net(), DiaryStage(8)
    optimizer = adamw(model)
    watch(Told(diary))
    for _ in range(5):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(2):
            train_step(model, optimizer)
            scheduler.step()
    assert diary.steps == [PLAIN] * 8


def test_other_stages_get_steps_between_the_two_parts_of_those_that_are_timed():
    stopwatch, diary, model = Stopwatch(Marks()), DiaryStage(3), Net()
    settings = Settings(warmup_floor=3, warmup_cap=3, steps_floor=4, steps_cap=9, seconds=60)
    stage, optimizer = TimedSteps(stopwatch, settings, in_two_parts=True), adamw(model)
    told = Told(stage, diary, stage)
    watch(told)
    for _ in range(30):
        train_step(model, optimizer)
    # Steps 0 and 1 show what a step is, 2 warms up, 3 delays; 8 to 10 are the diary's, and 11 comes after them.
    assert stage.spans == [(4, 7), (12, 16)] and diary.first == 8
    assert stage.samples()["step"].count == 9 and told.over


def step_of(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A step whose optimizer is called in this way."""

    def eager() -> None:
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
        update()
        optimizer.zero_grad()

    update = torch.compile(optimizer.step, backend="eager") if kind == "update" else optimizer.step
    return torch.compile(eager, backend="eager") if kind == "whole" else eager


@pytest.mark.parametrize("kind", ["eager", "update", "whole", "marked"])
def test_steps_are_counted_after_the_watch_by_what_disturbs_them_least(kind: str):
    torch._dynamo.reset()
    trace_rules.add("stepscope.recording")  # as the run of a watched loop does
    model, diary = Net(), DiaryStage(2)
    optimizer = adamw(model)
    told = Counting(diary)
    told.watch = watching = watch(told)
    step = step_of(kind, model, optimizer)
    counted: list[int] = []
    for _ in range(12):
        step()
        if kind == "marked":
            if told.count is not None:
                told.count.mark()
            watching.step()
        counted.append(told.count.read()[0] if told.count is not None else 0)
    assert told.over and told.count is not None
    assert counted[-8:] == list(range(5, 13))
    assert bool(optimizer._optimizer_step_post_hooks) == (kind == "eager")
    batches = DataLoader(TensorDataset(torch.randn(8, 8)))
    assert told.count.waits is False and len(list(batches)) == 8 and told.count.waits
    told.count.stop()
    assert nothing_is_left(model, optimizer)


class Counting(Told):
    """Counts the loop's steps also when the watch is over."""

    watch: Watch
    count: StepCount | None = None

    def stages_for(self, loop: LoopStep, first_step: int) -> Sequence[Stage]:
        self.count = StepCount(self.watch, loop)
        return super().stages_for(loop, first_step)

    def finish(self) -> None:
        super().finish()
        assert self.count is not None
        self.count.go_on()
