"""RMSNorm and LayerNorm in few bits: by hand where they break, against float64 and the model's own norm elsewhere."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepscope.core.answer import Answer, Table
from stepscope.core.errors import InputError
from stepscope.core.float_formats import FORMATS
from stepscope.questions.answers import deviation, dtype_of, last_number_where, next_number
from stepscope.questions.normalisation import IN_TURN, MEAN, NORMS, SUM, UPCAST, normalise, study_normalisation
from stepscope.training.transformer import NORM_EPSILON, RMSNorm
from tests.questions.verbs import answered

CPU = torch.device("cpu")


def row_of(value: float, width: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Half of it positive and half negative: the mean is zero, every square the same."""
    return torch.tensor([value, -value], dtype=dtype).repeat(width // 2)[None]


def cells(table: Table) -> dict[tuple[Any, Any], dict[str, Any]]:
    """By format and way; then by scale, width or epsilon."""
    return {(row[0], row[1]): dict(zip(table.columns[2:], row[2:], strict=True)) for row in table.rows}


@pytest.fixture(scope="module")
def found() -> Answer:
    return study_normalisation(scales=(1e-4, 1.0, 10.0, 100.0, 1e4), widths=(64, 256, 4096))


@pytest.mark.parametrize("norm", NORMS)
def test_a_square_overflows_from_256_on_in_fp16(norm: str):
    """255.875^2 = 65,472.0 rounds to a number; 256^2 = 65,536 is infinite, its inverse root and the output zero."""
    spread, y = normalise(row_of(255.875, 8), norm, MEAN, 1e-5)
    assert spread.item() == 65472 and y.abs().min() == pytest.approx(1, abs=1e-3)
    spread, y = normalise(row_of(256.0, 8), norm, MEAN, 1e-5)
    assert spread.item() == math.inf and not y.any()
    _, y = normalise(row_of(256.0, 8), norm, UPCAST, 1e-5)
    assert (y.abs() == 1).all()


def test_the_sum_overflows_before_the_mean_does():
    """4096 squares of 16 are 1,048,576 in sum and 256 in the mean: PyTorch's mean divides before it rounds to fp16."""
    x = row_of(16.0, 4096)
    assert normalise(x, "RMSNorm", MEAN, 1e-5)[0].item() == 256
    assert normalise(x, "RMSNorm", SUM, 1e-5)[0].item() == math.inf
    assert normalise(x, "RMSNorm", IN_TURN, 1e-5)[0].item() == math.inf
    assert normalise(x.bfloat16(), "RMSNorm", SUM, 1e-5)[0].item() == 256


def test_added_in_turn_a_sum_of_ones_stops():
    """At 2^(bits of the significand): 256 in bf16, 2048 in fp16, where half a unit in the last place is 1."""
    for dtype, stop in ((torch.bfloat16, 256), (torch.float16, 2048)):
        for width in (stop // 2, stop, 4 * stop):
            spread, _ = normalise(row_of(1.0, width, dtype), "RMSNorm", IN_TURN, 1e-5)
            assert spread.item() == min(width, stop) / width


def test_small_squares_and_epsilon_vanish_in_fp16():
    """(1e-4)^2 is less than half of 2^-24, and so is 1e-8: zero by zero."""
    x = row_of(1e-4, 8)
    spread, y = normalise(x, "RMSNorm", MEAN, 1e-8)
    assert spread.item() == 0 and y.isinf().all()
    _, y = normalise(x, "RMSNorm", UPCAST, 1e-8)
    assert y.abs().double().mean().item() == pytest.approx(1e-4 / math.sqrt(2e-8), rel=1e-3)
    _, y = normalise(torch.zeros(1, 8, dtype=torch.float16), "RMSNorm", MEAN, 1e-8)
    assert y.isnan().all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["fp16", "bf16"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-3, 1e4), width=st.integers(2, 300))
def test_upcasting_leaves_the_rounding_of_the_output(norm: str, name: str, seed: int, scale: float, width: int):
    x = (torch.randn(2, width, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype_of(name))
    _, y = normalise(x, norm, UPCAST, 1e-5)
    exact = normalise(x.double(), norm, MEAN, 1e-5)[1]
    form = FORMATS[name]
    # Half a spacing of the format, with a little for fp32's own, which LayerNorm's difference makes larger.
    near = exact.abs() * form.epsilon * 0.51 + form.smallest_subnormal + 1e-5
    assert ((y.double() - exact).abs() <= near).all()


def test_the_reference_is_torch_in_float64_and_upcasting_is_the_model():
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3 + 1
    for norm, function in (("RMSNorm", F.rms_norm), ("LayerNorm", F.layer_norm)):
        assert torch.allclose(normalise(x, norm, MEAN, 1e-5)[1], function(x, (96,), eps=1e-5), rtol=1e-12, atol=0)
    module = RMSNorm(96)
    torch.nn.init.ones_(module.weight)
    assert torch.equal(normalise(x.half(), "RMSNorm", UPCAST, NORM_EPSILON)[1], module(x.half()))


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_limits_are_those_of_the_bits(name: str):
    """Found by trying; foretold by the format: x^2 is finite below largest + half a spacing."""
    form, dtype = FORMATS[name], dtype_of(name)
    last = last_number_where(lambda x: torch.isfinite(x * x), dtype, CPU)
    assert math.isfinite(form.round(last * last)) and not math.isfinite(form.round(next_number(last, dtype) ** 2))
    lost = last_number_where(lambda x: x * x == 0, dtype, CPU)
    assert form.round(lost * lost) == 0 and form.round(next_number(lost, dtype) ** 2) > 0


def test_outcomes():
    right = torch.tensor([[3.0, 4.0], [0.0, 5.0]], dtype=torch.float64)
    assert deviation(right, right).cell == 0.0
    assert deviation(right + torch.tensor([[0.0, 0.5], [0.0, 0.1]]), right).cell == 0.1  # of the worst row
    assert deviation(torch.tensor([[3.0, math.nan], [math.inf, 5]]), right).cell == "nan"
    assert deviation(torch.tensor([[3.0, -math.inf], [0.0, 5]]), right).cell == "inf"
    assert deviation(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), right).cell == "zero"
    assert deviation(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.float64)).cell == 0.0


