"""Which formula counts which operator: data, each rule with an example.

Formulas are in `products`, `attention` and, of all else, `formulas`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from stepscope.core.formulas import CausalConvention, Convention, Work
from stepscope.core.formulas.operators import formulas
from stepscope.core.formulas.operators import formulas as products
from stepscope.core.formulas.operators.calls import OperatorCall, Unknown, read_call
from stepscope.core.formulas.operators.formulas import Convolution, FusedAttention, Sight

Formula = Callable[[OperatorCall, CausalConvention], Work]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A call as Kineto records it: JSON texts."""

    operator: str
    shapes: str
    dtypes: str
    values: str | None = None


@dataclass(frozen=True, kw_only=True)
class OperatorRule:
    """Operators whose work follows one formula. An operator that calls another of the same rule leaves it the work, and
    a product one that calls another product. `attention`: the places of fused attention's arguments."""

    name: str
    operators: tuple[str, ...]
    work: Formula
    example: Example
    multiplies: bool = False
    attention: FusedAttention | None = None


def _named(name: str) -> str:
    """An operator of PyTorch's, unless the name says whose it is."""
    return name if "::" in name else f"aten::{name}"


def _rule(
    name: str, operators: str, work: Formula, *, example: tuple[str, ...], multiplies: bool = False
) -> OperatorRule:
    operator, *record = example
    return OperatorRule(
        name=name,
        operators=tuple(map(_named, operators.split())),
        work=work,
        example=Example(operator=_named(operator), shapes=record[0], dtypes=record[1], values=(*record, None)[2]),
        multiplies=multiplies,
    )


_product_rule = partial(_rule, multiplies=True)


def _convolution_rule(operators: str, places: Convolution, *, example: tuple[str, ...]) -> OperatorRule:
    return _product_rule("convolution", operators, places.work, example=example)


def _attention_rule(operators: str, places: FusedAttention, *, example: tuple[str, ...]) -> OperatorRule:
    rule = _product_rule("attention backward" if places.out else "attention", operators, places.work, example=example)
    return replace(rule, attention=places)


def _pointwise_rule(
    operators: str, flops: int, operands: int = 1, result: str = "", *, example: tuple[str, str, str]
) -> OperatorRule:
    work = partial(formulas.pointwise, flops=flops, operands=operands, result=result)
    return _rule("pointwise", " ".join(f"{each} {each}_" for each in operators.split()), work, example=example)


_X = '["float", "float", "Scalar"]'
_QKV = ", ".join(["[2, 12, 512, 64]"] * 3)
_BSHD = ", ".join(["[2, 512, 12, 64]"] * 3)
_BF16 = '"c10::BFloat16"'
_SCALAR = '"Scalar"'
_NOTHING = ', ""'
_OPERANDS = f"{_BF16}, {_BF16}, {_BF16}"
_FLOATS = '"float", "float", "float"'


def _shapes(first: str, numbers: int) -> str:
    """The shapes of these tensors and of so many numbers after them."""
    return f"[{first}{', []' * numbers}]"


