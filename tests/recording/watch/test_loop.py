"""What a step of a loop is: found where it shows, and otherwise said not to be."""

from typing import Any

import pytest
import torch
from torch import nn

from stepscope.recording.watch.loop import TensorSeen
from tests.recording.watch.loops import DiaryStage, Net, Told, nothing_is_left, train_step, watch

PLAIN = ["forward", "/forward", "backward", "/backward", "optimizer", "/optimizer"]


class Critic(Net):
    pass


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.critic = Net(), Critic()


def two_models(told: Told, steps: int = 4, **given: object) -> None:
    """A loop as that of a GAN: two models with an optimizer each, in turn."""
    first, second = Net(), Critic()
    one, other = torch.optim.Adam(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.1)
    watch(told, **given)
    for _ in range(steps):
        train_step(second, other)
        train_step(first, one)
    assert nothing_is_left(first, one) or told.reason is None


def names(told: Told) -> tuple[list[str], list[str]]:
    """The classes of the modules and of the optimizers that were found."""
    assert told.answer is not None, told.reason
    found = told.answer
    return [type(root.module).__name__ for root in found.roots], [type(each).__name__ for each in found.optimizers]


def test_a_round_in_which_each_of_two_optimizers_steps_is_a_step():
    diary = DiaryStage()
    told = Told(diary)
    two_models(told, 5)
    assert names(told) == (["Net", "Critic"], ["Adam", "SGD"])
    assert told.answer is not None and told.answer.name == "Net and Critic"
    assert sum(p.numel() for p in told.answer.model.parameters()) == 2 * sum(p.numel() for p in Net().parameters())
    assert diary.first == 2 and diary.steps == [PLAIN * 2]


@pytest.mark.parametrize(("step_of", "first"), [("Net", "Net"), ("SGD", "Critic")])
def test_a_class_says_whose_step_counts(step_of: str, first: str):
    diary = DiaryStage()
    told = Told(diary)
    two_models(told, 5, step_of=step_of)
    assert names(told)[0][0] == first and told.answer is not None and type(told.answer.model).__name__ == first
    assert diary.first == 2 and diary.steps == [PLAIN * 2], "forwards of every model that an optimizer updates count"


@pytest.mark.parametrize("times", [2, 5])
def test_a_critic_that_steps_several_times_before_its_generator_does(times: int):
    net, critic = Net(), Critic()
    one, other = torch.optim.Adam(net.parameters()), torch.optim.SGD(critic.parameters(), lr=0.1)
    diary = DiaryStage()
    told = Told(diary)
    watch(told)
    for _ in range(4):
        for _ in range(times):
            with torch.no_grad():
                made = net(torch.randn(4, 8))
            train_step(critic, other) if made is not None else None
        train_step(net, one)
    assert names(told) == (["Net", "Critic"], ["Adam", "SGD"])
    assert told.answer is not None and told.answer.steps_of(other) == times and told.answer.steps_of(one) == 1
    assert diary.first == 2 and [word for word in diary.steps[0] if word in PLAIN] == PLAIN * (times + 1)


def test_two_optimizers_of_one_model_that_step_together_are_one_step():
    model, told, diary = Net(), Told(), DiaryStage()
    told = Told(diary)
    matrices = torch.optim.SGD([p for p in model.parameters() if p.dim() == 2], lr=0.1)
    vectors = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2])
    watch(told)
    for _ in range(4):
        model(torch.randn(4, 8)).sum().backward()
        matrices.step()
        vectors.step()
    assert names(told) == (["Net"], ["AdamW", "SGD"])
    assert told.answer is not None and told.answer.model is model
    assert diary.steps == [PLAIN + PLAIN[4:]]


def test_optimizers_that_step_in_no_order_are_said_to():
    first, second, told = Net(), Critic(), Told()
    one, other = torch.optim.Adam(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.1)
    watch(told)
    for times in range(3, 13):
        train_step(second, other)
        for _ in range(times):
            train_step(first, one)
    assert told.reason == "2 optimizers step (SGD, Adam), in no order that comes again"


def test_a_call_that_no_backward_comes_to_is_no_forward_of_the_step():
    model, told = Net(), Told(DiaryStage())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(told)
    for step in range(4):
        train_step(model, optimizer)
        if step % 100 == 0:
            model(torch.randn(50, 8))  # the samples that a log shows
    assert told.answer is not None and (told.answer.forwards, len(told.answer.batches)) == (1, 1)
    assert told.answer.roots[0].inputs["0"] == {TensorSeen((4, 8), "float32")}


