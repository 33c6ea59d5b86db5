"""What a step of a loop is: found where it shows, and otherwise said not to be."""

import pytest
import torch
from torch import nn

from tests.measure.watch.loops import DiaryStage, Net, Told, nothing_is_left, train_step, watch


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


def test_two_optimizers_are_not_told_apart():
    told = Told()
    two_models(told)
    assert told.reason == "2 optimizers step (Adam of Net, SGD of Critic)"


def test_the_class_of_a_model_says_whose_step_counts():
    diary = DiaryStage()
    told = Told(diary)
    two_models(told, 5, step_of="Net")
    assert told.answer is not None
    assert [type(root.module) for root in told.answer.roots] == [Net]
    assert [type(optimizer).__name__ for optimizer in told.answer.optimizers] == ["Adam", "SGD"]
    # The other model's backward and optimizer count to these phases, its forward to the rest.
    both = ["backward", "/backward", "optimizer", "/optimizer"]
    assert diary.steps == [[*both, "forward", "/forward", *both]]


def test_the_class_of_an_optimizer_says_whose_step_counts():
    told = Told(DiaryStage())
    two_models(told, step_of="SGD")
    assert told.answer is not None and [type(root.module) for root in told.answer.roots] == [Critic]


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
    assert (told.answer.micro_batches, told.answer.batches) == (micro_batches, micro_batches)
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