_PRODUCTS: tuple[OperatorRule, ...] = (
    _product_rule("matrix product", "mm bmm mv dot vdot", products.product,
          example=("bmm", "[[48, 512, 64], [48, 64, 512]]", '["float", "float"]')),
    _product_rule("matrix product", "addmm baddbmm addmv _addmm_activation addmm_ baddbmm_ addmv_",
          partial(products.product, first=1, bias=0),
          example=("addmm", "[[3072], [2048, 768], [768, 3072], [], []]",
                   f'[{_BF16}, {_BF16}, {_BF16}, "Scalar", "Scalar"]')),
    _product_rule("matrix product", "addbmm addbmm_", partial(products.product, first=1, bias=0, sums_batch=True),
          example=("addbmm", "[[16, 8], [4, 16, 32], [4, 32, 8], [], []]",
                   '["float", "float", "float", "Scalar", "Scalar"]')),
    _product_rule("matrix product", "addr addr_", products.outer_product,
          example=("addr", "[[16, 8], [16], [8], [], []]", '["float", "float", "float", "Scalar", "Scalar"]')),
    _product_rule("matrix product", "_int_mm", partial(products.product, result_bytes=4),
          example=("_int_mm", "[[32, 64], [64, 16]]", '["signed char", "signed char"]')),
    _product_rule("matrix product", "_scaled_mm _scaled_mm_v2", products.scaled_product,
          example=("_scaled_mm", "[[32, 64], [64, 16], [], [], [], [], [], []]",
                   '["c10::Float8_e4m3fn", "c10::Float8_e4m3fn", "float", "float", "", "", "Scalar", "Scalar"]')),
    _product_rule("matrix product", "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2", products.grouped_product,
          example=("_grouped_mm", "[[512, 64], [8, 64, 96], [8], [], []]", f'[{_BF16}, {_BF16}, "int", "", ""]')),
    _product_rule("matrix product", "_foreach_mm", products.products_of_lists,
          example=("_foreach_mm", "[[[8, 4], [2, 3]], [[4, 16], [3, 5]]]", '["TensorList", "TensorList"]')),
    _product_rule("matrix product", "linear mkldnn_linear mkldnn::_linear_pointwise aiter::gemm_a16w16 "
          "vllm::rocm_unquantized_gemm", products.linear,
          example=("linear", "[[4, 16, 32], [8, 32], [8]]", '["float", "float", "float"]')),
    _product_rule("matrix product", "mkl::_mkl_linear", partial(products.linear, weight=2, bias=3),
          example=("mkl::_mkl_linear", "[[64, 32], [1], [8, 32], [8], []]",
                   '["float", "float", "float", "float", "Scalar"]')),
    _product_rule("matrix product", "_weight_int8pack_mm", partial(products.linear, bias=2),
          example=("_weight_int8pack_mm", "[[16, 64], [32, 64], [32]]", f'[{_BF16}, "signed char", {_BF16}]')),
    _product_rule("matrix product", "_weight_int4pack_mm _weight_int4pack_mm_for_cpu "
          "_weight_int4pack_mm_with_scales_and_zeros", partial(products.linear, bias=3, weights_a_byte=2),
          example=("_weight_int4pack_mm", "[[16, 1024], [4, 8, 32, 4], [], [8, 32, 2]]",
                   f'[{_BF16}, "int", "Scalar", {_BF16}]')),
    _product_rule("encoder", "_native_multi_head_attention", partial(products.encoder, weights=(5, 7), key=1),
          example=("_native_multi_head_attention",
                   "[[2, 6, 8], [2, 6, 8], [2, 6, 8], [], [], [24, 8], [24], [8, 8], [8], [], [], [], []]",
                   f'[{_FLOATS}, "Scalar", "Scalar", "float", {_FLOATS}, "", "Scalar", "Scalar", ""]')),
    _product_rule("encoder", "_transformer_encoder_layer_fwd", partial(products.encoder, weights=(3, 5, 14, 16)),
          example=("_transformer_encoder_layer_fwd",
                   "[[2, 6, 8], [], [], [24, 8], [24], [8, 8], [8], [], [], [], [8], [8], [8], [8], [16, 8], [16], "
                   "[8, 16], [8], [], []]",
                   f'["float", "Scalar", "Scalar", "float", {_FLOATS}, "Scalar", "Scalar", "Scalar", {_FLOATS}, '
                   f'{_FLOATS}, "float", "float", "", ""]')),
    _product_rule("matrix product", "mkldnn_linear_backward_input",
          partial(products.linear_backward, grad=1, weight=2, other=None),
          example=("mkldnn_linear_backward_input", "[[], [64, 8], [8, 32]]", '["ScalarList", "float", "float"]')),
    _product_rule("matrix product", "mkldnn_linear_backward_weights",
          partial(products.linear_backward, grad=0, weight=2, other=1),
          example=("mkldnn_linear_backward_weights", "[[64, 8], [64, 32], [8, 32], []]",
                   '["float", "float", "float", "Scalar"]')),
    _product_rule("sparse product", "_sparse_semi_structured_linear",
          partial(products.sparse_product, sparse=1, dense=0, transposed=True),
          example=("_sparse_semi_structured_linear", "[[16, 64], [32, 32], [32, 4], [], [], []]",
                   '["c10::Half", "c10::Half", "short", "", "", ""]')),
    _product_rule("sparse product", "_sparse_semi_structured_mm",
          partial(products.sparse_product, sparse=0, dense=2, transposed=False),
          example=("_sparse_semi_structured_mm", "[[32, 32], [32, 4], [64, 16], []]",
                   '["c10::Half", "short", "c10::Half", ""]')),
    _product_rule("sparse product", "_sparse_semi_structured_addmm",
          partial(products.sparse_product, sparse=1, dense=3, transposed=False),
          example=("_sparse_semi_structured_addmm", "[[32], [32, 32], [32, 4], [64, 16], [], [], []]",
                   '["c10::Half", "c10::Half", "short", "c10::Half", "Scalar", "Scalar", ""]')),
    _convolution_rule("convolution _convolution convolution_overrideable",
          Convolution(stride=3, padding=4, dilation=5, transposed=6, output_padding=7, groups=8),
          example=("convolution", "[[8, 3, 32, 32], [16, 3, 3, 3], [16], [], [], [], [], [], []]",
                   '["float", "float", "float", "ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", '
                   '"Scalar"]', '["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]')),
    _convolution_rule("cudnn_convolution", Convolution(padding=2, stride=3, dilation=4),
          example=("cudnn_convolution", "[[8, 3, 32, 32], [16, 3, 3, 3], [], [], [], [], [], [], []]",
                   f'[{_BF16}, {_BF16}, "ScalarList", "ScalarList", "ScalarList", "Scalar", "Scalar", "Scalar", '
                   '"Scalar"]', '["", "", "[1, 1]", "[2, 2]", "[1, 1]", "1", "False", "False", "True"]')),
    _convolution_rule("cudnn_convolution_relu miopen_convolution_relu", Convolution(stride=3, padding=4, dilation=5),
          example=("cudnn_convolution_relu", "[[8, 3, 32, 32], [16, 3, 3, 3], [16], [], [], [], []]",
                   f'[{_OPERANDS}, "ScalarList", "ScalarList", "ScalarList", "Scalar"]',
                   '["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "1"]')),
    _convolution_rule("cudnn_convolution_add_relu miopen_convolution_add_relu",
          Convolution(stride=5, padding=6, dilation=7),
          example=("cudnn_convolution_add_relu",
                   "[[8, 3, 32, 32], [16, 3, 3, 3], [8, 16, 16, 16], [], [16], [], [], [], []]",
                   f'[{_OPERANDS}, "Scalar", {_BF16}, "ScalarList", "ScalarList", "ScalarList", "Scalar"]',
                   '["", "", "", "1.", "", "[2, 2]", "[1, 1]", "[1, 1]", "1"]')),
    _convolution_rule("miopen_convolution mkldnn_convolution miopen_depthwise_convolution "
          "mkldnn::_convolution_pointwise", Convolution(padding=3, stride=4, dilation=5),
          example=("miopen_convolution", "[[8, 3, 32, 32], [16, 3, 3, 3], [], [], [], [], [], [], []]",
                   f'[{_BF16}, {_BF16}, "", "ScalarList", "ScalarList", "ScalarList", "Scalar", "Scalar", "Scalar"]',
                   '["", "", "", "[1, 1]", "[2, 2]", "[1, 1]", "1", "False", "False"]')),
    _convolution_rule("cudnn_convolution_transpose",
          Convolution(padding=2, output_padding=3, stride=4, dilation=5, groups=6, transposed=True),
          example=("cudnn_convolution_transpose", "[[8, 16, 14, 14], [16, 4, 3, 3], [], [], [], [], [], [], [], []]",
                   f'[{_BF16}, {_BF16}, "ScalarList", "ScalarList", "ScalarList", "ScalarList", "Scalar", "Scalar", '
                   '"Scalar", "Scalar"]',
                   '["", "", "[1, 1]", "[1, 1]", "[2, 2]", "[1, 1]", "2", "False", "False", "True"]')),
    _convolution_rule("miopen_convolution_transpose",
          Convolution(padding=3, output_padding=4, stride=5, dilation=6, groups=7, transposed=True),
          example=("miopen_convolution_transpose", "[[8, 16, 14, 14], [16, 8, 2, 2], [], [], [], [], [], [], [], []]",
                   f'[{_BF16}, {_BF16}, "", "ScalarList", "ScalarList", "ScalarList", "ScalarList", "Scalar", '
                   '"Scalar", "Scalar"]',
                   '["", "", "", "[0, 0]", "[0, 0]", "[2, 2]", "[1, 1]", "1", "False", "False"]')),
    _convolution_rule("_conv_depthwise2d conv_depthwise3d slow_conv_dilated2d slow_conv_dilated3d",
          Convolution(stride=4, padding=5, dilation=6),
          example=("_conv_depthwise2d", "[[8, 16, 32, 32], [16, 1, 3, 3], [], [], [], [], []]",
                   '["float", "float", "ScalarList", "", "ScalarList", "ScalarList", "ScalarList"]',
                   '["", "", "[3, 3]", "", "[1, 1]", "[1, 1]", "[1, 1]"]')),
    _convolution_rule("_slow_conv2d_forward thnn_conv2d slow_conv3d_forward slow_conv3d",
          Convolution(stride=4, padding=5),
          example=("_slow_conv2d_forward", "[[8, 3, 32, 32], [16, 3, 3, 3], [], [], [], []]",
                   '["float", "float", "ScalarList", "", "ScalarList", "ScalarList"]',
                   '["", "", "[3, 3]", "", "[2, 2]", "[1, 1]"]')),
    _convolution_rule("slow_conv_transpose2d slow_conv_transpose3d",
          Convolution(stride=4, padding=5, output_padding=6, dilation=7, transposed=True),
          example=("slow_conv_transpose2d", "[[8, 16, 14, 14], [16, 8, 2, 2], [], [], [], [], [], []]",
                   '["float", "float", "ScalarList", "", "ScalarList", "ScalarList", "ScalarList", "ScalarList"]',
                   '["", "", "[2, 2]", "", "[2, 2]", "[0, 0]", "[0, 0]", "[1, 1]"]')),
    _convolution_rule("_nnpack_spatial_convolution", Convolution(padding=3, stride=4),
          example=("_nnpack_spatial_convolution", "[[8, 3, 32, 32], [16, 3, 3, 3], [], [], []]",
                   '["float", "float", "", "ScalarList", "ScalarList"]', '["", "", "", "[1, 1]", "[2, 2]"]')),
    _product_rule("convolution backward", "convolution_backward convolution_backward_overrideable",
          products.convolution_backward,
          example=("convolution_backward", "[[8, 16, 32, 32], [8, 3, 32, 32], [16, 3, 3, 3], [], [], [], "
                   "[], [], [], [], []]",
                   '["float", "float", "float", "ScalarList", "ScalarList", "ScalarList", "ScalarList", "Scalar", '
                   '"ScalarList", "Scalar", "ScalarList"]',
                   '["", "", "", "[16]", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", '
                   '"[False, True, True]"]')),
    _product_rule("convolution backward", "_slow_conv2d_backward",
          partial(products.convolution_backward, transposed=False, wanted=6),
          example=("_slow_conv2d_backward",
                   "[[8, 16, 32, 32], [8, 3, 32, 32], [16, 3, 3, 3], [], [], [], []]",
                   '["float", "float", "float", "ScalarList", "ScalarList", "ScalarList", "ScalarList"]',
                   '["", "", "", "[3, 3]", "[1, 1]", "[1, 1]", "[False, True, True]"]')),
)  # fmt: skip

