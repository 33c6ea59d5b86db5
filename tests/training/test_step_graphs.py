"""A whole step replayed as CUDA graphs: the same numbers as without, and what it refuses."""

from typing import Any

import pytest
import torch

from stepscope.core.errors import InputError
from stepscope.training.training_step import TrainingStep
from tests.conftest import at_length, mini, run_steps

gpu = pytest.mark.gpu
SIZES = {"d_model": 128, "d_ff": 256, "layers": 3, "heads": 4, "vocabulary": 512, "seq_len": 64}


def losses_and_weights(**choices: Any) -> tuple[list[float | None], list[torch.Tensor]]:
    step = TrainingStep(mini(**{**SIZES, **choices}), torch.device("cuda"))
    losses = [run_steps(step) for _ in range(8)]
    return losses, [parameter.detach().clone() for parameter in step.model.parameters()]


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "choices",
    [
        {"dtype": "fp32", "optimizer": "adamw-foreach"},
        {"dtype": "bf16", "optimizer": "adamw-fused", "accumulation": 2},
        {"dtype": "bf16-master", "optimizer": "adamw-fused", "checkpointing": "every-1"},
        {"dtype": "bf16-master", "optimizer": "adamw-one-launch", "attention": "sdpa"},
        {"dtype": "bf16-master", "optimizer": "adamw-under-backward", "attention": "flash"},
        {"dtype": "bf16-master", "optimizer": "adamw-one-launch", "clip": 0.1},
        {"dtype": "bf16", "optimizer": "adamw-foreach", "clip": 0.1},
        {"dtype": "bf16", "phase": "forward-backward"},
        *at_length({"dtype": "fp16", "optimizer": "adamw-fused"},
                   {"dtype": "bf16", "optimizer": "adamw-loop"},
                   {"dtype": "bf16-master", "optimizer": "adamw-under-backward", "compile": "blocks"}),
    ],
    ids=lambda choices: "-".join(map(str, choices.values())),
)  # fmt: skip
def test_replayed_steps_are_the_steps(choices: dict[str, Any]):
    """Eager, captured and replayed: the losses and the weights of a step that is never captured."""
    plain, replayed = losses_and_weights(**choices), losses_and_weights(**choices, graph="step")
    assert replayed[0] == pytest.approx(plain[0], rel=2e-3)
    for one, other in zip(plain[1], replayed[1], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_batch_of_another_shape_is_one_line():
    step = TrainingStep(mini(**SIZES, graph="step"), torch.device("cuda"))
    step.batches = [tuple(tensor[:, :32] for tensor in batch) for batch in step.batches]
    with pytest.raises(InputError, match="--graph step replays one shape"):
        step.prepare()


def test_a_device_without_cuda_graphs_is_one_line():
    with pytest.raises(InputError, match="--graph step captures CUDA graphs, which cpu has not"):
        TrainingStep(mini(graph="step"), torch.device("cpu"))
