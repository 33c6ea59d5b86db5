"""Gradients against formats: thresholds by hand and by PyTorch's own casts, a real step's histogram, bad input."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.core.errors import InputError
from stepscope.core.float_formats import BLOCK_FORMATS, FORMATS
from stepscope.core.model_config import configure
from stepscope.questions.underflow import (
    COMPARED,
    IN_BLOCKS,
    Gradients,
    _in_blocks,
    best_scale,
    exponents,
    gradients_of,
    kind_of_module,
    shares_of,
    study_underflow,
)
from tests.conftest import mini
from tests.questions.verbs import answered

DTYPES = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp8-e5m2": torch.float8_e5m2, "fp8-e4m3": torch.float8_e4m3fn,
}  # fmt: skip
SMALL = configure("tiny", d_model=32, d_ff=64, layers=1, heads=2, vocabulary=101)


def ascending(*values: float) -> torch.Tensor:
    return torch.tensor(sorted(values), dtype=torch.float64)


def test_shares_by_hand():
    """fp16: smallest normal 2**-14, smallest subnormal 2**-24, half of it becomes zero, 65520 becomes infinite."""
    values = ascending(2.0**-26, 2.0**-25, 1.5 * 2.0**-25, 2.0**-24, 2.0**-15, 2.0**-14, 65519.0, 65520.0)
    found = shares_of([values], FORMATS["fp16"])
    assert (8 * found.below_normal, 8 * found.below_subnormal) == (5, 3)
    assert (8 * found.becomes_zero, 8 * found.overflows) == (2, 1)
    scaled = shares_of([values], FORMATS["fp16"], scale=1)
    assert (8 * scaled.becomes_zero, 8 * scaled.below_subnormal, 8 * scaled.overflows) == (1, 1, 2)


def test_a_tie_beyond_the_largest_goes_to_the_even_neighbour():
    """e4m3's largest, 448, is even: 464 comes back to it. e5m2's, 57344, is odd: 61440 becomes infinite."""
    assert shares_of([ascending(464.0)], FORMATS["fp8-e4m3"]).overflows == 0
    assert shares_of([ascending(math.nextafter(464.0, 500.0))], FORMATS["fp8-e4m3"]).overflows == 1
    assert shares_of([ascending(61440.0)], FORMATS["fp8-e5m2"]).overflows == 1


@settings(deadline=None)
@given(
    st.lists(st.floats(width=32, min_value=2.0**-149, max_value=2.0**20), min_size=1, max_size=30),
    st.sampled_from(COMPARED),
    st.sampled_from((0, 3, 16)),
)
def test_what_becomes_zero_or_overflows_is_what_pytorch_casts(values: list[float], name: str, scale: int):
    found = shares_of([ascending(*values)], FORMATS[name], scale)
    cast = (torch.tensor(values, dtype=torch.float32) * 2.0**scale).to(DTYPES[name]).float()
    assert round(found.becomes_zero * len(values)) == int((cast == 0).sum())
    if name != "fp8-e4m3":  # without an infinity, a cast may also stop at the largest number
        assert round(found.overflows * len(values)) == int((~cast.isfinite()).sum())
    assert found.overflows == 0 or not (cast < FORMATS[name].largest).all()
    assert found.becomes_zero <= found.below_subnormal <= found.below_normal


@settings(deadline=None)
@given(st.lists(st.floats(width=32, min_value=2.0**-149, max_value=2.0**100), max_size=40))
def test_exponents_are_floors_of_the_logarithm(values: list[float]):
    counts = exponents(ascending(*values))
    assert counts.total() == len(values)
    for value in values:
        assert counts[math.frexp(value)[1] - 1] > 0


@given(st.floats(min_value=2.0**-40, max_value=2.0**20), st.sampled_from(("fp16", "fp8-e5m2", "fp8-e4m3")))
def test_the_best_scale_is_the_last_without_overflow(largest: float, name: str):
    scale = best_scale(largest, FORMATS[name])
    assert largest * 2.0**scale <= FORMATS[name].largest < largest * 2.0 ** (scale + 1)


def test_magnitudes_leave_out_zeros_and_signs():
    gradients = Gradients("head", "parameters", {"a": torch.tensor([[0.0, -2.0]]), "b": torch.tensor([1.0])})
    assert gradients.magnitudes.tolist() == [1.0, 2.0] and gradients.total == 3


def test_kinds_of_modules():
    names = ("embedding", "blocks.0.attention_norm", "blocks.0.attention.query", "blocks.1.feed_forward.up", "head")
    assert [kind_of_module(name) for name in names] == ["embedding", "norm", "attention", "feed-forward", "head"]


def test_every_gradient_of_a_step_is_there_and_a_scale_moves_exponents_only():
    workload = mini(phase="forward-backward")
    plain, scaled = (gradients_of(workload, torch.device("cpu"), scale) for scale in (0, 10))
    parameters = {name for each in plain if each.of == "parameters" for name in each.tensors}
    assert len(parameters) == 1 + 2 * 9 + 1 + 1  # embedding, blocks, norm, head
    outputs = {name for each in plain if each.of == "activations" for name in each.tensors}
    assert len(outputs) == len(parameters)  # each has a module of its own
    for one, other in zip(plain, scaled, strict=True):
        counts = exponents(one.magnitudes)
        assert exponents(other.magnitudes) == {k + 10: count for k, count in counts.items()}


def test_the_study_agrees_with_a_cast_of_the_gradients():
    found = study_underflow(model=SMALL, seq_len=16, device="cpu")
    gradients = gradients_of(mini(d_ff=64, layers=1, batch_size=1, seq_len=16, phase="forward-backward"),
                             torch.device("cpu"))  # fmt: skip
    values = torch.cat([each.magnitudes for each in gradients])
    rows = {
        (row[0], row[1]): row for row in found.table("Non-zero gradients of parameters and activations, by format").rows
    }
    for name, dtype in DTYPES.items():
        share = 100 * float((values.float().to(dtype).float() == 0).sum()) / len(values)
        assert rows[name, "2**0"][5] == pytest.approx(share, rel=1e-3)
    panel = found.panels[0]
    heights = [point.y for point in panel.points if point.line == "head"]
    assert sum(heights) == pytest.approx(1.0)
    limit = {point.x for point in panel.points if point.line == "smallest subnormal of fp16"}
    assert limit == {-24.0}
    assert found.table("As observed under autocast to fp16").rows


@pytest.mark.parametrize("options", [{"format_name": "fp64"}, {"seq_len": 0}, {"device": "tpu"}])
def test_questions_that_cannot_be_answered(options: dict[str, Any]):
    with pytest.raises(InputError):
        study_underflow(model=SMALL, **options)


def test_the_verb_and_its_plot(tmp_path: Path):
    asked = ("--vocabulary", "101", "--seq-len", "16", "--format", "fp8-e5m2", "--device", "cpu")
    found = answered("underflow", *asked, plot=tmp_path / "underflow.svg")
    assert found.settings["format"] == "fp8-e5m2"
    kinds = {finding.kind for finding in found.findings}
    assert {"gradient-range", "gradient-underflow"} <= kinds and "gradients-observed" not in kinds


def test_what_a_step_loses_in_blocks():
    """MXFP4 lets numbers vanish, MXFP8 a tenth of them at most; NVFP4, with finer scales, is off less."""
    found = study_underflow(model=SMALL, seq_len=32, format_name="mxfp4", device="cpu")
    rows = {(row[0], row[1]): [float(str(cell)) for cell in row[2:]] for row in found.table(IN_BLOCKS).rows}
    vanish, blocks, error = rows["mxfp4", "activations"]
    assert 0 < vanish < 100 and blocks >= vanish and 5 < error < 50
    assert rows["nvfp4", "activations"][2] < error and rows["mxfp8", "activations"][0] < vanish / 10
    kinds = found.table("Non-zero gradients by kind of module, in mxfp4")
    assert kinds.columns[2:] == found.table(IN_BLOCKS).columns[2:] and len(kinds.rows) >= 5
    assert not any(table.title.startswith("As observed") for table in found.tables)


def test_blocks_of_a_tensor_by_hand():
    """The largest, 4, makes the scale 1: 0.25 is a tie and becomes 0; the second row loses nothing."""
    gradients = Gradients("k", "activations", {"x": torch.tensor([[4.0, 0.25, 0.0], [1.0, 0.5, 6.0]])})
    assert _in_blocks([gradients], "activations", BLOCK_FORMATS["mxfp4"]) == (
        20.0,
        50.0,
        3.424,
    )
    assert _in_blocks([gradients], "parameters", BLOCK_FORMATS["mxfp4"]) == (0.0, 0.0, 0.0)