_ATTENTION: tuple[OperatorRule, ...] = (
    # Only where it calls no other product of the trace does the outermost operator count.
    _attention_rule("scaled_dot_product_attention", FusedAttention(bias=3, causal=(5,)),
          example=("scaled_dot_product_attention", _shapes(_QKV, 5),
                   f'[{_OPERANDS}, "", "Scalar", "Scalar", "", "Scalar"]',
                   '["", "", "", "", "0.", "False", "", "False"]')),
    _attention_rule("_scaled_dot_product_flash_attention", FusedAttention(causal=(4, 7)),
          example=("_scaled_dot_product_flash_attention", _shapes(_QKV, 4),
                   f'[{_OPERANDS}, "Scalar", "Scalar", "Scalar", "Scalar"]')),
    _attention_rule("_scaled_dot_product_cudnn_attention", FusedAttention(bias=3, causal=(6, 4)),
          example=("_scaled_dot_product_cudnn_attention", _shapes(_QKV, 6),
                   f'[{_OPERANDS}, "", "Scalar", "Scalar", "Scalar", "Scalar", ""]',
                   '["", "", "", "", "True", "0.", "True", "False", ""]')),
    _attention_rule("_scaled_dot_product_efficient_attention", FusedAttention(bias=3, causal=(6,)),
          example=("_scaled_dot_product_efficient_attention", f"[{_QKV}, [2, 12, 512, 512], [], [], [], []]",
                   '["float", "float", "float", "float", "Scalar", "Scalar", "Scalar", "Scalar"]')),
    _attention_rule("_scaled_dot_product_fused_attention_overrideable", FusedAttention(bias=3, causal=(5,)),
          example=("_scaled_dot_product_fused_attention_overrideable", _shapes(_QKV, 5),
                   f'[{_OPERANDS}, "", "Scalar", "Scalar", "Scalar", ""]',
                   '["", "", "", "", "0.", "True", "False", ""]')),
    _attention_rule("_scaled_dot_product_flash_attention_for_cpu", FusedAttention(bias=5, causal=(4,)),
          example=("_scaled_dot_product_flash_attention_for_cpu", _shapes(_QKV, 4),
                   '["float", "float", "float", "Scalar", "Scalar", "", ""]')),
    _attention_rule("_flash_attention_forward",
          FusedAttention(heads_at=2, lengths=3, longest=5, causal=(8,), window=11, elsewhere=(13, 15), from_last=True),
          example=("_flash_attention_forward", _shapes(_BSHD, 4), f'[{_OPERANDS}, "", "", "Scalar", "Scalar"]')),
    _attention_rule("_flash_attention_forward_no_dropout_inplace",
          FusedAttention(query=1, heads_at=2, lengths=4, longest=6, causal=(9,), window=12, elsewhere=(14, 16),
                         from_last=True),
          example=("_flash_attention_forward_no_dropout_inplace", _shapes(f"[2, 512, 12, 64], {_BSHD}", 7),
                   f'[{_BF16}, {_OPERANDS}, "", "", "Scalar", "Scalar", "Scalar", "Scalar", "Scalar"]',
                   '["", "", "", "", "", "", "512", "512", "0.", "False", "False"]')),
    _attention_rule("_efficient_attention_forward",
          FusedAttention(heads_at=2, bias=3, lengths=4, longest=6, mask_type=(9, 8), elsewhere=(12,), one_window=13),
          example=("_efficient_attention_forward", _shapes(_BSHD, 4),
                   '["float", "float", "float", "", "", "", "Scalar"]')),
    _attention_rule("_cudnn_attention_forward", FusedAttention(bias=3, lengths=4, longest=6, causal=(10,)),
          example=("_cudnn_attention_forward", _shapes(_QKV, 4), f'[{_OPERANDS}, "", "", "", "Scalar"]')),
    _attention_rule("stepscope::flash_attention_forward", FusedAttention(causal=(3,), one_window=5, lengths=6),
          example=("stepscope::flash_attention_forward", _shapes(_QKV, 4),
                   f'[{_OPERANDS}, "Scalar", "Scalar", "", ""]')),
    _attention_rule("flash_attn::_flash_attn_forward",
          FusedAttention(heads_at=2, causal=(5,), window=6, from_last=True),
          example=("flash_attn::_flash_attn_forward", _shapes(_BSHD, 8),
                   f'[{_OPERANDS}, "Scalar", "Scalar", "Scalar", "Scalar", "Scalar", "Scalar", "", "Scalar"]',
                   '["", "", "", "0.", "0.125", "True", "-1", "-1", "0.", "", "False"]')),
    _attention_rule("flash_attn::_flash_attn_varlen_forward",
          FusedAttention(heads_at=2, lengths=3, longest=5, causal=(9,), window=10, elsewhere=(15, 16, 17),
                         from_last=True),
          example=("flash_attn::_flash_attn_varlen_forward",
                   _shapes("[1024, 12, 64], [1024, 12, 64], [1024, 12, 64], [3], [3]", 14),
                   f'[{_OPERANDS}, "int", "int", {", ".join([_SCALAR] * 8)}, "", "Scalar", "", "", "", "Scalar"]',
                   '["", "", "", "", "", "512", "512", "0.", "0.125", "True", "-1", "-1", "0.", "", "False", "", "", '
                   '"", "False"]')),
    # FlashAttention-3, and as SGLang builds it: key and value of a cache stand elsewhere.
    _attention_rule("flash_attn_3::fwd sgl_kernel::fwd",
          FusedAttention(heads_at=2, lengths=7, longest=12, causal=(24,), window=25,
                         elsewhere=(3, 4, 5, 9, 10, 11, 14, 15, 16), from_last=True),
          example=("flash_attn_3::fwd", _shapes(_BSHD, 24),
                   f'[{_OPERANDS}{_NOTHING * 21}, "Scalar", "Scalar", "Scalar"]',
                   f'["", "", ""{_NOTHING * 21}, "False", "-1", "-1"]')),
    _attention_rule("stepscope::flash_attention_backward",
          FusedAttention(query=2, out=5, sums=6, causal=(7,), one_window=9, lengths=10),
          example=("stepscope::flash_attention_backward",
                   f"[[2, 12, 512, 64], [], {_QKV}, [2, 12, 512, 64], [2, 12, 512], [], [], [], []]",
                   f'[{_BF16}, "", {_OPERANDS}, {_BF16}, "float", "Scalar", "Scalar", "", ""]')),
    _attention_rule("_scaled_dot_product_flash_attention_backward",
          FusedAttention(query=1, out=4, sums=5, lengths=6, longest=8, causal=(11,)),
          example=("_scaled_dot_product_flash_attention_backward",
                   f"[[2, 12, 512, 64], {_QKV}, [2, 12, 512, 64], [2, 12, 512], [], []]",
                   f'[{_BF16}, {_OPERANDS}, {_BF16}, "float", "", ""]')),
    _attention_rule("_scaled_dot_product_fused_attention_overrideable_backward",
          FusedAttention(query=1, bias=4, out=6, sums=7, lengths=8, longest=10, causal=(13,)),
          example=("_scaled_dot_product_fused_attention_overrideable_backward",
                   _shapes(f"[2, 12, 512, 64], {_QKV}, [], [], [2, 12, 512, 64], [2, 12, 512]", 6),
                   f'[{_BF16}, {_OPERANDS}, "", "ScalarList", {_BF16}, "float", "", "", "Scalar", "Scalar", "Scalar", '
                   '"Scalar"]', f'["", "", "", ""{_NOTHING * 6}, "512", "512", "0.", "False"]')),
    _attention_rule("_scaled_dot_product_flash_attention_for_cpu_backward",
          FusedAttention(query=1, out=4, sums=5, causal=(7,), bias=8),
          example=("_scaled_dot_product_flash_attention_for_cpu_backward",
                   f"[[2, 12, 512, 64], {_QKV}, [2, 12, 512, 64], [2, 12, 512], [], [], [], []]",
                   '["float", "float", "float", "float", "float", "float", "Scalar", "Scalar", "", ""]')),
    _attention_rule("_flash_attention_backward",
          FusedAttention(query=1, heads_at=2, out=4, sums=5, lengths=6, longest=8, causal=(11,), window=15,
                         from_last=True),
          example=("_flash_attention_backward",
                   f"[[2, 512, 12, 64], {_BSHD}, [2, 512, 12, 64], [2, 12, 512], [], []]",
                   f'[{_BF16}, {_OPERANDS}, {_BF16}, "float", "", ""]')),
    _attention_rule("_scaled_dot_product_efficient_attention_backward",
          FusedAttention(query=1, bias=4, out=5, sums=6, causal=(11,)),
          example=("_scaled_dot_product_efficient_attention_backward",
                   f"[[2, 12, 512, 64], {_QKV}, [], [2, 12, 512, 64], [2, 12, 512]]",
                   '["float", "float", "float", "float", "", "float", "float"]')),
    _attention_rule("_efficient_attention_backward",
          FusedAttention(query=1, heads_at=2, bias=4, out=5, lengths=6, longest=8, sums=10, mask_type=(14,),
                         one_window=18),
          example=("_efficient_attention_backward",
                   f"[[2, 512, 12, 64], {_BSHD}, [], [2, 512, 12, 64], [], [], [], [], [2, 12, 512]]",
                   '["float", "float", "float", "float", "", "float", "", "", "Scalar", "Scalar", "float"]')),
    _attention_rule("_scaled_dot_product_cudnn_attention_backward _cudnn_attention_backward",
          FusedAttention(query=1, out=4, sums=5, bias=8, lengths=9, longest=11, causal=(14, 11)),
          example=("_scaled_dot_product_cudnn_attention_backward",
                   f"[[2, 12, 512, 64], {_QKV}, [2, 12, 512, 64], [2, 12, 512, 1], [], [], [], []]",
                   f'[{_BF16}, {_OPERANDS}, {_BF16}, "float", "long int", "long int", "", ""]')),
    _attention_rule("flash_attn::_flash_attn_backward",
          FusedAttention(query=1, heads_at=2, out=4, sums=5, causal=(11,), window=12, from_last=True),
          example=("flash_attn::_flash_attn_backward",
                   _shapes(f"[2, 512, 12, 64], {_BSHD}, [2, 512, 12, 64], [2, 12, 512], {_BSHD}", 5),
                   f'[{_BF16}, {_OPERANDS}, {_BF16}, "float", {_OPERANDS}, {", ".join([_SCALAR] * 5)}]',
                   f'["", "", ""{_NOTHING * 6}, "0.", "0.125", "True", "-1", "-1"]')),
    _attention_rule("flash_attn::_flash_attn_varlen_backward",
          FusedAttention(query=1, heads_at=2, out=4, sums=5, lengths=9, longest=11, causal=(15,), window=16,
                         from_last=True),
          example=("flash_attn::_flash_attn_varlen_backward",
                   _shapes(f"{', '.join(['[1024, 12, 64]'] * 5)}, [12, 1024], [], [], [], [3], [3]", 5),
                   f'[{_BF16}, {_OPERANDS}, {_BF16}, "float", "", "", "", "int", "int", {", ".join([_SCALAR] * 5)}]',
                   f'["", "", ""{_NOTHING * 8}, "512", "512", "0.", "0.125", "False"]')),
    _attention_rule("flash_attn_3::bwd",
          FusedAttention(query=1, heads_at=2, out=4, sums=5, lengths=9, longest=13, causal=(16,), window=17,
                         elsewhere=(11, 12), from_last=True),
          example=("flash_attn_3::bwd",
                   _shapes(f"[2, 512, 12, 64], {_BSHD}, [2, 512, 12, 64], [2, 12, 512]", 13),
                   f'[{_BF16}, {_OPERANDS}, {_BF16}, "float"{_NOTHING * 9}, "Scalar", "Scalar", "Scalar", "Scalar"]',
                   f'["", "", ""{_NOTHING * 12}, "0.125", "True", "-1", "-1"]')),
)  # fmt: skip

