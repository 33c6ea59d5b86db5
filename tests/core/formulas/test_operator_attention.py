"""Fused attention: which keys its queries see by the record, against PyTorch's own schemas and by counting them."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.formulas import Work
from stepscope.core.formulas.operator_formulas import FusedAttention, OperatorCall, _in_band, read_call
from stepscope.core.formulas.operator_rules import OPERATOR_WORK_RULES, call_sight, call_work
from tests.operator_examples import operator_work

PLACES = [
    (name, rule.attention)
    for rule in OPERATOR_WORK_RULES
    for name in rule.operators
    if rule.attention is not None and name.startswith("aten::")
]
ARGUMENTS = {
    "query": {"query"}, "causal": {"is_causal"}, "mask_type": {"custom_mask_type"},
    "bias": {"attn_bias", "attn_mask", "bias"}, "window": {"window_size_left"}, "one_window": {"window_size"},
    "lengths": {"cum_seq_q", "cu_seqlens_q"}, "longest": {"max_q", "max_seqlen_q"},
    "elsewhere": {"seqused_k", "block_table", "seqlen_k"}, "out": {"out"}, "sums": {"logsumexp"},
}  # fmt: skip


@pytest.mark.parametrize(("name", "places"), PLACES, ids=[name for name, _ in PLACES])
def test_the_places_are_those_of_pytorchs_schema(name: str, places: FusedAttention):
    """A place that the schema does not have is of another release: arguments come in at the end."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if packet is None:
        pytest.skip("not in this release")
    schema = [argument.name for argument in packet.default._schema.arguments]
    for field, names in ARGUMENTS.items():
        found = getattr(places, field)
        given_places = (
            found[:1] if field in ("causal", "mask_type") else found if isinstance(found, tuple) else (found,)
        )
        for place in given_places:
            if place is not None and place < len(schema):
                assert schema[place] in names, (field, place, schema)
    assert places.mask_type or places.causal, "whether it is causal is an argument of each"
    assert ("attn_bias" in schema or "attn_mask" in schema or "bias" in schema) == (places.bias is not None)
    assert bool({"window_size_left", "window_size"} & set(schema)) == bool(places.window or places.one_window)


def test_another_overload_has_the_flag_elsewhere():
    """Of operands in 8 bits the scales stand before it."""
    schema = torch.ops.aten._scaled_dot_product_flash_attention.quantized._schema
    assert schema.arguments[7].name == "is_causal"
    assert torch.ops.aten._flash_attention_forward.quantized._schema.arguments[8].name == "is_causal"
    shapes = [[1, 2, 16, 8]] * 3 + [[1, 2]] * 3 + [[]] * 4
    dtypes = ["c10::Float8_e4m3fn"] * 3 + ["float"] * 3 + ["Scalar"] * 4
    record = json.dumps(shapes), json.dumps(dtypes), json.dumps([*[""] * 6, "0.", "False", "False", "0.3"])
    call = read_call("aten::_scaled_dot_product_flash_attention", *record)
    assert call is not None and call_sight(call) == "not causal"


def flash(values: list[str] | None, queries: int = 64, keys: int = 64) -> OperatorCall:
    """A call of PyTorch's flash attention, of two heads of width 8."""
    q, k = [1, queries, 2, 8], [1, keys, 2, 8]
    dtypes = ["c10::Half"] * 3 + ["", "", *["Scalar"] * 8, "", "", "", ""]
    record = [q, k, k, *[[]] * 14]
    texts = [""] * 5 + values if values is not None else None
    call = read_call(
        "aten::_flash_attention_forward", json.dumps(record), json.dumps(dtypes), json.dumps(texts) if texts else None
    )
    assert call is not None
    return call


def recorded(causal: str, left: str = "", right: str = "") -> list[str]:
    return ["64", "64", "0.", causal, "False", "0.35", left, right, "", "", "", ""]


def pairs(call: OperatorCall) -> float:
    """The pairs of a query and a key that count, of one head: four FLOPs each for two products of width 8."""
    work = call_work(call)
    assert work is not None
    return work.flops / (2 * 4 * 8)


