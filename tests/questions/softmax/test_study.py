"""Softmax and attention in few bits: by hand where they break, against float64 and the model's attention elsewhere."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.core.answer import Answer
from stepscope.core.errors import InputError
from stepscope.core.float_formats import FORMATS
from stepscope.questions.answers import FEW_BITS, dtype_of
from stepscope.questions.softmax import (
    AFTER,
    BEFORE,
    NAIVE,
    NOT_DIVIDED,
    ONLINE,
    SAFE,
    attention_scores,
    naive_softmax,
    online_softmax,
    safe_softmax,
    study_softmax,
)
from stepscope.training.attention.written_out import reference
from tests.questions.verbs import answered


@pytest.fixture(scope="module")
def found() -> Answer:
    return study_softmax(scales=(0.5, 1.0, 3.0, 4.0, 32.0, 64.0, 128.0), row=(10, 11.5, 89))


def cells(found: Answer, title: str, names: int) -> dict[tuple[Any, ...], dict[str, Any]]:
    table = found.table(title)
    return {row[:names]: dict(zip(table.columns[names:], row[names:], strict=True)) for row in table.rows}


def test_fp16_by_hand():
    """exp(11) = 59,874 is a number of fp16 (rounded), exp(12) = 162,755 is not: infinity by infinity."""
    near, far = torch.tensor([[11.0, 0.0]]).half(), torch.tensor([[12.0, 0.0]]).half()
    assert naive_softmax(near).isfinite().all()
    assert naive_softmax(far)[0, 0].isnan() and naive_softmax(far)[0, 1] == 0
    for softmax in (safe_softmax, online_softmax):
        assert softmax(far)[0].tolist() == [1.0, FORMATS["fp16"].round(math.exp(-12))]


def test_the_sum_overflows_without_a_nan():
    """Two of exp(11) are 119,748: each exponential is finite, the sum is not, and everything becomes zero."""
    x = torch.tensor([[11.0, 11.0]]).half()
    assert naive_softmax(x).tolist() == [[0.0, 0.0]]
    assert safe_softmax(x).tolist() == [[0.5, 0.5]]


def test_far_below_zero_the_naive_softmax_divides_zero_by_zero():
    x = torch.tensor([[-20.0, -20.0]]).half()
    assert naive_softmax(x).isnan().all()
    assert safe_softmax(x).tolist() == online_softmax(x).tolist() == [[0.5, 0.5]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=40),
    st.integers(1, 45),
    st.floats(-1e3, 1e3),
)
def test_online_is_safe_in_float64_for_any_block_and_shift(row: list[float], block: int, shift: float):
    x = torch.tensor([row], dtype=torch.float64)
    right = torch.softmax(x, dim=-1)
    assert torch.allclose(safe_softmax(x), right, rtol=1e-12, atol=1e-300)
    assert torch.allclose(online_softmax(x, block), right, rtol=1e-12, atol=1e-300)
    # A shift rounds the row once more: to 1.1e4 x 2^-53 absolute, hence relative in exp.
    assert torch.allclose(online_softmax(x + shift, block), right, rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
@settings(max_examples=30, deadline=None)
@given(
    row=st.lists(st.floats(-3e4, 3e4, width=16), min_size=1, max_size=64),
    block=st.integers(1, 64),
)
def test_safe_and_online_are_finite_whatever_the_row(name: str, row: list[float], block: int):
    """And their sums are 1 to what rounding each of the terms, the sum, and each quotient leaves."""
    x = torch.tensor([row]).to(dtype_of(name))
    for probabilities in (safe_softmax(x), online_softmax(x, block)):
        assert probabilities.isfinite().all()
        steps = 3 + math.ceil(len(row) / block)
        assert abs(probabilities.double().sum().item() - 1) <= 3 * steps * FORMATS[name].epsilon


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_thresholds_are_the_logarithm_of_the_largest_number(found: Answer, name: str):
    """Found by trying exp; ln(65504) = 11.0899 lies between two neighbours of fp16."""
    logarithm, finite, infinite, vanishes = cells(found, "exp in each format", 1)[name,].values()
    form = FORMATS[name]
    assert logarithm == math.log(form.largest)
    assert infinite - finite == pytest.approx(form.spacing(finite))
    # exp of up to half a spacing beyond the largest still rounds to it; exp is exact to a few units of fp32.
    assert finite <= logarithm * (1 + 1e-6) + form.epsilon / 2 and infinite >= logarithm * (1 - 1e-6)
    # Halfway to the smallest subnormal; a library may flush subnormal results, whose range then ends earlier.
    assert math.log(form.smallest_subnormal / 2) - form.spacing(vanishes) <= vanishes <= math.log(form.smallest_normal)
    if name == "fp16":
        assert (finite, infinite) == (11.0859375, 11.09375)


def test_where_each_softmax_breaks(found: Answer):
    """At a width of 1,024 and scale 3 the sum overflows in fp16, and not one exponential; at 4 they do."""
    table = cells(found, "Softmax: error by the input's scale", 2)
    fp16 = table["fp16", NAIVE]
    assert fp16["1"] < 1e-3 and fp16["3"] == "zero" and fp16["4"] == "nan"
    for name in ("fp32", "bf16"):
        assert table[name, NAIVE]["4"] < 0.01 and table[name, NAIVE]["32"] == "nan"
    for name in ("fp32", "fp16", "bf16"):
        assert max(table[name, SAFE].values()) <= 3 * FORMATS[name].epsilon
        assert max(table[name, ONLINE].values()) <= 16 * FORMATS[name].epsilon  # of 16 blocks
        # Its vectors add up a row of 1,024 in 4 to 16 lanes, as wide as the CPU has them: up to 256 additions one after
        # another, each off by half an epsilon. As errors of either sign they make 8 epsilons; twice that is allowed.
        assert max(table[name, "PyTorch's own"].values()) <= 16 * FORMATS[name].epsilon


def test_scores_and_attention_are_the_models():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 16, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    for division, scale in ((NOT_DIVIDED, 1.0), (AFTER, None), (BEFORE, None)):
        ours = safe_softmax(attention_scores(q, k, division)) @ v
        assert torch.allclose(ours, reference(q, k, v, causal=False, scale=scale), rtol=1e-10)


def test_scores_overflow_before_the_division_by_hand():
    """64 products of 32 x 32 are 65,536: infinite in fp16 if divided after, 8,192 if q was divided by 8 before."""
    q = torch.full((1, 1, 64), 32.0).half()
    assert attention_scores(q, q, NOT_DIVIDED).item() == attention_scores(q, q, AFTER).item() == math.inf
    assert attention_scores(q, q, BEFORE).item() == 8192
    assert safe_softmax(attention_scores(q, q, AFTER)).isnan().all()


def test_attention_as_inputs_grow(found: Answer):
    scores = cells(found, "Attention: largest score, in float64, by the scale of q and k", 2)
    for head_dim in (64, 128):
        plain, divided = scores[head_dim, NOT_DIVIDED], scores[head_dim, AFTER]
        assert plain["4"] == pytest.approx(16 * plain["1"], rel=1e-3), "scores grow with the square"
        assert plain["1"] / divided["1"] == pytest.approx(math.sqrt(head_dim), rel=1e-3)
        # Normal deviates: some 3 to 6 standard deviations among 32,768 scores.
        assert 3 * math.sqrt(head_dim) < plain["1"] < 8 * math.sqrt(head_dim)
    errors = cells(found, "Attention: error of the output by the scale of q and k", 4)
    for head_dim in (64, 128):
        fp16 = {names[2:]: row for names, row in errors.items() if names[:2] == (head_dim, "fp16")}
        assert fp16[NOT_DIVIDED, NAIVE]["1"] == "nan" and fp16[AFTER, NAIVE]["1"] < 0.01
        assert fp16[AFTER, NAIVE]["4"] == "nan" and fp16[AFTER, SAFE]["4"] < 0.1
        assert fp16[AFTER, SAFE]["64"] == "nan", "q k overflows before it is divided"
        assert isinstance(fp16[BEFORE, SAFE]["64"], float)
        assert fp16[BEFORE, SAFE]["128"] == "nan"
        for name in ("fp16", "bf16", "fp32"):
            rows = {names[2:]: row for names, row in errors.items() if names[:2] == (head_dim, name)}
            assert rows[AFTER, SAFE]["1"] < rows[NOT_DIVIDED, SAFE]["1"]


def test_sentences_quote_the_run(found: Answer):
    sentences = [finding.sentence for finding in found.findings]
    assert any("still below 11.09; only the sum of the exponentials overflows" in text for text in sentences)
    breaks = [f for f in found.findings if f.kind == "attention-breaks" and "fp16 with head_dim 64" in f.sentence]
    assert breaks[0].evidence[f"{AFTER}, {SAFE}"] == 64.0 and breaks[0].evidence[f"{BEFORE}, {SAFE}"] == 128.0
    errors = cells(found, "Attention: error of the output by the scale of q and k", 4)
    for finding in found.findings:
        if finding.kind == "attention-division" and "bf16 with head_dim 64" in finding.sentence:
            assert finding.evidence["scale"] == 1.0
            assert float(f"{finding.evidence['error']:.3g}") == errors[64, "bf16", NOT_DIVIDED, SAFE]["1"]
    beyond = study_softmax(scales=(1e6,), head_dims=(4,))
    assert not any("fp16" in f.sentence for f in beyond.findings if f.kind == "attention-breaks"), "no input of it is"
    calm = study_softmax(scales=(0.5,), head_dims=(4,))
    assert not {"naive-softmax", "attention-breaks"} & {finding.kind for finding in calm.findings}


def test_a_row_of_ones_own(found: Answer):
    rows = {row[:2]: row[2:] for row in found.table("Softmax of 10, 11.5, 89").rows}
    assert all(rows[name, NAIVE][2] == "nan" for name in FEW_BITS)
    assert all(rows[name, way][:2] == (1.0, 1.0) for name in FEW_BITS for way in (SAFE, ONLINE))
    large = study_softmax(scales=(1.0,), head_dims=(4,), row=(1e5, 1.0))
    rows = {row[:2]: row[4] for row in large.table("Softmax of 100000, 1").rows}
    assert rows["fp16", SAFE] == "input overflows" and rows["bf16", SAFE] == 0.0


def test_the_verb(tmp_path: Path):
    plot = tmp_path / "softmax.svg"
    assert answered("softmax", "--scales", "1,4", plot=plot).study == "softmax"
    assert "head_dim 128" in plot.read_text()


def test_a_row_that_cannot_be():
    for row in ((), (1.0, math.inf)):
        with pytest.raises(InputError, match="the row is empty or not finite"):
            study_softmax(row=row)