OPERATOR_WORK_RULES: tuple[OperatorRule, ...] = (
    *_PRODUCTS,
    *_ATTENTION,
    _rule("softmax", "_softmax _log_softmax", formulas.softmax,
          example=("_softmax", "[[4, 12, 512, 512], [], []]", '["float", "Scalar", "Scalar"]')),
    _rule("softmax backward", "_softmax_backward_data _log_softmax_backward_data", formulas.softmax_backward,
          example=("_softmax_backward_data", "[[8, 16], [8, 16], [], []]", '["float", "float", "Scalar", "Scalar"]')),
    _rule("layer norm", "native_layer_norm", formulas.layer_norm,
          example=("native_layer_norm", "[[4, 512, 768], [], [768], [768], []]",
                   '["float", "ScalarList", "float", "float", "Scalar"]')),
    _rule("layer norm backward", "native_layer_norm_backward", formulas.layer_norm_backward,
          example=("native_layer_norm_backward", "[[10, 8], [10, 8], [], [10, 1], [10, 1], [8], [8], []]",
                   '["float", "float", "ScalarList", "float", "float", "float", "float", "ScalarList"]')),
    _rule("rms norm", "_fused_rms_norm", formulas.rms_norm,
          example=("_fused_rms_norm", "[[10, 8], [], [8], []]", '["float", "ScalarList", "float", ""]')),
    _rule("rms norm backward", "_fused_rms_norm_backward", formulas.rms_norm_backward,
          example=("_fused_rms_norm_backward", "[[10, 8], [10, 8], [], [10, 1], [8], []]",
                   '["float", "float", "ScalarList", "float", "float", "ScalarList"]')),
    _pointwise_rule("neg abs exp exp2 expm1 log log1p log2 sqrt rsqrt reciprocal sin cos tanh erf sign "
                    "floor ceil round relu square cumsum", 1, example=("exp", "[[4, 512, 10000]]", '["float"]')),
    _pointwise_rule("add sub rsub mul pow maximum minimum clamp_min clamp_max clamp remainder", 1, 2,
                    example=("mul", "[[4, 512, 768], [4, 512, 1]]", '["float", "float"]')),
    _pointwise_rule("div", 1, 2, "float", example=("div", "[[16, 8], []]", '["c10::BFloat16", "Scalar"]')),
    _pointwise_rule("addcmul addcdiv", 2, 3,
                    example=("addcmul_", "[[768], [768], [768], []]", '["float", "float", "float", "Scalar"]')),
    # start + weight * (end - start)
    _pointwise_rule("lerp", 3, 3, example=("lerp_", "[[768], [768], []]", _X)),
    # 1 / (1 + exp(-x)); times x; x / 2 * (1 + erf(x / sqrt(2))), the fewer of gelu's two formulas.
    _pointwise_rule("sigmoid", 4, example=("sigmoid", "[[4, 8]]", '["float"]')),
    _pointwise_rule("silu gelu", 5, example=("silu", "[[4, 8]]", f"[{_BF16}]")),
    # dy * (1 - y) * y; dy * (1 - y * y)
    _pointwise_rule("sigmoid_backward tanh_backward", 3, 2,
                    example=("sigmoid_backward", "[[4, 8], [4, 8]]", '["float", "float"]')),
    # dy * s * (1 + x * (1 - s)), s four; dy * (P + x * p), the distribution P four and its density p four.
    _pointwise_rule("silu_backward", 9, 2, example=("silu_backward", "[[4, 8], [4, 8]]", '["float", "float"]')),
    _pointwise_rule("gelu_backward", 11, 2,
                    example=("gelu_backward", "[[4, 8], [4, 8], []]", '["float", "float", ""]')),
    _pointwise_rule("threshold_backward masked_fill", 0, 2,
                    example=("masked_fill_", "[[4, 12, 8, 8], [8, 8], []]", '["float", "bool", "Scalar"]')),
    _pointwise_rule("triu tril flip roll bitwise_not", 0, example=("tril", "[[512, 512], []]", '["bool", "Scalar"]')),
    _pointwise_rule("where", 0, 3, example=("where", "[[1, 8, 8], [4, 2, 8, 8], []]", '["bool", "float", "float"]')),
    _pointwise_rule("eq ne lt le gt ge logical_and logical_or logical_xor", 0, 2, "bool",
                    example=("ge", "[[512, 1], [1, 512]]", '["long int", "long int"]')),
    _pointwise_rule("isnan isinf isneginf isposinf isfinite logical_not", 0, 1, "bool",
                    example=("isnan", "[[512]]", '["float"]')),
    # clone, contiguous and _to_copy make their copy by calling copy_.
    _rule("copy", "copy_", formulas.copy,
          example=("copy_", "[[16, 8], [16, 8], []]", '["c10::BFloat16", "float", "Scalar"]')),
    _rule("fill", "fill_ zero_ normal_ uniform_ bernoulli_ random_ exponential_", formulas.fill,
          example=("fill_", "[[768, 3072], []]", '["float", "Scalar"]')),
    _rule("dropout", "native_dropout", formulas.dropout, example=("native_dropout", "[[16, 8], [], []]",
                                                          '["float", "Scalar", "Scalar"]')),
    _rule("dropout backward", "native_dropout_backward", formulas.dropout_backward,
          example=("native_dropout_backward", "[[16, 8], [16, 8], []]", '["float", "bool", "Scalar"]')),
    _rule("reduction", "sum mean amax amin max min prod argmax argmin any all", partial(formulas.reduction, flops=1),
          example=("sum", "[[4, 12, 512, 512], [], [], []]", '["float", "ScalarList", "Scalar", ""]')),
    # The mean is one; a subtraction, a square and a sum. A norm: squares and their sum.
    _rule("reduction", "var std var_mean", partial(formulas.reduction, flops=4),
          example=("var", "[[16, 8], [], [], []]", '["float", "ScalarList", "Scalar", "Scalar"]')),
    _rule("reduction", "linalg_vector_norm norm", partial(formulas.reduction, flops=2),
          example=("linalg_vector_norm", "[[16, 8], [], [], [], []]", '["float", "Scalar", "", "Scalar", ""]')),
    _rule("embedding", "embedding", partial(formulas.rows, index=1),
          example=("embedding", "[[20, 8], [16], [], [], []]", '["float", "long int", "Scalar", "Scalar", "Scalar"]')),
    _rule("embedding", "index_select", partial(formulas.rows, index=2),
          example=("index_select", "[[10000, 768], [], [2048]]", '["float", "Scalar", "long int"]')),
    _rule("embedding backward", "embedding_dense_backward", formulas.rows_backward,
          example=("embedding_dense_backward", "[[16, 8], [16], [], [], []]",
                   '["float", "long int", "Scalar", "Scalar", "Scalar"]')),
    _rule("gather", "gather", formulas.gather_work, example=("gather", "[[4, 512, 10000], [], [4, 512, 1], []]",
                                                '["float", "Scalar", "long int", "Scalar"]')),
    _rule("scatter", "scatter_", partial(formulas.scatter, adds=False),
          example=("scatter_", "[[4, 512, 100], [], [4, 512, 1], []]", '["float", "Scalar", "long int", "Scalar"]')),
    _rule("scatter", "scatter_add_", partial(formulas.scatter, adds=True),
          example=("scatter_add_", "[[4, 512, 100], [], [4, 512, 1], [4, 512, 1]]",
                   '["float", "Scalar", "long int", "float"]')),
    _rule("loss", "nll_loss_forward", formulas.loss,
          example=("nll_loss_forward", "[[16, 8], [16], [], [], []]", '["float", "long int", "", "Scalar", "Scalar"]')),
    _rule("loss backward", "nll_loss_backward", formulas.loss_backward,
          example=("nll_loss_backward", "[[], [16, 8], [16], [], [], [], []]",
                   '["float", "float", "long int", "", "Scalar", "Scalar", "float"]')),
    _rule("concatenation", "cat _cat stack", formulas.concatenation,
          example=("cat", "[[[4, 12, 512, 32], [4, 12, 512, 32]], []]", '["TensorList", "Scalar"]')),
    _rule("foreach", "_foreach_add_ _foreach_add _foreach_sub_ _foreach_sub _foreach_mul_ _foreach_mul _foreach_div_ "
          "_foreach_div _foreach_sqrt_ _foreach_sqrt _foreach_neg_ _foreach_neg _foreach_pow_ _foreach_pow "
          "_foreach_reciprocal_ _foreach_maximum_ _foreach_exp_ _amp_foreach_non_finite_check_and_unscale_",
          partial(formulas.foreach, flops=1),
          example=("_foreach_mul_", "[[[8, 4], [4]], []]", '["TensorList", "Scalar"]')),
    _rule("foreach", "_foreach_addcmul_ _foreach_addcmul _foreach_addcdiv_ _foreach_addcdiv",
          partial(formulas.foreach, flops=2),
          example=("_foreach_addcdiv_", "[[[8, 4]], [[8, 4]], [[8, 4]], []]",
                   '["TensorList", "TensorList", "TensorList", ""]')),
    _rule("foreach", "_foreach_lerp_ _foreach_lerp", partial(formulas.foreach, flops=3),
          example=("_foreach_lerp_", "[[[8, 4]], [[8, 4]], []]", '["TensorList", "TensorList", "Scalar"]')),
    _rule("foreach", "_foreach_norm", partial(formulas.foreach, flops=2, writes=False),
          example=("_foreach_norm", "[[[8, 4]], [], []]", '["TensorList", "Scalar", ""]')),
    _rule("foreach fill", "_foreach_zero_", formulas.foreach_zero,
          example=("_foreach_zero_", "[[[8, 4]]]", '["TensorList"]')),
    _rule("fused optimizer", "_fused_adamw_ _fused_adam_", formulas.adamw,
          example=("_fused_adamw_", "[[[8, 4]], [[8, 4]], [[8, 4]], [[8, 4]], [], [[]]]",
                   '["TensorList", "TensorList", "TensorList", "TensorList", "TensorList", "TensorList"]')),
)  # fmt: skip