def test_the_record_says_whether_attention_is_causal():
    assert pairs(flash(recorded("False"))) == 64 * 64
    assert pairs(flash(recorded("True"))) == 64 * 64 / 2
    assert call_sight(flash(recorded("False"))) == "not causal"
    assert call_sight(flash(recorded("True"))) == "causal"


@pytest.mark.parametrize("values", [None, recorded(""), recorded("Maybe"), recorded("1")])
def test_without_a_flag_a_square_is_taken_for_causal_and_said(values: list[str] | None):
    assert pairs(flash(values)) == 64 * 64 / 2 and call_sight(flash(values)) == "assumed causal"
    assert pairs(flash(values, queries=32)) == 32 * 64
    assert call_sight(flash(values, queries=32)) == "assumed not causal"


def test_the_last_query_of_flash_attention_sees_the_last_key():
    """Of 16 queries and 64 keys each sees the first 48, and half of the square after them. A single query sees all."""
    assert pairs(flash(recorded("True"), queries=16)) == 16 * 48 + 16 * 16 / 2
    assert pairs(flash(recorded("True"), queries=1)) == 64
    # The queries of a longer side than the keys' see none, but the last 64 of them.
    assert pairs(flash(recorded("True"), queries=96)) == 64 * 64 / 2


def test_the_first_query_of_other_attention_sees_the_first_key():
    def of(queries: int, keys: int) -> float:
        dtypes = json.dumps(["float"] * 3 + ["", *["Scalar"] * 3, ""])
        shapes = json.dumps([[1, 2, queries, 8], [1, 2, keys, 8], [1, 2, keys, 8], *[[]] * 5])
        values = json.dumps([*[""] * 4, "False", "0.", "True", ""])
        call = read_call("aten::_scaled_dot_product_efficient_attention", shapes, dtypes, values)
        assert call is not None
        return pairs(call)

    assert of(16, 64) == 16 * 16 / 2
    assert of(64, 16) == 16 * 16 / 2 + 48 * 16


def test_a_window_counts_the_keys_in_it():
    """Key j is seen by query i where i - left <= j <= i + right, each counted once."""
    for causal, left, right in (("True", 7, 0), ("False", 7, 3), ("False", 0, 0), ("True", 7, 5)):
        after = 0 if causal == "True" else right
        seen = sum(i - left <= j <= i + after for i in range(64) for j in range(64))
        assert pairs(flash(recorded(causal, str(left), str(right)))) == seen
    assert pairs(flash(recorded("True", "-1", "-1"))) == pairs(flash(recorded("True", "64", "0"))) == 64 * 64 / 2


@given(
    queries=st.integers(1, 12), keys=st.integers(1, 12), before=st.integers(0, 14),
    after=st.none() | st.integers(0, 14), offset=st.integers(-12, 12),
)  # fmt: skip
def test_a_band_is_counted_as_one_counts_it(queries: int, keys: int, before: int, after: int | None, offset: int):
    seen = sum(
        i + offset - before <= j and (after is None or j <= i + offset + after)
        for i in range(queries)
        for j in range(keys)
    )
    assert _in_band(queries, keys, before, after, offset) == seen


def packed(rows: int, bounds: int, longest: str) -> Work | None:
    """Attention of sequences in one row, of two heads of width 8."""
    shapes = [[rows, 2, 8]] * 3 + [[bounds]] * 2 + [[]] * 6
    dtypes = ["c10::Half"] * 3 + ["int"] * 2 + ["Scalar"] * 6
    values = [""] * 5 + [longest, longest, "0.", "True", "False", "0.3"]
    name = "aten::_flash_attention_forward"
    return operator_work(name, json.dumps(shapes), json.dumps(dtypes), values=json.dumps(values))


def test_packed_sequences_count_where_their_lengths_are_known():
    """Bounds are values of a tensor: as many sequences as the longest fills are all as long, and one is alone."""
    even, alone = packed(64, 5, "16"), packed(64, 2, "64")
    assert even and even.flops == 4 * 2 * 8 * 4 * 16 * 16 // 2
    assert alone and alone.flops == 4 * 2 * 8 * 64 * 64 // 2
    assert packed(64, 5, "17") is None and packed(64, 1, "64") is None and packed(64, 2, "60") is None