def test_where_each_way_breaks(found: Answer):
    """At scale 100 squares overflow in fp16; at 10 the sum of 256 of them is about 25,600, which it holds."""
    for norm in NORMS:
        table = cells(found.table(f"{norm}: error of the output by the input's scale"))
        assert table["fp16", MEAN]["100"] == "zero" and table["fp16", MEAN]["10"] < 1e-3
        assert table["fp16", SUM]["10"] < 1e-3
        assert table["bf16", MEAN]["10000"] < 0.01 and table["fp32", MEAN]["10000"] < 1e-6
        for name in ("fp16", "bf16"):
            safe, built_in = table[name, UPCAST], table[name, "PyTorch's own"]
            assert max(safe.values()) <= FORMATS[name].epsilon / 2
            assert max(built_in.values()) <= FORMATS[name].epsilon / 2
    limits = {row[0]: row for row in found.table("Squares and epsilon in each format").rows}
    assert limits["fp16"][1:3] == (255.875, 256.0)
    assert limits["fp16"][5:] == ("subnormal", 2.0**-5) and limits["bf16"][5:] == ("normal", 2.0**-8)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("epsilon", [1e-5, 1e-3])
def test_epsilon_is_swallowed_from_where_the_table_says(name: str, epsilon: float):
    found = study_normalisation(scales=(1.0,), widths=(8, 16), epsilon=epsilon)
    limits = {row[0]: row for row in found.table("Squares and epsilon in each format").rows}
    start = torch.tensor(limits[name][6], dtype=dtype_of(name))
    small = torch.tensor(epsilon, dtype=dtype_of(name))
    for factor in (1.0, 1.25, 1.5, 1.75, 2.0, 64.0):
        assert start * factor + small == start * factor
    assert start / 2 + small > start / 2


def test_the_error_grows_with_the_width_only_where_sums_are_rounded(found: Answer):
    table = cells(found.table("RMSNorm: error of the mean of squares by the width"))
    for name in ("fp16", "bf16"):
        assert table[name, IN_TURN]["4096"] > 4 * table[name, IN_TURN]["64"]
        assert table[name, MEAN]["4096"] <= FORMATS[name].epsilon
        assert table[name, UPCAST]["4096"] < 1e-6
    assert table["bf16", IN_TURN]["4096"] > 0.25


def test_sentences_quote_the_tables(found: Answer):
    kinds = {finding.kind for finding in found.findings}
    verdicts = [finding.evidence for finding in found.findings if finding.kind == "layer-norm-verdict"]
    assert [(one["format"], one["range"], one["precision"]) for one in verdicts] == [("fp16", 1, 1), ("bf16", 0, 1)]
    assert kinds >= {"squares-overflow", "norm-overflows", "epsilon", "squares-vanish", "epsilon-vanishes", "width"}
    table = cells(found.table("RMSNorm: error of the mean of squares by the width"))
    for finding in found.findings:
        if finding.kind == "width" and "RMSNorm in bf16" in finding.sentence:
            assert float(f"{finding.evidence['in_turn_wide']:.3g}") == table["bf16", IN_TURN]["4096"]
            assert f"{finding.evidence['in_turn_wide']:.2g} at 4,096" in finding.sentence
    calm = study_normalisation(scales=(1.0,), widths=(8,))
    assert not {"norm-overflows", "epsilon-vanishes", "width"} & {finding.kind for finding in calm.findings}


def test_inputs_beyond_a_format_are_said_to_be():
    table = cells(study_normalisation(scales=(1e6, 1e-30), widths=(8, 16)).tables[1])
    assert table["fp16", UPCAST]["1e+06"] == "input overflows" and table["bf16", UPCAST]["1e+06"] < 0.004
    assert table["fp16", MEAN]["1e-30"] == 0.0, "nothing but zeros goes in, and comes out"
    beyond = study_normalisation(scales=(1e6,), widths=(8,)).findings
    assert not {"squares-vanish", "epsilon-vanishes"} & {finding.kind for finding in beyond}


@pytest.mark.slow
def test_the_verb(tmp_path: Path):
    plot, command = tmp_path / "norms.svg", ("normalisation", "--scales", "1,300", "--widths", "16,32")
    assert answered(*command, plot=plot).study == "normalisation"
    assert "width" in plot.read_text()


def test_an_epsilon_that_cannot_be():
    with pytest.raises(InputError, match="epsilon is nan: give a finite number above zero"):
        study_normalisation(epsilon=math.nan)
    with pytest.raises(InputError, match=r"epsilon is 1e\+06, and fp16 ends at 65504"):
        study_normalisation(epsilon=1e6)
