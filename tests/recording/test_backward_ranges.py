"""Ranges in the backward pass: each node in the module that made it, and nothing but the ranges is different."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stepscope.core.parts import Attention
from stepscope.core.range_names import ATTENTION_PARTS, GRADIENT_ACCUMULATION, MARKING
from stepscope.recording import driven, ranges
from stepscope.recording.backward_ranges import BackwardRanges, SequenceNotes
from stepscope.recording.device import HostDevice
from stepscope.training.training_step import TrainingStep
from tests.conftest import mini
from tests.recording.test_capture import LAYERS, Recorder, ranges_of_forward

CPU = torch.device("cpu")


class ThreadedRecorder:
    """A Recorder for each thread."""

    def __init__(self) -> None:
        self.threads: dict[int, Recorder] = {}

    @property
    def here(self) -> Recorder:
        return self.threads.setdefault(threading.get_ident(), Recorder())

    def push(self, name: str) -> None:
        self.here.push(name)

    def pop(self) -> None:
        self.here.pop()


class Products(TorchDispatchMode):
    """Notes the open ranges whenever a matrix product runs, with the shapes of its operands."""

    def __init__(self, recorder: ThreadedRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.seen: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::bmm", "aten::addmm"):
            self.seen.append((func._schema.name, tuple(self._recorder.here.open), tuple(out.shape)))
        return out


def test_every_product_of_backward_lies_in_the_module_whose_forward_made_it():
    step, recorder = TrainingStep(mini(), CPU), ThreadedRecorder()
    with ranges.emitted_to(recorder), Products(recorder) as products:
        driven.trace_nvtx(step, CPU, HostDevice(), 1)
    forward = Counter(open_ranges[2:] for _, open_ranges, _ in products.seen if open_ranges[1] == "forward")
    backward = Counter(open_ranges[2:] for _, open_ranges, _ in products.seen if open_ranges[1] == "backward")
    # Each product of forward has two in backward. Forward's ranges are nested, backward's name the innermost.
    innermost: Counter[tuple[str, ...]] = Counter()
    for names, count in forward.items():
        modules = [i for i, name in enumerate(names) if name not in ATTENTION_PARTS]
        innermost[names[modules[-1] :]] += 2 * count
    assert backward == innermost
    assert sum(backward.values()) == 2 * (9 * LAYERS + 1)
    assert backward["blocks.1.attention", "attention scores"] == 2 and backward["head",] == 2
    # And the gradient of a weight, by its shape, is made in the weight's own module.
    made = {(names[-1], shape) for _, names, shape in products.seen if names[1] == "backward"}
    for path, module in step.model.named_modules():
        if isinstance(module, nn.Linear):
            assert {(path, tuple(module.weight.shape)), (path, tuple(module.weight.shape)[::-1])} & made, path


def test_pushes_and_pops_balance_and_every_parameter_is_accumulated_once():
    step, recorder = TrainingStep(mini(), CPU), ThreadedRecorder()
    with ranges.emitted_to(recorder):
        driven.trace_nvtx(step, CPU, HostDevice(), 3)
    (one,) = recorder.threads.values()
    assert not one.open
    forward = Counter(names[-1] for names in one.pushed if len(names) > 2 and names[1] == "forward")
    assert forward == Counter({name: 3 * count for name, count in ranges_of_forward().items()})
    inside = Counter(names[2:] for names in one.pushed if len(names) > 2 and names[1] == "backward")
    assert inside[GRADIENT_ACCUMULATION,] == 3 * len(list(step.model.parameters()))
    assert all(inside[f"blocks.{i}.attention", part] for i in range(LAYERS) for part in ATTENTION_PARTS)
    # Inside backward stand modules, parts within attention, and accumulation; never deeper, never anything else.
    modules = {path for path, _ in step.model.named_modules()}
    for names in inside:
        assert names[0] in modules | {GRADIENT_ACCUMULATION} and len(names) <= 2
        assert len(names) == 1 or (names[0].endswith(".attention") and names[1] in ATTENTION_PARTS)
    phases = [names[1] for names in one.pushed if len(names) == 2]
    assert phases == 3 * ["forward", MARKING, "backward", "optimizer"]


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_gradients_are_bitwise_the_same(attention: Attention, dtype: Any):
    def gradients(*, watched: bool) -> list[Tensor]:
        step = TrainingStep(mini(phase="forward-backward", attention=attention, dtype=dtype), CPU)
        if watched:
            with ranges.emitted_to(Recorder()):
                driven.trace_nvtx(step, CPU, HostDevice(), 2)
        else:
            driven.timed_steps(step, HostDevice(), 2)
        return [parameter.grad for parameter in step.model.parameters() if parameter.grad is not None]

    with_ranges, without = gradients(watched=True), gradients(watched=False)
    assert len(with_ranges) == len(without) > 0
    assert all(torch.equal(a, b) for a, b in zip(with_ranges, without, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_no_event_is_read_while_a_tool_records(compiled: bool, monkeypatch: pytest.MonkeyPatch):
    """An Nsight Systems older than the call that reads one loses kernels by it: 1,053 of 1,768, on an H200."""

    class Unread(HostDevice):
        def mark(self) -> Any:
            raise AssertionError("an event was recorded")

        def elapsed_s(self, start: Any, end: Any) -> float:
            raise AssertionError("an event was read")

    step = TrainingStep(mini(), CPU)
    monkeypatch.setattr(step, "compiled", compiled)
    with ranges.emitted_to(Recorder()):
        samples = driven.trace_nvtx(step, CPU, Unread(), 2)
    assert set(samples) == {"step", "host"} and samples["step"].count == 2


def test_nothing_stays_registered():
    step = TrainingStep(mini(), CPU)
    with ranges.emitted_to(Recorder()):
        driven.trace_nvtx(step, CPU, HostDevice(), 2)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in step.model.modules())
    assert ranges.current_emitters() == ()
    after = Recorder()
    with ranges.emitted_to(after):
        driven.timed_steps(step, HostDevice(), 1)
    assert after.pushed == [("step",), ("step", "forward"), ("step", "backward"), ("step", "optimizer")]


def test_hooks_come_off_a_graph_that_lives_on():
    weight = torch.randn(3, 3, requires_grad=True)
    loss = (weight @ weight).sum()
    assert loss.grad_fn is not None
    recorder, notes = Recorder(), SequenceNotes([])
    backward = BackwardRanges((recorder,))
    assert backward.attach(loss.grad_fn, notes) == 3
    loss.backward(retain_graph=True)
    assert recorder.pushed == [(GRADIENT_ACCUMULATION,)] and not recorder.open
    backward.release()
    loss.backward()
    assert len(recorder.pushed) == 1


class Checkpointed(nn.Module):
    """Two linear layers that are run again in backward, and one that is not."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(lambda x: self.second(torch.tanh(self.first(x))), x, use_reentrant=self.reentrant)
        assert isinstance(inner, Tensor)
        return self.last(inner)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_does_not_break_it(reentrant: bool):
    torch.manual_seed(0)
    model, x = Checkpointed(reentrant=reentrant), torch.randn(2, 4, requires_grad=True)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    recorder = Recorder()
    notes = SequenceNotes(path for path, _ in model.named_modules() if path)
    backward = BackwardRanges((recorder,))
    with ranges.emitted_to(recorder, notes), ranges.detailed(model):
        loss = model(x).sum()
        notes.closed = True
        forward = len(recorder.pushed)
        assert loss.grad_fn is not None
        backward.attach(loss.grad_fn, notes)
        loss.backward()
    assert not recorder.open
    after = Counter(names[-1] for names in recorder.pushed[forward:])
    assert after["first"] >= 1 and after["second"] >= 1 and after["last"] >= 1
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None and gradient is not None and torch.equal(parameter.grad, gradient)