# FLOPs and bytes of an operator call, from what a trace recorded of it.


_RULES: dict[str, OperatorRule] = {name: rule for rule in OPERATOR_WORK_RULES for name in rule.operators}
_NOT_FORESEEN = (Unknown, ArithmeticError, LookupError, TypeError, ValueError)
"""What a formula may raise: Unknown, by rule; the others where a damaged record is one that no formula foresees."""


def operator_rule(operator: str) -> OperatorRule | None:
    """The rule that counts this operator's work, or None."""
    return _RULES.get(operator)


def is_product(operator: str) -> bool:
    """Whether the operator's FLOPs are those of matrix products; fused attention and convolutions have them too."""
    rule = _RULES.get(operator)
    return rule is not None and rule.multiplies


def recorded_call(
    operator: str,
    shapes: str | None,
    dtypes: str | None,
    *,
    values: str | None = None,
    list_element_bytes: int | None = None,
) -> OperatorCall | None:
    """The call that a trace recorded; None for operators without a rule and for records that cannot be read.

    `shapes`, `dtypes`, `values`: the JSON texts of Kineto's "Input Dims", "Input type" and "Concrete Inputs".
    `list_element_bytes`: bytes of an element of tensors in lists, whose dtype Kineto does not record, and of a matrix
    product's tensors where there are no dtypes at all, as in a capture of emit_nvtx.
    """
    countable = dtypes or (list_element_bytes and is_product(operator))
    if operator not in _RULES or not shapes or not countable:
        return None
    return read_call(operator, shapes, dtypes, values, list_element_bytes)


