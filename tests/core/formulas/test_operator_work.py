"""FLOPs and bytes of an operator call: each rule's example worked out by hand, and what is not guessed."""

import json

import pytest

from stepscope.core.formulas import Convention, Work
from stepscope.core.formulas.operator_formulas import Operand, promoted
from stepscope.core.formulas.operator_rules import (
    OPERATOR_WORK_RULES,
    RULE_OF,
    OperatorRule,
    is_product,
)
from tests.operator_examples import operator_work, recorded

SQUARE = 2 * 12 * 512 * 512
"""Scores of the attention examples: batch 2, 12 heads, 512 queries and keys, head_dim 64."""
ROWS = 2 * 12 * 512 * 64
"""Elements of each of their q, k, v."""

BY_HAND: dict[str, tuple[int, int, int]] = {
    # operator: FLOPs, bytes read, bytes written; lists of tensors have elements of four bytes
    "bmm": (2 * 48 * 512 * 512 * 64, 2 * 48 * 512 * 64 * 4, 48 * 512 * 512 * 4),
    "addmm": (2 * 2048 * 3072 * 768, (2048 * 768 + 768 * 3072 + 3072) * 2, 2048 * 3072 * 2),
    "_scaled_mm": (2 * 32 * 16 * 64, 32 * 64 + 64 * 16 + 4 + 4, 32 * 16),
    "addbmm": (2 * 4 * 16 * 8 * 32, (4 * 16 * 32 + 4 * 32 * 8 + 16 * 8) * 4, 16 * 8 * 4),
    "addr": (2 * 16 * 8, (16 * 8 + 16 + 8) * 4, 16 * 8 * 4),
    "_int_mm": (2 * 32 * 16 * 64, 32 * 64 + 64 * 16, 32 * 16 * 4),
    # 512 rows, divided among 8 experts of 64 x 96.
    "_grouped_mm": (2 * 512 * 64 * 96, (512 * 64 + 8 * 64 * 96) * 2 + 8 * 4, 512 * 96 * 2),
    "_foreach_mm": (2 * (8 * 4 * 16 + 2 * 3 * 5), (32 + 6 + 64 + 15) * 4, (8 * 16 + 2 * 5) * 4),
    "linear": (2 * 64 * 32 * 8, (64 * 32 + 8 * 32 + 8) * 4, 64 * 8 * 4),
    "mkl::_mkl_linear": (2 * 64 * 32 * 8, (64 * 32 + 8 * 32 + 8) * 4, 64 * 8 * 4),
    "_weight_int8pack_mm": (2 * 16 * 64 * 32, 16 * 64 * 2 + 32 * 64 + 32 * 2, 16 * 32 * 2),
    # 4 * 8 * 32 * 4 numbers of 32 bits hold eight weights each: 32 rows of 1,024.
    "_weight_int4pack_mm": (2 * 16 * 1024 * 32, 16 * 1024 * 2 + 32 * 1024 // 2 + 8 * 32 * 2 * 2, 16 * 32 * 2),
    "mkldnn_linear_backward_input": (2 * 64 * 8 * 32, (64 * 8 + 8 * 32) * 4, 64 * 32 * 4),
    "mkldnn_linear_backward_weights": (2 * 64 * 8 * 32, (64 * 8 + 64 * 32) * 4, 8 * 32 * 4),
    # A weight of 32 x 64 of which half is kept.
    "_sparse_semi_structured_linear": (2 * 16 * 32 * 32, (16 * 64 + 32 * 32 + 32 * 4) * 2, 32 * 16 * 2),
    "_sparse_semi_structured_mm": (2 * 32 * 32 * 16, (32 * 32 + 32 * 4 + 64 * 16) * 2, 32 * 16 * 2),
    "_sparse_semi_structured_addmm": (2 * 32 * 32 * 16, (32 + 32 * 32 + 32 * 4 + 64 * 16) * 2, 32 * 16 * 2),
    # 2 sequences of 6 rows of width 8: the joint projection, two products of attention, and the output's.
    "_native_multi_head_attention":
        (2 * 12 * 24 * 8 + 2 * 2 * 2 * 6 * 6 * 8 + 2 * 12 * 8 * 8, (2 * 96 + 192 + 64) * 4, 96 * 4),
    # And two layers, 16 wide between them.
    "_transformer_encoder_layer_fwd":
        (2 * 12 * 24 * 8 + 2 * 2 * 2 * 6 * 6 * 8 + 2 * 12 * 8 * 8 + 2 * 2 * 12 * 8 * 16,
         (96 + 192 + 64 + 2 * 128) * 4, 96 * 4),
    # Two products of 2 * 64 FLOPs a score; half of the square. With a bias of one number a score, all of it.
    "_scaled_dot_product_flash_attention": (SQUARE * 2 * 2 * 64 // 2, 3 * ROWS * 2, ROWS * 2),
    "_scaled_dot_product_efficient_attention": (SQUARE * 2 * 2 * 64, 3 * ROWS * 4 + SQUARE * 4, ROWS * 4),
    "_scaled_dot_product_flash_attention_for_cpu": (SQUARE * 2 * 2 * 64 // 2, 3 * ROWS * 4, ROWS * 4),
    "_flash_attention_forward": (SQUARE * 2 * 2 * 64 // 2, 3 * ROWS * 2, ROWS * 2),
    "_efficient_attention_forward": (SQUARE * 2 * 2 * 64 // 2, 3 * ROWS * 4, ROWS * 4),
    "_scaled_dot_product_cudnn_attention": (SQUARE * 2 * 2 * 64 // 2, 3 * ROWS * 2, ROWS * 2),
    "_cudnn_attention_forward": (SQUARE * 2 * 2 * 64 // 2, 3 * ROWS * 2, ROWS * 2),
    # Recorded as not causal: the whole square.
    "scaled_dot_product_attention": (SQUARE * 2 * 2 * 64, 3 * ROWS * 2, ROWS * 2),
    "_scaled_dot_product_fused_attention_overrideable": (SQUARE * 2 * 2 * 64 // 2, 3 * ROWS * 2, ROWS * 2),
    "_flash_attention_forward_no_dropout_inplace": (SQUARE * 2 * 2 * 64, 3 * ROWS * 2, ROWS * 2),
    "flash_attn::_flash_attn_forward": (SQUARE * 2 * 2 * 64 // 2, 3 * ROWS * 2, ROWS * 2),
    # Two sequences of 512 in one row of 1,024.
    "flash_attn::_flash_attn_varlen_forward": (SQUARE * 2 * 2 * 64 // 2, 3 * ROWS * 2, ROWS * 2),
    "flash_attn_3::fwd": (SQUARE * 2 * 2 * 64, 3 * ROWS * 2, ROWS * 2),
    # Five products; do, q, k, v, o and a log-sum-exp a row read, dq, dk, dv written.
    "stepscope::flash_attention_forward": (SQUARE * 2 * 2 * 64 // 2, 3 * ROWS * 2, ROWS * 2),
    "stepscope::flash_attention_backward":
        (SQUARE * 5 * 2 * 64 // 2, 5 * ROWS * 2 + ROWS // 64 * 4, 3 * ROWS * 2),
    "_scaled_dot_product_flash_attention_backward":
        (SQUARE * 5 * 2 * 64 // 2, 5 * ROWS * 2 + ROWS // 64 * 4, 3 * ROWS * 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward":
        (SQUARE * 5 * 2 * 64 // 2, 5 * ROWS * 4 + ROWS // 64 * 4, 3 * ROWS * 4),
    "_scaled_dot_product_fused_attention_overrideable_backward":
        (SQUARE * 5 * 2 * 64, 5 * ROWS * 2 + ROWS // 64 * 4, 3 * ROWS * 2),
    "flash_attn::_flash_attn_backward":
        (SQUARE * 5 * 2 * 64 // 2, 5 * ROWS * 2 + ROWS // 64 * 4, 3 * ROWS * 2),
    "flash_attn::_flash_attn_varlen_backward": (SQUARE * 5 * 2 * 64, 5 * ROWS * 2 + ROWS // 64 * 4, 3 * ROWS * 2),
    "flash_attn_3::bwd": (SQUARE * 5 * 2 * 64 // 2, 5 * ROWS * 2 + ROWS // 64 * 4, 3 * ROWS * 2),
    "_flash_attention_backward": (SQUARE * 5 * 2 * 64 // 2, 5 * ROWS * 2 + ROWS // 64 * 4, 3 * ROWS * 2),
    "_scaled_dot_product_efficient_attention_backward":
        (SQUARE * 5 * 2 * 64 // 2, 5 * ROWS * 4 + ROWS // 64 * 4, 3 * ROWS * 4),
    "_efficient_attention_backward": (SQUARE * 5 * 2 * 64 // 2, 5 * ROWS * 4 + ROWS // 64 * 4, 3 * ROWS * 4),
    "_scaled_dot_product_cudnn_attention_backward":
        (SQUARE * 5 * 2 * 64 // 2, 5 * ROWS * 2 + ROWS // 64 * 4, 3 * ROWS * 2),
    "_softmax": (5 * 4 * 12 * 512 * 512, 4 * 12 * 512 * 512 * 4, 4 * 12 * 512 * 512 * 4),
    "_softmax_backward_data": (4 * 128, 2 * 128 * 4, 128 * 4),
    "native_layer_norm": (7 * 2048 * 768, (2048 * 768 + 2 * 768) * 4, 2048 * 768 * 4),
    "native_layer_norm_backward": (13 * 80, (80 + 80 + 10 + 10 + 8) * 4, (80 + 8 + 8) * 4),
    "_fused_rms_norm": (4 * 80, (80 + 8) * 4, 80 * 4),
    "_fused_rms_norm_backward": (9 * 80, (80 + 80 + 10 + 8) * 4, (80 + 8) * 4),
    "exp": (2048 * 10000, 2048 * 10000 * 4, 2048 * 10000 * 4),
    "mul": (2048 * 768, (2048 * 768 + 2048) * 4, 2048 * 768 * 4),
    "div": (128, 128 * 2, 128 * 2),
    "addcmul_": (2 * 768, 3 * 768 * 4, 768 * 4),
    "lerp_": (3 * 768, 2 * 768 * 4, 768 * 4),
    "sigmoid": (4 * 32, 32 * 4, 32 * 4),
    "silu": (5 * 32, 32 * 2, 32 * 2),
    "sigmoid_backward": (3 * 32, 2 * 32 * 4, 32 * 4),
    "silu_backward": (9 * 32, 2 * 32 * 4, 32 * 4),
    "gelu_backward": (11 * 32, 2 * 32 * 4, 32 * 4),
    "masked_fill_": (0, 4 * 12 * 64 * 4 + 64, 4 * 12 * 64 * 4),
    "tril": (0, 512 * 512, 512 * 512),
    "where": (0, 64 + 512 * 4, 512 * 4),
    "ge": (0, 2 * 512 * 8, 512 * 512),
    "isnan": (0, 512 * 4, 512),
    "copy_": (0, 128 * 4, 128 * 2),
    "fill_": (0, 0, 768 * 3072 * 4),
    "native_dropout": (2 * 128, 128 * 4, 128 * 5),
    "native_dropout_backward": (2 * 128, 128 * 5, 128 * 4),
    "sum": (4 * 12 * 512 * 512, 4 * 12 * 512 * 512 * 4, 0),
    "var": (4 * 128, 128 * 4, 0),
    "linalg_vector_norm": (2 * 128, 128 * 4, 0),
    "embedding": (0, 16 * 8 + 16 * 8 * 4, 16 * 8 * 4),
    "index_select": (0, 2048 * 8 + 2048 * 768 * 4, 2048 * 768 * 4),
    "embedding_dense_backward": (128, 128 * 4 + 16 * 8, 128 * 4),
    "gather": (0, 2048 * (8 + 4), 2048 * 4),
    "scatter_": (0, 2048 * 8, 2048 * 4),
    "scatter_add_": (2048, 2048 * (8 + 4 + 4), 2048 * 4),
    "nll_loss_forward": (16, 16 * (8 + 4), 4),
    "nll_loss_backward": (0, 16 * 8, 16 * 4),
    "cat": (0, 2 * 4 * 12 * 512 * 32 * 4, 2 * 4 * 12 * 512 * 32 * 4),
    "_foreach_mul_": (36, 36 * 4, 36 * 4),
    "_foreach_addcdiv_": (2 * 32, 3 * 32 * 4, 32 * 4),
    "_foreach_lerp_": (3 * 32, 2 * 32 * 4, 32 * 4),
    "_foreach_norm": (2 * 32, 32 * 4, 0),
    "_foreach_zero_": (0, 0, 32 * 4),
    "_fused_adamw_": (0, 4 * 32 * 4, 3 * 32 * 4),
    # 16 filters of 3 x 3 x 3 over 8 pictures of 3 x 32 x 32; stride 2 leaves 16 x 16 places of each.
    "convolution": (2 * 8 * 32 * 32 * 432, (8 * 3 * 1024 + 432) * 4, 8 * 16 * 1024 * 4),
    "cudnn_convolution": (2 * 8 * 16 * 16 * 432, (8 * 3 * 1024 + 432) * 2, 8 * 16 * 256 * 2),
    "miopen_convolution": (2 * 8 * 16 * 16 * 432, (8 * 3 * 1024 + 432) * 2, 8 * 16 * 256 * 2),
    "cudnn_convolution_relu": (2 * 8 * 16 * 16 * 432, (8 * 3 * 1024 + 432) * 2, 8 * 16 * 256 * 2),
    "cudnn_convolution_add_relu": (2 * 8 * 16 * 16 * 432, (8 * 3 * 1024 + 432) * 2, 8 * 16 * 256 * 2),
    "_slow_conv2d_forward": (2 * 8 * 16 * 16 * 432, (8 * 3 * 1024 + 432) * 4, 8 * 16 * 256 * 4),
    "_nnpack_spatial_convolution": (2 * 8 * 16 * 16 * 432, (8 * 3 * 1024 + 432) * 4, 8 * 16 * 256 * 4),
    # Transposed, the weight goes over the 14 x 14 places of the input: (14 - 1) * 2 - 2 + 3 + 1 = 28 on a side, and in
    # two groups 4 filters each. With windows of 2 x 2: 13 * 2 + 2 = 28.
    "cudnn_convolution_transpose":
        (2 * 8 * 14 * 14 * 16 * 4 * 9, (8 * 16 * 196 + 16 * 4 * 9) * 2, 8 * 8 * 28 * 28 * 2),
    "miopen_convolution_transpose":
        (2 * 8 * 14 * 14 * 16 * 8 * 4, (8 * 16 * 196 + 16 * 8 * 4) * 2, 8 * 8 * 28 * 28 * 2),
    "slow_conv_transpose2d": (2 * 8 * 14 * 14 * 16 * 8 * 4, (8 * 16 * 196 + 16 * 8 * 4) * 4, 8 * 8 * 28 * 28 * 4),
    "_slow_conv2d_backward": (2 * 8 * 32 * 32 * 432, (8 * 16 * 1024 + 8 * 3 * 1024) * 4, 432 * 4),
    "_conv_depthwise2d": (2 * 8 * 32 * 32 * 16 * 9, (8 * 16 * 1024 + 16 * 9) * 4, 8 * 16 * 1024 * 4),
    # The picture needs no gradient: that of the weight alone.
    "convolution_backward": (2 * 8 * 32 * 32 * 432, (8 * 16 * 1024 + 8 * 3 * 1024) * 4, 432 * 4),
}  # fmt: skip


def work_of(
    operator: str, shapes: list, dtypes: list[str], values: list[str] | None = None, **more: int
) -> Work | None:  # fmt: skip
    name = operator if "::" in operator else f"aten::{operator}"
    said = json.dumps(values) if values is not None else None
    return operator_work(name, json.dumps(shapes), json.dumps(dtypes), values=said, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", OPERATOR_WORK_RULES, ids=lambda rule: rule.example.partition(" ")[0])
def test_each_rule_counts_its_example_as_one_does_by_hand(rule: OperatorRule):
    example = recorded(rule.example)
    assert RULE_OF[example.operator] is rule, "an earlier rule hides this one"
    work = operator_work(example.operator, example.shapes, example.dtypes, values=example.values, list_element_bytes=4)
    assert work is not None
    flops, read, written = BY_HAND[example.operator.removeprefix("aten::")]
    assert (work.flops, work.bytes_read, work.bytes_written) == (flops, read, written)
    assert work.convention == Convention(causal="half", recompute=True)


def test_no_operator_has_two_rules():
    names = [name for rule in OPERATOR_WORK_RULES for name in rule.operators]
    assert len(names) == len(set(names))


def test_causal_attention_counts_full_where_asked_or_where_it_cannot_be_causal():
    q = [2, 12, 512, 64]
    dtypes = ["float"] * 3 + ["Scalar"] * 4
    record = json.dumps([q, q, q, [], [], [], []]), json.dumps(dtypes)
    name = "aten::_scaled_dot_product_flash_attention"
    half, full = operator_work(name, *record), operator_work(name, *record, causal="full")
    assert half and full
    assert full.flops == 2 * half.flops == SQUARE * 4 * 64
    with pytest.raises(ValueError, match="unlike FLOP conventions"):
        _ = half + full
    decoding = work_of("_scaled_dot_product_flash_attention", [[2, 12, 1, 64], q, q, [], [], [], []], dtypes)
    assert decoding and decoding.flops == 2 * 12 * 1 * 512 * 4 * 64


CONVOLUTION = ["float", "float", "", "ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", "Scalar"]


def test_a_convolution_counts_its_groups_gaps_and_windows():
    """64 channels in 4 groups, a window of 3 with gaps of 2: (30 + 2 - 4 - 1) / 3 + 1 = 10 places."""
    shapes = [[2, 64, 30], [32, 16, 3], *[[]] * 7]
    work = work_of("convolution", shapes, CONVOLUTION, ["", "", "", "[3]", "[1]", "[2]", "False", "[0]", "4"])
    assert work and work.flops == 2 * (2 * 10) * 32 * 16 * 3
    assert work.bytes_written == 2 * 32 * 10 * 4


@pytest.mark.parametrize("stride", ["", "[]", "[1, 1, 1]", "[0]", "[-1]", "[one]"])
def test_a_convolution_whose_output_is_not_known_has_no_work(stride: str):
    shapes = [[2, 64, 30, 30], [32, 64, 3, 3], *[[]] * 7]
    values = ["", "", "", stride, "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    assert work_of("convolution", shapes, CONVOLUTION, values) is None
    assert work_of("convolution", shapes, CONVOLUTION) is None, "without values"


def test_backward_of_a_convolution_takes_both_gradients_where_nothing_else_is_said():
    dtypes = ["float"] * 3 + ["ScalarList"] * 4 + ["Scalar", "ScalarList", "Scalar", "ScalarList"]
    shapes = [[2, 32, 28, 28], [2, 64, 30, 30], [32, 64, 3, 3], *[[]] * 8]
    both = work_of("convolution_backward", shapes, dtypes)
    assert both and both.flops == 2 * 2 * (2 * 28 * 28) * 32 * 64 * 9
    # Transposed, the roles of the two sides are exchanged: (2, 32, 14, 14) becomes (2, 64, 28, 28).
    shapes = [[2, 64, 28, 28], [2, 32, 14, 14], [32, 64, 2, 2], *[[]] * 8]
    turned = work_of("convolution_backward", shapes, dtypes)
    assert turned and turned.flops == 2 * 2 * (2 * 14 * 14) * 32 * 64 * 4


def test_keys_may_have_fewer_heads_and_values_another_width():
    shapes = [[1, 8, 16, 32], [1, 2, 16, 32], [1, 2, 16, 64], [], [], [], []]
    work = work_of("_scaled_dot_product_flash_attention", shapes, ["c10::Half"] * 3 + ["Scalar"] * 4)
    assert work and work.flops == 8 * 16 * 16 * 2 * (32 + 64) // 2
    assert work.bytes_read == (8 * 16 * 32 + 2 * 16 * 32 + 2 * 16 * 64) * 2
    assert work.bytes_written == 8 * 16 * 64 * 2


@pytest.mark.parametrize(
    ("operator", "shapes", "dtypes"),
    [
        # As PyTorch 2.11 recorded them on an H200.
        ("_cudnn_attention_backward",
         [[4, 4, 512, 64]] * 5 + [[4, 4, 512, 1]] + [[]] * 10,
         ["c10::BFloat16"] * 5 + ["float", "long int", "long int", "", "", "", *["Scalar"] * 4, ""]),
        ("_efficient_attention_backward",
         [[4, 512, 4, 64]] * 4 + [[], [4, 512, 4, 64], [], [], [], [], [4, 4, 512]] + [[]] * 9,
         ["c10::Half"] * 4 + ["", "c10::Half", "", "", "Scalar", "Scalar", "float", "Scalar", "long int", "long int",
                              "Scalar", "Scalar", "", "", "", "Scalar"]),
        ("_flash_attention_backward",
         [[4, 512, 4, 64]] * 5 + [[4, 4, 512], [], [], [], [], [], [], [2], [], [], [], []],
         ["c10::BFloat16"] * 5 + ["float", "", "", *["Scalar"] * 4, "long unsigned int", "long unsigned int", "Scalar",
                                  "", ""]),
    ],
)  # fmt: skip
def test_attention_backward_as_recorded(operator: str, shapes: list, dtypes: list[str]):
    work = work_of(operator, shapes, dtypes)
    rows = 4 * 4 * 512
    assert work and work.flops == 10 * rows * 512 * 64 // 2
    assert (work.bytes_read, work.bytes_written) == (5 * rows * 64 * 2 + rows * 4, 3 * rows * 64 * 2)


def test_flash_attention_over_documents_has_no_work_and_a_bias_is_read():
    """Lengths of documents are values, which are not recorded. A capture may be older than that argument."""
    shapes, dtypes = [[2, 12, 512, 64]] * 3 + [[], [], []], ["c10::BFloat16"] * 3 + ["Scalar", "Scalar", ""]

    def work(*bounds: tuple[list[int], str]) -> Work | None:
        of_bounds, kinds = [shape for shape, _ in bounds], [kind for _, kind in bounds]
        name = "stepscope::flash_attention_forward"
        return operator_work(name, json.dumps([*shapes, *of_bounds]), json.dumps([*dtypes, *kinds]))

    full = work()
    assert full and full.flops == 4 * 2 * 12 * 512 * 512 * 64 // 2
    assert work(([], "")) == full
    assert work(([2, 2, 512], "int")) is None
    biased = work(*[([], "")] * 4, ([12, 1023], "float"))  # by distance
    assert biased and biased.bytes_read and full.bytes_read
    assert biased.bytes_read - full.bytes_read == 12 * 1023 * 4


@pytest.mark.parametrize(
    ("operator", "shapes", "dtypes"),
    [
        ("arange", [[], [], [], [0]], ["Scalar", "Scalar", "Scalar", "long int"]),  # no rule
        ("mm", [[2, 3], [4, 5]], ["float", "float"]),  # these do not multiply
        ("mm", [[2, 3], [3, 5]], ["float", "c10::BFloat16"]),
        ("mm", [[2, 3], [3, 5]], ["c10::complex<int>", "c10::complex<int>"]),  # a dtype not in the table
        ("mul", [[2, 3], [2, 3]], ["c10::complex<float>"] * 2),
        ("_native_multi_head_attention", [[2, 6, 8]] * 3 + [[], [], [16, 8], [16], [8, 8]],
         ["float"] * 3 + ["Scalar"] * 2 + ["float"] * 3),
        ("mm", [[2, 3]], ["float"]),
        ("mm", [[2, -3], [-3, 5]], ["float", "float"]),
        ("mm", [[2**40, 2**40], [2**40, 5]], ["float", "float"]),
        ("mm", [[2, 3], "x"], ["float", "float"]),
        ("mm", [[2, 3], [3, 5]], ["float"]),
        ("add", [[2, 3], [4, 3], []], ["float", "float", "Scalar"]),  # these do not broadcast
        ("mul", [[4, 512], []], ["long int", "Scalar"]),  # the number may make it floating
        ("max", [[4, 4], [4, 4]], ["float", "float"]),  # of two tensors: no reduction
        ("where", [[4, 4]], ["bool"]),  # the places where it holds, as routing to experts asks
        ("where", [[], [4]], ["Scalar", "float"]),
        ("_grouped_mm", [[8, 4], [4, 8], [], [], []], ["float", "float", "", "", ""]),  # into how many groups?
        ("_foreach_mm", [[[2, 3]], [[3, 2], [3, 2]]], ["TensorList", "TensorList"]),
        ("convolution", [[2], [2], [], [], [], [], [], [], []], ["float", "float", *[""] * 7]),
        ("_weight_int4pack_mm", [[4, 7], [3, 3], [], []], ["float", "int", "Scalar", "float"]),
        ("index_select", [[4, 4, 4], [], [2]], ["float", "Scalar", "long int"]),
        ("_foreach_mul_", [[], []], ["TensorList", "Scalar"]),  # too long a list to be recorded
        ("_flash_attention_forward", [[512, 4, 64]] * 3 + [[3], [3], [], []],
         ["c10::BFloat16"] * 3 + ["int", "int", "Scalar", "Scalar"]),  # sequences of several lengths
        ("scatter_add", [[4, 8], [], [4, 1], [4, 1]], ["float", "Scalar", "long int", "float"]),
    ],
)  # fmt: skip
def test_what_the_record_leaves_open_has_no_work(operator: str, shapes: list, dtypes: list[str]):
    assert work_of(operator, shapes, dtypes) is None


@pytest.mark.parametrize(
    ("shapes", "dtypes"),
    [(None, None), ("", ""), ("[[2,", '["float"]'), ("5", "[]"), ("[[]]", "{}"), ("[[2]]", "[7]"), ("[" * 9000, "[]")],
)
def test_broken_records_have_no_work(shapes: str | None, dtypes: str | None):
    assert operator_work("aten::mm", shapes, dtypes) is None


def test_lists_need_their_elements_size():
    shapes, dtypes = [[[8, 4], [8, 4]], []], ["TensorList", "Scalar"]
    assert work_of("cat", shapes, dtypes) is None
    work = work_of("cat", shapes, dtypes, list_element_bytes=2)
    assert work and work.bytes_moved == 2 * 64 * 2


def test_a_number_beside_tensors_moves_no_bytes():
    with_number = work_of("mul", [[8, 4], []], ["float", "double"])
    assert with_number == work_of("mul", [[8, 4], []], ["float", "Scalar"])
    assert with_number and with_number.bytes_moved == 2 * 32 * 4


def test_mixed_dtypes_widen_the_result():
    work = work_of("mul", [[3, 3], [3, 3]], ["c10::BFloat16", "float"])
    assert work and (work.bytes_read, work.bytes_written) == (9 * 2 + 9 * 4, 9 * 4)
    in_place = work_of("mul_", [[3, 3], [3, 3]], ["c10::BFloat16", "float"])
    assert in_place and in_place.bytes_written == 9 * 2
    assert (integers := work_of("add", [[3], [3], []], ["int", "int", "Scalar"])) and integers.flops == 0
    assert (quotient := work_of("div", [[3], [3]], ["long int", "long int"])) and quotient.bytes_written == 3 * 4


def test_promotion_is_pytorchs():
    import torch

    names = {
        "float": torch.float32, "double": torch.float64, "c10::BFloat16": torch.bfloat16, "c10::Half": torch.float16,
        "long int": torch.int64, "int": torch.int32, "bool": torch.bool,
    }  # fmt: skip
    for a, torch_a in names.items():
        for b, torch_b in names.items():
            for shape in ((2,), ()):
                expected = torch.result_type(torch.zeros(2, dtype=torch_a), torch.zeros(shape, dtype=torch_b))
                found = promoted([Operand((2,), a, 1), Operand(shape, b, 1)])
                if not shape and b == "double" and not torch_a.is_floating_point:
                    expected = torch.result_type(torch.zeros(2, dtype=torch_a), 1.0)  # a number of Python's
                assert names[found] == expected, (a, b, shape)


def test_products_are_told_from_other_work():
    assert is_product("aten::addmm") and is_product("aten::_flash_attention_backward")
    assert not is_product("aten::add") and not is_product("aten::unheard_of")