class Interrupted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_ctrl_c_in_a_module_leaves_no_range_open():
    recorder = Recorder()
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Interrupted()))
    with pytest.raises(KeyboardInterrupt), ranges.emitted_to(recorder), ranges.detailed(model):
        model(torch.ones(2, 4))
    assert recorder.pushed[-1] == ("0", "0.1") and not recorder.open


def test_ranges_on_two_threads_do_not_meet():
    recorder = ThreadedRecorder()
    both = threading.Barrier(2, timeout=60)

    def work() -> None:
        both.wait()  # a thread that is done before the other begins leaves it its number
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        backward = BackwardRanges((recorder,))
        for _ in range(20):
            loss = model(torch.randn(2, 4)).sum()
            assert loss.grad_fn is not None
            backward.attach(loss.grad_fn, SequenceNotes([]))
            loss.backward()
            backward.release()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [Counter(one.pushed) for one in recorder.threads.values()] == 2 * [
        Counter({(GRADIENT_ACCUMULATION,): 20 * 4})
    ]
    assert not any(one.open for one in recorder.threads.values())


def test_a_forward_step_alone_has_its_modules():
    step, recorder = TrainingStep(mini(phase="forward"), CPU), Recorder()
    with ranges.emitted_to(recorder):
        driven.trace_nvtx(step, CPU, HostDevice(), 1)
    assert Counter(names[-1] for names in recorder.pushed if len(names) > 2) == ranges_of_forward()