def call_work(call: OperatorCall, causal: CausalConvention = "half") -> Work | None:
    """The work of a call; None where no rule counts it, or the record leaves it open.

    What ran is counted, recomputation included: the result's convention says so. Fused attention counts as `causal`
    says; written out, it is two full products.
    """
    rule = _RULES.get(call.operator)
    try:
        work = rule.work(call, causal) if rule is not None else None
    except _NOT_FORESEEN:
        return None
    convention = Convention(causal=causal, recompute=True)
    return work and Work(
        flops=work.flops, bytes_read=work.bytes_read, bytes_written=work.bytes_written, convention=convention
    )


def call_sight(call: OperatorCall) -> Sight | None:
    """Which keys the queries of fused attention see; None for other operators, and where the record leaves it open."""
    rule = _RULES.get(call.operator)
    try:
        return rule.attention.sight(call) if rule is not None and rule.attention is not None else None
    except _NOT_FORESEEN:
        return None


def operator_work(
    operator: str,
    shapes: str | None,
    dtypes: str | None,
    *,
    values: str | None = None,
    list_element_bytes: int | None = None,
    causal: CausalConvention = "half",
) -> Work | None:
    """The work of one call as `recorded_call` takes it and `call_work` counts it."""
    call = recorded_call(operator, shapes, dtypes, values=values, list_element_bytes=list_element_bytes)
    return call_work(call, causal) if call is not None else None