def test_a_loop_that_calls_no_module_has_a_step_without_forward():
    model, diary = nn.Linear(8, 8), DiaryStage()
    optimizer, told = torch.optim.Adam(model.parameters()), Told(diary)
    watch(told)
    for _ in range(4):
        model.forward(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    assert names(told) == ([], ["Adam"]) and told.answer is not None and told.answer.model is model
    assert diary.steps == [PLAIN[2:]]


def test_parameters_without_a_module_are_a_model_too():
    weights, diary = [torch.randn(8, 8, requires_grad=True)], DiaryStage()
    optimizer, told = torch.optim.SGD(weights, lr=0.1), Told(diary)
    watch(told)
    for _ in range(4):
        (torch.randn(4, 8) @ weights[0]).square().mean().backward()
        optimizer.step()
    assert told.answer is not None and list(told.answer.model.parameters()) == weights
    assert diary.steps == [PLAIN[2:]]


def test_a_loop_that_updates_by_hand_says_where_a_step_ends():
    weights, diary = [nn.Parameter(torch.randn(8, 8))], DiaryStage()
    told = Told(diary)
    watching = watch(told)
    for _ in range(4):
        (torch.randn(4, 8) @ weights[0]).square().mean().backward()
        with torch.no_grad():
            weights[0] -= 0.01 * weights[0].grad  # type: ignore[operator]  # backward has just made it
        watching.step()
    assert told.answer is not None and list(told.answer.model.parameters()) == weights
    assert diary.steps == [PLAIN[2:4]]


def test_a_class_that_is_not_there_is_said_with_those_that_are():
    told = Told()
    two_models(told, step_of="Adamw")
    assert told.reason == "nothing of class Adamw was called: there are Net, Critic, Adam, SGD"


def test_two_modules_of_one_optimizer_are_two_models_unless_a_module_holds_both():
    def loop(first: nn.Module, second: nn.Module) -> Told:
        told = Told(DiaryStage())
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        watch(told)
        for _ in range(3):
            second(first(torch.randn(4, 8))).sum().backward()
            optimizer.step()
        return told

    assert loop(Net(), Critic()).reason == "2 modules with parameters of SGD are called (Net, Critic)"
    whole = Both()
    found = loop(whole.net, whole.critic).answer
    assert found is not None and found.model is whole and found.forwards == 2


def gan_step(net: nn.Module, critic: nn.Module, one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Two samples a generator's update: the critic's update comes first, and takes samples of its own."""
    made = net(torch.randn(4, 8))
    critic(torch.randn(4, 8)).sum().backward()
    critic(made.detach()).sum().backward()
    other.step()
    critic(net(torch.randn(4, 8))).sum().backward()
    one.step()


@pytest.mark.parametrize(
    ("step_of", "micro_batches"), [("Net", 1), ("Critic", 2)], ids=["the generator", "the critic, real and made"]
)
@pytest.mark.parametrize("begins_with_critic", [True, False])
def test_what_runs_for_another_update_is_no_micro_batch(step_of: str, micro_batches: int, begins_with_critic: bool):
    net, critic = Net(), Critic()
    one, other = torch.optim.Adam(net.parameters()), torch.optim.SGD(critic.parameters(), lr=0.1)
    told = Told(DiaryStage())
    watch(told, step_of=step_of)
    if not begins_with_critic:
        train_step(net, one)
    for _ in range(4):
        gan_step(net, critic, one, other)
    assert told.answer is not None
    assert (told.answer.micro_batches, len(told.answer.batches)) == (micro_batches, micro_batches)
    assert told.answer.evaluations == 0


@pytest.mark.parametrize("step_of", ["Adam", "SGD"])
def test_micro_batches_before_two_updates_count_for_both(step_of: str):
    model, told = Net(), Told(DiaryStage())
    first, second = model.inner[0], model.inner[2]
    one, other = torch.optim.Adam(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.1)
    watch(told, step_of=step_of)
    for _ in range(4):
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
        one.step()
        other.step()
    assert told.answer is not None and told.answer.micro_batches == 3


@pytest.mark.parametrize("to_none", [True, False])
def test_the_two_passes_of_sharpness_aware_minimisation_take_one_batch(to_none: bool):
    model, told = Net(), Told(DiaryStage())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(told)
    for _ in range(3):
        x = torch.randn(4, 8)
        for _ in range(2):  # where the weights are, and where the first gradients led
            optimizer.zero_grad(set_to_none=to_none)
            model(x).square().mean().backward()
        optimizer.step()
    assert told.answer is not None
    assert (told.answer.forwards, told.answer.backwards) == (2, 2)
    assert told.answer.micro_batches == len(told.answer.batches) == 1


@pytest.mark.parametrize("in_closure", [False, True])
def test_a_gradient_that_the_loss_holds_makes_no_micro_batch(in_closure: bool):
    model, told = Net(), Told(DiaryStage())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(told)

    def loss() -> torch.Tensor:
        x = torch.randn(4, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        value = slope.square().mean() + model(torch.zeros(2, 8)).square().mean()
        optimizer.zero_grad()
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(loss) if in_closure else (loss(), optimizer.step())
    assert told.answer is not None
    assert (told.answer.forwards, told.answer.backwards, told.answer.evaluations) == (2, 2, int(in_closure))
    assert told.answer.micro_batches == 1
    assert [call.inputs["0"].shape[0] for call in told.answer.batches] == [4, 2]


def test_losses_and_frozen_models_beside_the_model_do_not_matter():
    model, teacher, criterion = Net(), Critic().requires_grad_(False), nn.MSELoss()
    optimizer, told = torch.optim.SGD(model.parameters(), lr=0.1), Told(DiaryStage())
    watch(told)
    for _ in range(3):
        x = torch.randn(4, 8)
        criterion(model(x), teacher(x)).backward()
        optimizer.step()
    assert told.answer is not None and told.answer.model is model


def test_what_forward_takes_and_autocast_inside_it_are_seen():
    class Casting(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    model = Casting()
    optimizer, told = torch.optim.SGD(model.parameters(), lr=0.1), Told(DiaryStage())
    watch(told)
    for _ in range(3):
        model(x=torch.randn(4, 8)).float().sum().backward()
        optimizer.step()
    assert told.answer is not None
    (root,) = told.answer.roots
    assert root.autocast == "bfloat16"
    assert {name: {(t.shape, t.dtype) for t in seen} for name, seen in root.inputs.items()} == {
        "x": {((4, 8), "float32")}
    }


def test_optimizers_that_step_inside_backward_end_a_step_with_it():
    model, diary = Net(), DiaryStage(2)
    told = Told(diary)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    watch(told)
    for _ in range(5):
        model(torch.randn(4, 8)).square().mean().backward()
    assert names(told) == (["Net"], []) and told.answer is not None and told.answer.in_backward == len(optimizers)
    assert diary.steps == [PLAIN[:4]] * 2 and told.over
    assert nothing_is_left(model)
