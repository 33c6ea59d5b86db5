"""Our loss scaler against torch.amp.GradScaler: any pattern of overflows, to the bit; the traced run; bad input."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stepscope.core.errors import InputError
from stepscope.core.float_formats import BLOCK_FORMATS
from stepscope.questions.scaling import PLANTED, DynamicLossScaler, study_scaling
from tests.questions.verbs import answered


def driven(pattern: list[float], scaler: DynamicLossScaler) -> tuple[list[float], list[bool], nn.Parameter]:
    """Scales after each step, whether it was taken, and the parameter. The pattern is of unscaled gradients."""
    parameter = nn.Parameter(torch.tensor([1.0, -0.3]))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scales, taken = [], []
    for gradient in pattern:
        parameter.grad = torch.tensor([gradient, 0.7]) * scaler.scale
        taken.append(scaler.step(optimizer))
        scaler.update()
        scales.append(scaler.scale)
    return scales, taken, parameter


def test_by_hand():
    """Two good steps grow the scale; an overflow halves it and starts the count again; NaN counts as one."""
    scaler = DynamicLossScaler(initial_scale=8.0, growth_interval=2)
    scales, taken, parameter = driven([1.0, 1.0, 1.0, math.inf, 1.0, math.nan, 1.0, 1.0], scaler)
    assert scales == [8.0, 16.0, 16.0, 8.0, 8.0, 4.0, 4.0, 8.0]
    assert taken == [True, True, True, False, True, False, True, True]
    assert parameter[0].item() == pytest.approx(1.0 - 6 * 0.1)


gradients = st.one_of(st.floats(-1e3, 1e3, width=32), st.sampled_from([math.inf, -math.inf, math.nan, 1e-30, 3e38]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(gradients, min_size=1, max_size=60),
    st.integers(1, 9),
    st.one_of(st.sampled_from([1.0, 2.0**16, 2.0**127, 2.0**-126, 2.0**-149]), st.floats(1e-3, 1e30)),
    st.floats(1.01, 10.0),
    st.floats(0.01, 0.99),
)
def test_it_is_gradscaler_to_the_bit(
    pattern: list[float], interval: int, initial: float, growth: float, backoff: float
):
    """Scale, skipped steps, count towards growth and parameters, over any gradients, factors and intervals."""
    ours = DynamicLossScaler(
        initial_scale=initial, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=initial, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    one, other = (nn.Parameter(torch.tensor([1.0, -0.3])) for _ in range(2))
    our_optimizer, their_optimizer = torch.optim.SGD([one], lr=0.1), torch.optim.SGD([other], lr=0.1)
    steps: list[bool] = []
    their_optimizer.register_step_post_hook(lambda *_: steps.append(True))
    for gradient in pattern:
        weights = torch.tensor([gradient, 0.7])
        for parameter, scaled in ((one, ours.scaled), (other, theirs.scale)):
            parameter.grad = None
            scaled((parameter * weights).sum()).backward()
        steps.clear()
        taken = ours.step(our_optimizer)
        ours.update()
        theirs.step(their_optimizer)
        theirs.update()
        assert taken == bool(steps)
        assert (ours.scale, ours.steps_since_change) == (theirs.get_scale(), theirs._get_growth_tracker())
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_scale_does_not_grow_to_infinity():
    scaler = DynamicLossScaler(initial_scale=2.0**127, growth_interval=1)
    scales, _, _ = driven([1e-30], scaler)
    assert scales == [2.0**127]


def test_the_traced_run_overflows_where_planted_and_agrees():
    found = study_scaling(steps=100, growth_interval=10, device="cpu")
    rows = found.table("Steps at which something happened").rows
    planted = {row[0] for row in rows if row[1] == "planted overflow, skipped"}
    assert planted == {step for step in PLANTED if step <= 100}
    assert all(row[-1] for row in rows)
    agreement = found.findings[-1]
    assert (agreement.severity, agreement.evidence["different"]) == ("note", 0)
    lines = {name: [p.y for p in found.panels[0].points if p.line == name] for name in ("ours", "GradScaler")}
    assert len(lines["ours"]) == 100 and lines["ours"] == lines["GradScaler"]
    assert len(set(lines["ours"])) > 3


@pytest.mark.parametrize(
    "changes",
    [
        {"initial_scale": 0.0}, {"initial_scale": math.inf}, {"growth_factor": 1.0}, {"backoff_factor": 1.0},
        {"growth_interval": 0},
    ],
)  # fmt: skip
def test_a_scaler_that_could_not_work(changes: dict[str, Any]):
    with pytest.raises(InputError):
        DynamicLossScaler(**changes)


def test_the_verb(tmp_path: Path):
    asked = ("--steps", "30", "--growth-interval", "5", "--overflow-at", "12", "--device", "cpu")
    assert answered("scaling", *asked, plot=tmp_path / "scale.svg").settings["planted"] == "12"


@pytest.mark.parametrize(
    "options",
    [{"steps": 0}, {"growth_interval": 0}, {"planted": (0,)}, {"device": "tpu"}, {"seed": -1}, {"seed": 10**23}],
)
def test_questions_that_cannot_be_answered(options: dict[str, Any]):
    with pytest.raises(InputError):
        study_scaling(**options)


def test_a_loss_scale_helps_formats_without_scales_and_changes_nothing_in_blocks():
    found = study_scaling(steps=20, planted=(7,), device="cpu")
    rows = {row[0]: row[1:] for row in found.tables[2].rows}
    without, with_it, changed = (float(str(cell)) for cell in rows["fp8-e4m3"])
    assert without > with_it and changed > without
    assert all(rows[name][0] == rows[name][1] and rows[name][2] == 0 for name in BLOCK_FORMATS)
    assert found.findings[0].sentence.endswith("In formats of blocks it changes none: each block's scale takes it up.")
    assert len(study_scaling(steps=20, planted=(20,), device="cpu").tables) == 2, "the last step overflows"