def test_keys_that_lie_elsewhere_leave_the_work_open():
    """The cache of a server is (blocks, rows of a block, heads, width): how many keys a query sees is a value."""
    call = flash(recorded("True"))
    paged = OperatorCall(call.operator, (*call.arguments[:15], call.arguments[0], None), call.values)
    assert call_work(paged) is None


def test_the_types_of_mask_of_the_memory_efficient_kernel():
    def of(mask: str, queries: int = 64) -> float:
        shapes = [[1, queries, 2, 8], [1, 64, 2, 8], [1, 64, 2, 8], *[[]] * 11]
        dtypes = ["float"] * 3 + ["", "", "", "", "", *["Scalar"] * 4, "", ""]
        values = [""] * 8 + ["0.", mask, "True", "0.3", "", ""]
        name = "aten::_efficient_attention_forward"
        call = read_call(name, json.dumps(shapes), json.dumps(dtypes), json.dumps(values))
        assert call is not None
        return pairs(call)

    assert of("0") == 64 * 64 and of("1") == of("2") == 64 * 64 / 2
    assert of("1", queries=16) == 16 * 16 / 2
    assert of("2", queries=16) == 16 * 48 + 16 * 16 / 2


# What PyTorch 2.1 and 2.4 had otherwise: fewer arguments, the mask's type and the flag at other places.
OLDER: dict[str, tuple[str, list[list[int]], list[str], list[str]]] = {
    "memory-efficient, 2.1": (
        "aten::_efficient_attention_forward", [[1, 64, 2, 8]] * 3 + [[]] * 10,
        ["float"] * 3 + ["", "", "", "", "Scalar", "Scalar", "Scalar", "", "", ""],
        [*[""] * 7, "0.", "{type}", "True", "", "", ""],
    ),
    "cuDNN, 2.4": (
        "aten::_scaled_dot_product_cudnn_attention", [[1, 2, 64, 8]] * 3 + [[]] * 4,
        ["c10::Half"] * 3 + ["Scalar"] * 3 + [""], ["", "", "", "0.", "{flag}", "False", "0.125"],
    ),
    "backward of cuDNN, 2.4": (
        "aten::_scaled_dot_product_cudnn_attention_backward", [[1, 2, 64, 8]] * 5 + [[1, 2, 64, 1], *[[]] * 9],
        ["c10::Half"] * 5 + ["float", "", "", *["Scalar"] * 4, "long int", "long int", ""],
        [*[""] * 8, "64", "64", "0.", "{flag}", "", "", "0.125"],
    ),
    "flash, 2.1": (
        "aten::_flash_attention_forward", [[1, 64, 2, 8]] * 3 + [[]] * 8,
        ["c10::Half"] * 3 + ["", "", *["Scalar"] * 5, ""], [*[""] * 5, "64", "64", "0.", "{flag}", "False", ""],
    ),
}  # fmt: skip


@pytest.mark.parametrize("release", OLDER)
@pytest.mark.parametrize("causal", [True, False])
def test_records_of_older_releases_say_it_at_other_places(release: str, causal: bool):
    name, shapes, dtypes, texts = OLDER[release]
    values = [text.format(flag=causal, type=int(causal)) for text in texts]
    call = read_call(name, json.dumps(shapes), json.dumps(dtypes), json.dumps(values))
    assert call is not None and call_sight(call) == ("causal" if causal else "not causal")
    products = 5 if "backward" in name else 2
    work = call_work(call)
    assert work is not None and work.flops == products * 2 * 2 * 64 * 64 * 8 // (2 if causal else 1)


@pytest.mark.parametrize(("text", "causal"), [("true", True), ("FALSE", False), (True, True), (False, False)])
def test_a_flag_may_be_written_as_json_has_it(text: object, causal: bool):
    values: list[object] = list(recorded(""))
    values[3] = text
    assert call_sight(flash(values)) == ("causal" if causal else "not causal")  # type: ignore[arg-type]
