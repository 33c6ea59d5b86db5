"""Formats from their bits: against torch.finfo, against PyTorch's own rounding of any number, and by hand."""

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from stepscope.core.answer import Answer, decode_answer, encode_answer
from stepscope.core.errors import InputError
from stepscope.core.float_formats import FORMATS, float_format
from stepscope.questions.formats import (
    CASTS,
    EIGHT_BITS,
    PRODUCTS,
    SATURATING,
    cast_convention,
    judge_products,
    main,
    study_formats,
)
from tests.command import Done, stepscope
from tests.questions.verbs import refused

pytestmark = pytest.mark.slow

DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp8-e5m2": torch.float8_e5m2, "fp8-e4m3": torch.float8_e4m3fn,
}  # fmt: skip
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sentence(found: Answer, kind: str) -> str:
    return next(finding.sentence for finding in found.findings if finding.kind == kind)


def formats(*arguments: object) -> Done:
    return stepscope("study", "formats", *arguments)


@pytest.mark.parametrize("name", DTYPES)
def test_properties_are_those_of_torch(name: str):
    ours, theirs = FORMATS[name], torch.finfo(DTYPES[name])
    assert ours.stored_bits == theirs.bits
    assert ours.largest == theirs.max
    assert ours.epsilon == theirs.eps
    assert ours.smallest_normal == theirs.smallest_normal
    # The number after zero is the pattern 0...01.
    first = torch.tensor(1, dtype=INTEGERS[theirs.bits // 8]).view(DTYPES[name])
    assert ours.smallest_subnormal == first.double().item()


def test_tf32_is_fp32_with_the_significand_of_fp16():
    tf32 = FORMATS["tf32"]
    assert (tf32.epsilon, tf32.largest_exponent) == (FORMATS["fp16"].epsilon, FORMATS["fp32"].largest_exponent)
    assert tf32.largest == (2 - 2.0**-10) * 2.0**127
    assert tf32.round(1 + 2.0**-11) == 1.0, "a tie goes to the even neighbour"
    assert tf32.round(1 + 3 * 2.0**-11) == 1 + 2.0**-9


def same(ours: float, theirs: float) -> bool:
    """NaN is NaN; zeros have signs."""
    if math.isnan(ours) or math.isnan(theirs):
        return math.isnan(ours) and math.isnan(theirs)
    return ours == theirs and math.copysign(1, ours) == math.copysign(1, theirs)


@given(st.floats())
@example(3.4028235677973366e38)  # half a spacing beyond the largest: the first that becomes infinite
@example(-(2.0**-150))  # half the smallest subnormal: a tie, to zero
def test_fp32_rounds_as_torch(value: float):
    assert same(FORMATS["fp32"].round(value), torch.tensor(value, dtype=torch.float64).to(torch.float32).item())


# Of 32 bits: PyTorch rounds a float64 to fp32 first, and rounding twice is not rounding once.
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@given(value=st.floats(width=32))
@example(value=65519.99609375)
@example(value=65520.0)
@example(value=-(2.0**-25))
@example(value=1 + 2.0**-8)
@example(value=1 + 2.0**-11)
def test_sixteen_bits_round_as_torch(name: str, value: float):
    assert same(FORMATS[name].round(value), torch.tensor(value, dtype=torch.float32).to(DTYPES[name]).float().item())


@pytest.mark.parametrize("name", list(EIGHT_BITS))
def test_every_number_of_bf16_is_cast_to_eight_bits_as_torch_casts_it(name: str):
    """In range and beyond it, infinity and NaN too, by the convention that this PyTorch is seen to use."""
    saturates = cast_convention(name, torch.device("cpu")) == SATURATING
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    theirs = numbers.to(getattr(torch, EIGHT_BITS[name])).double().tolist()
    wrong = [
        (number, became)
        for number, became in zip(numbers.double().tolist(), theirs, strict=True)
        if not same(FORMATS[name].round(number, saturates=saturates), became)
    ]
    assert not wrong


@pytest.mark.parametrize("name", list(EIGHT_BITS))
@given(value=st.floats(width=32))
@example(value=0.0009765625)  # half the smallest subnormal of e4m3
@example(value=447.9999694824219)
@example(value=464.0)  # half a spacing beyond the largest of e4m3: the last that becomes it
@example(value=464.0000305175781)
@example(value=61440.0)  # the first that is beyond e5m2
@example(value=61439.99609375)
@example(value=-math.inf)
def test_eight_bits_round_as_torch(name: str, value: float):
    saturates = cast_convention(name, torch.device("cpu")) == SATURATING
    theirs = torch.tensor(value, dtype=torch.float32).to(getattr(torch, EIGHT_BITS[name])).float().item()
    assert same(FORMATS[name].round(value, saturates=saturates), theirs)


BY_ML_DTYPES = {
    "fp8-e5m2": "float8_e5m2", "fp8-e4m3": "float8_e4m3fn", "fp8-e5m2fnuz": "float8_e5m2fnuz",
    "fp8-e4m3fnuz": "float8_e4m3fnuz", "fp6-e3m2": "float6_e3m2fn", "fp6-e2m3": "float6_e2m3fn",
    "fp4-e2m1": "float4_e2m1fn", "e8m0": "float8_e8m0fnu",
}  # fmt: skip


@pytest.mark.parametrize("name", [*EIGHT_BITS, "e8m0"])
def test_every_code_is_the_number_that_torch_has_for_it(name: str):
    dtype = getattr(torch, EIGHT_BITS.get(name, "float8_e8m0fnu"))
    theirs = torch.arange(256).to(torch.uint8).view(dtype).double().tolist()
    form = FORMATS[name]
    assert all(same(form.decode(code), number) for code, number in enumerate(theirs))
    assert all(form.encode(number) == code for code, number in enumerate(theirs) if not math.isnan(number))


def test_codes_by_the_tables_of_the_standards():
    """OCP MX 1.0, table 5 and section 5.3.4; OFP8 1.0, table 1."""
    half = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [FORMATS["fp4-e2m1"].decode(code) for code in range(16)] == [*half, *(-number for number in half)]
    e3m2, e2m3, integers = FORMATS["fp6-e3m2"], FORMATS["fp6-e2m3"], FORMATS["int8-mx"]
    assert [e3m2.decode(code) for code in (1, 3, 4, 31, 63)] == [0.0625, 0.1875, 0.25, 28, -28]
    assert [e2m3.decode(code) for code in (1, 7, 8, 31, 33)] == [0.125, 0.875, 1, 7.5, -0.125]
    assert [integers.decode(code) for code in (1, 64, 127, 128, 255)] == [1 / 64, 1, 127 / 64, -2, -1 / 64]
    assert integers.encode(-5) == 129, "-2 is left unused"
    assert [FORMATS["int4"].decode(code) for code in (0, 7, 8, 15)] == [0, 7, -8, -1]
    assert [FORMATS["fp8-e4m3"].encode(number) for number in (math.nan, 448, -448, 2.0**-9)] == [127, 126, 254, 1]
    assert [FORMATS["fp8-e5m2"].encode(number) for number in (-math.inf, 57344)] == [252, 123]
    assert [FORMATS["fp8-e5m2fnuz"].encode(number) for number in (math.nan, -0.0, math.inf)] == [128, 0, 128]
    assert [FORMATS["e8m0"].encode(number) for number in (1, 2.0**-127, 1e-40, math.inf)] == [127, 0, 0, 255]
    assert FORMATS["fp4-e2m1"].encode(math.nan) is None and FORMATS["fp4-e2m1"].encode(math.inf) == 7


@pytest.mark.parametrize("name", BY_ML_DTYPES)
def test_codes_and_roundings_are_those_of_ml_dtypes(name: str):
    """But for two: NaN is zero in its fp4 and fp6, and its e8m0 makes 2^-126 of fp32's numbers next above 2^-127."""
    ml_dtypes, numpy = pytest.importorskip("ml_dtypes"), pytest.importorskip("numpy")
    form, dtype = FORMATS[name], getattr(ml_dtypes, BY_ML_DTYPES[name])
    codes = numpy.arange(2**form.code_bits, dtype=numpy.uint8).view(dtype).astype(numpy.float64).tolist()
    assert all(same(form.decode(code), number) for code, number in enumerate(codes))
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    with numpy.errstate(all="ignore"):
        theirs = numbers.numpy().astype(dtype).astype(numpy.float64).tolist()
    for number, became in zip(numbers.double().tolist(), theirs, strict=True):
        if math.isnan(number) and form.top == "numbers":
            assert became == 0
        elif form.top != "scale" or not 2.0**-127 < number < 1.5 * 2.0**-127:
            assert same(form.round(number), became)


def test_infinity_and_nan_are_answered():
    found = study_formats(value="inf")
    rows = {row[0]: (row[1], row[5]) for row in found.table("What becomes of inf").rows}
    assert rows["fp16"] == (math.inf, "exact")
    assert rows["fp8-e4m3, saturating"] == (448, "cut off at the largest")
    assert rows["fp8-e4m3, not saturating"][1] == "becomes NaN" and rows["fp4-e2m1"] == (6, "cut off at the largest")
    assert sentence(found, "in-a-block") == "inf in a block of normal numbers makes NaN of all others."
    rows = {row[0]: (row[1], row[5]) for row in study_formats(value="nan").table("What becomes of nan").rows}
    assert rows["fp4-e2m1"] == (None, "no code for it") and rows["e8m0"][1] == "exact"


def test_a_number_beyond_fp32_makes_nan_of_its_block():
    """The largest of fp32 is 3.403e38: there is no share of others that vanish."""
    found = study_formats(value="3.5e38")
    assert sentence(found, "in-a-block") == (
        "3.5e38 in a block of normal numbers is infinite in fp32, and makes NaN of all others."
    )
    rows = found.table("A block of normal numbers with 3.5e38 in it").rows
    assert all(row[2] is None and row[3] is not None for row in rows)


def test_a_negative_zero_loses_its_sign_where_there_is_none():
    found = study_formats(value="-0")
    happened = {row[0]: row[5] for row in found.table("What becomes of -0").rows}
    assert happened["fp4-e2m1"] == "exact" and happened["e8m0"] == "no code for it"
    assert {name for name, what in happened.items() if what == "loses its sign"} == {
        "fp8-e5m2fnuz", "fp8-e4m3fnuz", "int8-mx", "int4",
    }  # fmt: skip
    assert "loses its sign in fp8-e5m2fnuz, fp8-e4m3fnuz, int8-mx, int4;" in sentence(found, "value")


def test_integers_are_all_as_far_apart():
    """MX 1.0 has 1/64 as the smallest normal number of its integers. From 1 to 2 there is no number in int4."""
    integers, four = FORMATS["int8-mx"], FORMATS["int4"]
    assert (integers.smallest_normal, integers.epsilon) == (1 / 64, 1 / 64)
    assert (four.smallest_normal, four.epsilon) == (1, 1)
    rows = {row[0]: row[5] for row in study_formats(value="0.3").table("What becomes of 0.3").rows}
    assert rows["int8-mx"] == "rounded" and rows["fp6-e2m3"] == "subnormal: fewer digits"


def test_an_outlier_takes_a_block_of_few_bits():
    """Beside 100 in mxfp4 the scale is 2^(6 - 2), half of its least number 4: of 32 normal numbers none is above it."""
    rows = {row[0]: row for row in study_formats().table("A block of normal numbers with 100 in it").rows}
    assert rows["mxfp4"][1:3] == (96, 100.0) and rows["mxfp8"][2] == 0
    assert float(str(rows["mxfp8"][4])) < 5 and rows["mxfp4"][4] == 100.0


def test_the_two_conventions_beyond_the_largest():
    """OFP8 1.0: infinity, or NaN where there is none; or the largest number, for infinity too."""
    e4m3, e5m2 = FORMATS["fp8-e4m3"], FORMATS["fp8-e5m2"]
    assert math.isnan(e4m3.round(-500)) and math.isnan(e4m3.round(math.inf))
    assert (e5m2.round(-1e6), e5m2.round(math.inf)) == (-math.inf, math.inf)
    assert [e4m3.round(x, saturates=True) for x in (464, 500, -1e30, -math.inf)] == [448, 448, -448, -448]
    assert [e5m2.round(x, saturates=True) for x in (61439, 61440, math.inf)] == [57344, 57344, 57344]
    assert math.isnan(e4m3.round(math.nan, saturates=True))


def test_the_study_names_both_conventions_and_the_one_that_this_torch_uses():
    found = study_formats(value="500", device="cpu")
    becomes = {row[0]: (row[1], row[5]) for row in found.table("What becomes of 500").rows}
    assert becomes["fp8-e4m3, not saturating"][1] == "overflows"
    assert becomes["fp8-e4m3, saturating"] == (448, "cut off at the largest")
    assert becomes["fp8-e5m2"] == (512, "rounded"), "where the conventions agree, one row"
    theirs = torch.tensor(500.0).to(torch.float8_e4m3fn).item()
    rows = {row[0]: row[1:] for row in found.table(CASTS).rows}
    assert rows["fp8-e4m3"][0] == ("not saturating" if math.isnan(theirs) else "saturating")
    made = rows["fp8-e4m3"][1]
    assert isinstance(made, float) and same(made, theirs) and rows["fp8-e5m2"][1] == 512
    said = sentence(found, "cast-convention")
    assert f"PyTorch {torch.__version__} to fp8-e5m2" in said
    assert ("to fp8-e4m3 does not saturate (beyond 448, nan)" in said) == math.isnan(theirs)
    assert ("to fp8-e4m3 saturates (beyond 448, 448)" in said) == (theirs == 448)
    assert sentence(found, "no-product-in-blocks") == (
        "Simulated alone, here: fp8-tensor, fp8-row (it takes a GPU of compute capability 8.9 or later); fp8-block (it "
        "takes a GPU of compute capability 9.0); mxfp8, nvfp4 (it takes a GPU of compute capability 10.0 or later)."
    )


def test_products_in_blocks_are_judged_against_the_exact_one():
    """On a CPU the library is the simulation itself: all bits are equal, and what is off is rounding to bf16."""
    rows = [*judge_products("fp8-tensor", torch.device("cpu"), 128)]
    assert [(row.outliers, row.fast) for row in rows] == [(False, False), (False, True), (True, False), (True, True)]
    for row in rows:
        assert row.operands_equal and row.equal == row.within_one == 1
        assert row.library_off == row.simulation_off and 2.0**-10 < row.library_off < 2.0**-8 < row.lost < 2.0**-4


def test_what_the_library_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("stepscope.questions.formats.SIZE", 130)
    with pytest.raises(InputError, match=r"^PyTorch \S+ refuses the product in nvfp4: \S"):
        main("nvfp4", "cpu")


@pytest.mark.gpu
def test_products_of_the_gpu_are_the_simulations():
    found = study_formats(device="cuda")
    table = found.table(PRODUCTS)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert {row["format"] for row in rows} >= {"fp8-tensor", "fp8-row"}
    for row in rows:
        assert row["operands as simulated"] == "yes"
        off, simulated = float(str(row["off by, %"])), float(str(row["simulation off by, %"]))
        assert off < 2 * simulated or row["sums"] == "in fewer bits"


@pytest.mark.parametrize("name", list(FORMATS))
@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_rounding_is_to_the_nearest_and_keeps_what_the_format_holds(name: str, value: float):
    form = FORMATS[name]
    rounded = form.round(value)
    if (
        math.isfinite(rounded)
        and not form.smallest_subnormal <= abs(value) <= form.largest
        and form.top != "infinities"
    ):
        assert abs(rounded) in (0, form.smallest_subnormal, form.largest), "cut off, or next to zero"
    elif math.isfinite(rounded):
        assert abs(rounded - value) <= form.spacing(value) / 2
        assert form.round(rounded) == rounded
    else:
        assert abs(value) > form.largest or (form.top == "scale" and value <= 0)


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_integer_up_to_the_largest_and_not_the_next(name: str):
    form = FORMATS[name]
    last = form.largest_integer
    for whole in (1, min(3, last), last // 2 + 1, last - 1 or 1, last):
        assert form.round(float(whole)) == whole
    # 2^53 + 1 is no float at all: Python holds no such number to ask about.
    assert name == "fp64" or form.round(float(last + 1)) != last + 1


def test_by_hand():
    fp16, e4m3 = FORMATS["fp16"], FORMATS["fp8-e4m3"]
    assert (fp16.largest, fp16.smallest_normal, fp16.smallest_subnormal) == (65504, 2.0**-14, 2.0**-24)
    assert (e4m3.largest, e4m3.smallest_normal, e4m3.smallest_subnormal) == (448, 2.0**-6, 2.0**-9)
    assert fp16.exp_overflows_above == pytest.approx(11.0899, abs=1e-4)
    assert fp16.spacing(4.0) == 2.0**-8 and fp16.spacing(3.999) == 2.0**-9 and fp16.spacing(0.0) == 2.0**-24
    with pytest.raises(InputError, match="unknown format 'fp12': choose one of fp64, fp32"):
        float_format("fp12")


def test_what_becomes_of_a_small_number():
    """1e-7 is between zero and fp16's first two numbers, 2^-24 and 2^-23."""
    found = study_formats(value="1e-7")
    table = found.table("What becomes of 1e-7")
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows["fp16"]["becomes"] == 2.0**-23 and rows["fp16"]["what happened"] == "subnormal: fewer digits"
    assert rows["bf16"]["becomes"] == torch.tensor(1e-7).bfloat16().item()
    assert rows["fp64"]["what happened"] == "rounded"
    assert rows["fp8-e4m3"]["becomes"] == 0 and rows["fp8-e4m3"]["what happened"] == "vanishes"
    assert rows["e8m0"]["becomes"] == 2.0**-23
    assert sentence(found, "value") == (
        "1e-7 vanishes in fp8-e5m2, fp8-e4m3, fp8-e5m2fnuz, fp8-e4m3fnuz, fp6-e3m2, fp6-e2m3, fp4-e2m1, int8-mx, int4; "
        "is exact in none."
    )


def test_a_tenth_is_exact_in_no_format_and_a_half_in_all():
    """fp64 has 0.1 as 3602879701896397 / 2^55."""
    tenth = study_formats(value="0.1")
    fp64 = tenth.table("What becomes of 0.1").rows[0]
    assert fp64[1] == 0.1 and fp64[5] == "rounded"
    assert fp64[2] == float(Fraction(3602879701896397, 2**55) - Fraction(1, 10))
    assert sentence(tenth, "value").endswith("is exact in none.")
    half = {row[0]: row[5] for row in study_formats(value="0.5").table("What becomes of 0.5").rows}
    assert {name for name, happened in half.items() if happened != "exact"} == {"int4"}, "a tie, to zero"
    for negative in ("-0.5", "-0.0"):
        rows = study_formats(value=negative).table(f"What becomes of {negative}").rows
        assert {row[0]: row[5] for row in rows}["e8m0"] == "no code for it"


def test_json_is_one_document_without_nan_and_reads_back():
    """1e6 is NaN in e4m3, infinite in fp16: words in JSON, which has neither."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    found = study_formats(value="1e6")
    text = encode_answer(found)
    tables = json.loads(text, parse_constant=refuse)["tables"]
    rows = {row[0]: row for row in next(each for each in tables if each["title"].startswith("What becomes"))["rows"]}
    assert rows["fp16"][1] == "inf" and rows["fp8-e4m3, not saturating"][1] == "nan"
    assert encode_answer(decode_answer(text.encode(), "here")) == text


def test_the_verb_writes_json_and_reads_it_again(tmp_path: Path):
    written = formats("--value", "1e-7", "--json")
    assert (written.returncode, written.stderr) == (0, "")
    kept = tmp_path / "formats.json"
    kept.write_text(written.stdout)
    assert formats("--from", str(kept), "--json").stdout == written.stdout
    assert formats("--from", str(kept)).stdout == formats("--value", "1e-7").stdout


def test_bad_input_is_one_line(tmp_path: Path):
    (tmp_path / "other.json").write_text(encode_answer(study_formats()).replace('"formats"', '"softmax"'))
    (tmp_path / "broken.json").write_text("{")
    uneven = {"title": "Formats", "columns": ["a", "b"], "rows": [[1]]}
    one = json.loads(encode_answer(study_formats()))
    (tmp_path / "uneven.json").write_text(json.dumps({**one, "tables": [uneven]}))
    (tmp_path / "later.json").write_text(encode_answer(study_formats()).replace('"version": 1', '"version": 99'))
    for name, word in {
        "none": "cannot read", "broken": "holds no answer of `stepscope study --json`",
        "other": "is of the study softmax", "uneven": "is damaged: the table 'Formats' has a row",
        "later": "is of version 99",
    }.items():  # fmt: skip
        assert word in refused("formats", "--from", tmp_path / f"{name}.json")
    assert "No such option: --save" in refused("formats", "--save", tmp_path / "plot.svg"), "it has no curves"
    assert "end its name in one of" in refused("softmax", "--save", tmp_path / "plot.txt")
    assert "--value has 5,002 characters" in refused("formats", "--value", "0." + "1" * 5000)


def test_a_number_with_space_around_it_is_that_number():
    found = study_formats(value=" 1e-7\n")
    assert found.question == "What does each format make of 1e-7?" and found.table("What becomes of 1e-7").rows


def test_an_error_below_every_number_of_fp64_is_said_as_it_is():
    """5e-324 is stored as 2 ** -1074, 4.9407e-324: 5.93e-326 less, which no number of fp64 is."""
    rows = {row[0]: row for row in study_formats(value="5e-324").table("What becomes of 5e-324").rows}
    assert rows["fp64"][2] == "-5.934e-326"
    assert rows["bf16"][2] == -5e-324
    assert study_formats(value="1").table("What becomes of 1").rows[0][2] == 0.0
