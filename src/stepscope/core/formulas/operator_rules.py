"""Which formula of operator_formulas.py counts which operator: data, each rule with an example."""

from collections.abc import Callable
from functools import partial

import msgspec

from stepscope.core.formulas import SOFTMAX_FLOPS, CausalConvention, Convention, Work
from stepscope.core.formulas import operator_formulas as formulas
from stepscope.core.formulas.operator_formulas import (
    Convolution,
    FusedAttention,
    OperatorCall,
    Sight,
    Unknown,
    read_call,
)

Formula = Callable[[OperatorCall, CausalConvention], Work]


class OperatorRule(msgspec.Struct, frozen=True, kw_only=True):
    """Operators whose work follows one formula. An operator that calls another of the same rule leaves it the work, and
    a product one that calls another product.

    The example is a call and its arguments: `bf16[8,64]`, a tensor; `[8,4][2]`, a list of tensors, `[?]` where their
    shapes are not recorded; `#2`, a number or a truth value, `(1,1)`, several, `#` and `()` where their values are not
    recorded; `-`, an argument left out. `*3` repeats an argument.
    """

    name: str
    operators: tuple[str, ...]
    work: Formula
    example: str
    multiplies: bool = False
    attention: FusedAttention | None = None
    """The places of fused attention's arguments."""


def _rule(
    name: str, operators: str, work: Formula, example: str, *, multiplies: bool = False,
    attention: FusedAttention | None = None,
) -> OperatorRule:  # fmt: skip
    """A rule for operators of PyTorch's, unless the name says whose they are."""
    return OperatorRule(
        name=name,
        operators=tuple(each if "::" in each else f"aten::{each}" for each in operators.split()),
        work=work,
        example=example,
        multiplies=multiplies,
        attention=attention,
    )


_product = partial(_rule, multiplies=True)


def _convolution(operators: str, places: Convolution, example: str) -> OperatorRule:
    return _product("convolution", operators, places.work, example)


def _attention(operators: str, places: FusedAttention, example: str) -> OperatorRule:
    name = "attention backward" if places.out else "attention"
    return _product(name, operators, places.work, example, attention=places)


def _pointwise(operators: str, example: str, flops: int, operands: int = 1, result: str = "") -> OperatorRule:
    work = partial(formulas.pointwise, flops=flops, operands=operands, result=result)
    return _rule("pointwise", " ".join(f"{each} {each}_" for each in operators.split()), work, example)


_PRODUCTS: tuple[OperatorRule, ...] = (
    _product("matrix product", "mm bmm mv dot vdot stepscope::chosen_product", formulas.product,
        "bmm fp32[48,512,64] fp32[48,64,512]"),
    _product("matrix product", "addmm baddbmm addmv _addmm_activation addmm_ baddbmm_ addmv_",
        partial(formulas.product, first=1, bias=0), "addmm bf16[3072] bf16[2048,768] bf16[768,3072] #*2"),
    _product("matrix product", "addbmm addbmm_", partial(formulas.product, first=1, bias=0, sums_batch=True),
        "addbmm fp32[16,8] fp32[4,16,32] fp32[4,32,8] #*2"),
    _product("matrix product", "addr addr_", formulas.outer_product, "addr fp32[16,8] fp32[16] fp32[8] #*2"),
    _product("matrix product", "_int_mm", partial(formulas.product, result_bytes=4), "_int_mm int8[32,64] int8[64,16]"),
    _product("matrix product", "_scaled_mm _scaled_mm_v2", formulas.scaled_product,
        "_scaled_mm fp8[32,64] fp8[64,16] fp32[]*2 -*2 #*2"),
    _product("matrix product", "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2", formulas.grouped_product,
        "_grouped_mm bf16[512,64] bf16[8,64,96] int32[8] -*2"),
    _product("matrix product", "_foreach_mm", formulas.products_of_lists, "_foreach_mm [8,4][2,3] [4,16][3,5]"),
    _product("matrix product",
        "linear mkldnn_linear mkldnn::_linear_pointwise aiter::gemm_a16w16 vllm::rocm_unquantized_gemm",
        formulas.linear, "linear fp32[4,16,32] fp32[8,32] fp32[8]"),
    _product("matrix product", "mkl::_mkl_linear", partial(formulas.linear, weight=2, bias=3),
        "mkl::_mkl_linear fp32[64,32] fp32[1] fp32[8,32] fp32[8] #"),
    _product("matrix product", "_weight_int8pack_mm", partial(formulas.linear, bias=2),
        "_weight_int8pack_mm bf16[16,64] int8[32,64] bf16[32]"),
    _product("matrix product",
        "_weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros",
        partial(formulas.linear, bias=3, weights_a_byte=2),
        "_weight_int4pack_mm bf16[16,1024] int32[4,8,32,4] # bf16[8,32,2]"),
    _product("encoder", "_native_multi_head_attention", partial(formulas.encoder, weights=(5, 7), key=1),
        "_native_multi_head_attention fp32[2,6,8]*3 #*2 fp32[24,8] fp32[24] fp32[8,8] fp32[8] - #*2 -"),
    _product("encoder", "_transformer_encoder_layer_fwd", partial(formulas.encoder, weights=(3, 5, 14, 16)),
        "_transformer_encoder_layer_fwd fp32[2,6,8] #*2 fp32[24,8] fp32[24] fp32[8,8] fp32[8] #*3 fp32[8]*4 "
        "fp32[16,8] fp32[16] fp32[8,16] fp32[8] -*2"),
    _product("matrix product", "mkldnn_linear_backward_input",
        partial(formulas.linear_backward, grad=1, weight=2, other=None),
        "mkldnn_linear_backward_input () fp32[64,8] fp32[8,32]"),
    _product("matrix product", "mkldnn_linear_backward_weights",
        partial(formulas.linear_backward, grad=0, weight=2, other=1),
        "mkldnn_linear_backward_weights fp32[64,8] fp32[64,32] fp32[8,32] #"),
    _product("sparse product", "_sparse_semi_structured_linear",
        partial(formulas.sparse_product, sparse=1, dense=0, transposed=True),
        "_sparse_semi_structured_linear fp16[16,64] fp16[32,32] int16[32,4] -*3"),
    _product("sparse product", "_sparse_semi_structured_mm",
        partial(formulas.sparse_product, sparse=0, dense=2, transposed=False),
        "_sparse_semi_structured_mm fp16[32,32] int16[32,4] fp16[64,16] -"),
    _product("sparse product", "_sparse_semi_structured_addmm",
        partial(formulas.sparse_product, sparse=1, dense=3, transposed=False),
        "_sparse_semi_structured_addmm fp16[32] fp16[32,32] int16[32,4] fp16[64,16] #*2 -"),
    _convolution("convolution _convolution convolution_overrideable",
        Convolution(stride=3, padding=4, dilation=5, transposed=6, output_padding=7, groups=8),
        "convolution fp32[8,3,32,32] fp32[16,3,3,3] fp32[16] (1,1)*3 #False (0,0) #1"),
    _convolution("cudnn_convolution", Convolution(padding=2, stride=3, dilation=4),
        "cudnn_convolution bf16[8,3,32,32] bf16[16,3,3,3] (1,1) (2,2) (1,1) #1 #False*2 #True"),
    _convolution("cudnn_convolution_relu miopen_convolution_relu", Convolution(stride=3, padding=4, dilation=5),
        "cudnn_convolution_relu bf16[8,3,32,32] bf16[16,3,3,3] bf16[16] (2,2) (1,1)*2 #1"),
    _convolution("cudnn_convolution_add_relu miopen_convolution_add_relu", Convolution(stride=5, padding=6, dilation=7),
        "cudnn_convolution_add_relu bf16[8,3,32,32] bf16[16,3,3,3] bf16[8,16,16,16] #1. bf16[16] (2,2) (1,1)*2 #1"),
    _convolution("miopen_convolution mkldnn_convolution miopen_depthwise_convolution mkldnn::_convolution_pointwise",
        Convolution(padding=3, stride=4, dilation=5),
        "miopen_convolution bf16[8,3,32,32] bf16[16,3,3,3] - (1,1) (2,2) (1,1) #1 #False*2"),
    _convolution("cudnn_convolution_transpose",
        Convolution(padding=2, output_padding=3, stride=4, dilation=5, groups=6, transposed=True),
        "cudnn_convolution_transpose bf16[8,16,14,14] bf16[16,4,3,3] (1,1)*2 (2,2) (1,1) #2 #False*2 #True"),
    _convolution("miopen_convolution_transpose",
        Convolution(padding=3, output_padding=4, stride=5, dilation=6, groups=7, transposed=True),
        "miopen_convolution_transpose bf16[8,16,14,14] bf16[16,8,2,2] - (0,0)*2 (2,2) (1,1) #1 #False*2"),
    _convolution("_conv_depthwise2d conv_depthwise3d slow_conv_dilated2d slow_conv_dilated3d",
        Convolution(stride=4, padding=5, dilation=6),
        "_conv_depthwise2d fp32[8,16,32,32] fp32[16,1,3,3] (3,3) - (1,1)*3"),
    _convolution("_slow_conv2d_forward thnn_conv2d slow_conv3d_forward slow_conv3d", Convolution(stride=4, padding=5),
        "_slow_conv2d_forward fp32[8,3,32,32] fp32[16,3,3,3] (3,3) - (2,2) (1,1)"),
    _convolution("slow_conv_transpose2d slow_conv_transpose3d",
        Convolution(stride=4, padding=5, output_padding=6, dilation=7, transposed=True),
        "slow_conv_transpose2d fp32[8,16,14,14] fp32[16,8,2,2] (2,2) - (2,2) (0,0)*2 (1,1)"),
    _convolution("_nnpack_spatial_convolution", Convolution(padding=3, stride=4),
        "_nnpack_spatial_convolution fp32[8,3,32,32] fp32[16,3,3,3] - (1,1) (2,2)"),
    _product("convolution backward", "convolution_backward convolution_backward_overrideable",
        formulas.convolution_backward,
        "convolution_backward fp32[8,16,32,32] fp32[8,3,32,32] fp32[16,3,3,3] (16) (1,1)*3 #False (0,0) #1 "
        "(False,True,True)"),
    _product("convolution backward", "_slow_conv2d_backward",
        partial(formulas.convolution_backward, transposed=False, wanted=6),
        "_slow_conv2d_backward fp32[8,16,32,32] fp32[8,3,32,32] fp32[16,3,3,3] (3,3) (1,1)*2 (False,True,True)"),
)  # fmt: skip

_ATTENTION: tuple[OperatorRule, ...] = (
    # Only where it calls no other product of the trace does the outermost operator count.
    _attention("scaled_dot_product_attention", FusedAttention(bias=3, causal=(5,)),
        "scaled_dot_product_attention bf16[2,12,512,64]*3 - #0. #False - #False"),
    _attention("_scaled_dot_product_flash_attention", FusedAttention(causal=(4, 7)),
        "_scaled_dot_product_flash_attention bf16[2,12,512,64]*3 #*4"),
    _attention("_scaled_dot_product_cudnn_attention", FusedAttention(bias=3, causal=(6, 4)),
        "_scaled_dot_product_cudnn_attention bf16[2,12,512,64]*3 - #True #0. #True #False -"),
    _attention("_scaled_dot_product_efficient_attention", FusedAttention(bias=3, causal=(6,)),
        "_scaled_dot_product_efficient_attention fp32[2,12,512,64]*3 fp32[2,12,512,512] #*4"),
    _attention("_scaled_dot_product_fused_attention_overrideable", FusedAttention(bias=3, causal=(5,)),
        "_scaled_dot_product_fused_attention_overrideable bf16[2,12,512,64]*3 - #0. #True #False -"),
    _attention("_scaled_dot_product_flash_attention_for_cpu", FusedAttention(bias=5, causal=(4,)),
        "_scaled_dot_product_flash_attention_for_cpu fp32[2,12,512,64]*3 #*2 -*2"),
    _attention("_flash_attention_forward",
        FusedAttention(heads_at=2, lengths=3, longest=5, causal=(8,), window=11, elsewhere=(13, 15), from_last=True),
        "_flash_attention_forward bf16[2,512,12,64]*3 -*2 #*2"),
    _attention("_flash_attention_forward_no_dropout_inplace",
        FusedAttention(query=1, heads_at=2, lengths=4, longest=6, causal=(9,), window=12, elsewhere=(14, 16),
            from_last=True),
        "_flash_attention_forward_no_dropout_inplace bf16[2,512,12,64]*4 -*2 #512*2 #0. #False*2"),
    _attention("_efficient_attention_forward",
        FusedAttention(heads_at=2, bias=3, lengths=4, longest=6, mask_type=(9, 8), elsewhere=(12,), one_window=13),
        "_efficient_attention_forward fp32[2,512,12,64]*3 -*3 #"),
    _attention("_cudnn_attention_forward", FusedAttention(bias=3, lengths=4, longest=6, causal=(10,)),
        "_cudnn_attention_forward bf16[2,12,512,64]*3 -*3 #"),
    _attention("stepscope::flash_attention_forward", FusedAttention(causal=(3,), one_window=5, lengths=6, bias=10),
        "stepscope::flash_attention_forward bf16[2,12,512,64]*3 #*2 -*2"),
    _attention("flash_attn::_flash_attn_forward", FusedAttention(heads_at=2, causal=(5,), window=6, from_last=True),
        "flash_attn::_flash_attn_forward bf16[2,512,12,64]*3 #0. #0.125 #True #-1*2 #0. - #False"),
    _attention("flash_attn::_flash_attn_varlen_forward",
        FusedAttention(heads_at=2, lengths=3, longest=5, causal=(9,), window=10, elsewhere=(15, 16, 17),
            from_last=True),
        "flash_attn::_flash_attn_varlen_forward bf16[1024,12,64]*3 int32[3]*2 #512*2 #0. #0.125 #True #-1*2 #0. - "
        "#False -*3 #False"),
    # FlashAttention-3, and as SGLang builds it: key and value of a cache stand elsewhere.
    _attention("flash_attn_3::fwd sgl_kernel::fwd",
        FusedAttention(heads_at=2, lengths=7, longest=12, causal=(24,), window=25,
            elsewhere=(3, 4, 5, 9, 10, 11, 14, 15, 16), from_last=True),
        "flash_attn_3::fwd bf16[2,512,12,64]*3 -*21 #False #-1*2"),
    _attention("stepscope::flash_attention_backward",
        FusedAttention(query=2, out=5, sums=6, causal=(7,), one_window=9, lengths=10, bias=14),
        "stepscope::flash_attention_backward bf16[2,12,512,64] - bf16[2,12,512,64]*4 fp32[2,12,512] #*2 -*2"),
    _attention("_scaled_dot_product_flash_attention_backward",
        FusedAttention(query=1, out=4, sums=5, lengths=6, longest=8, causal=(11,)),
        "_scaled_dot_product_flash_attention_backward bf16[2,12,512,64]*5 fp32[2,12,512] -*2"),
    _attention("_scaled_dot_product_fused_attention_overrideable_backward",
        FusedAttention(query=1, bias=4, out=6, sums=7, lengths=8, longest=10, causal=(13,)),
        "_scaled_dot_product_fused_attention_overrideable_backward bf16[2,12,512,64]*4 - () bf16[2,12,512,64] "
        "fp32[2,12,512] -*2 #512*2 #0. #False"),
    _attention("_scaled_dot_product_flash_attention_for_cpu_backward",
        FusedAttention(query=1, out=4, sums=5, causal=(7,), bias=8),
        "_scaled_dot_product_flash_attention_for_cpu_backward fp32[2,12,512,64]*5 fp32[2,12,512] #*2 -*2"),
    _attention("_flash_attention_backward",
        FusedAttention(query=1, heads_at=2, out=4, sums=5, lengths=6, longest=8, causal=(11,), window=15,
            from_last=True),
        "_flash_attention_backward bf16[2,512,12,64]*5 fp32[2,12,512] -*2"),
    _attention("_scaled_dot_product_efficient_attention_backward",
        FusedAttention(query=1, bias=4, out=5, sums=6, causal=(11,)),
        "_scaled_dot_product_efficient_attention_backward fp32[2,12,512,64]*4 - fp32[2,12,512,64] fp32[2,12,512]"),
    _attention("_efficient_attention_backward",
        FusedAttention(query=1, heads_at=2, bias=4, out=5, lengths=6, longest=8, sums=10, mask_type=(14,),
            one_window=18),
        "_efficient_attention_backward fp32[2,512,12,64]*4 - fp32[2,512,12,64] -*2 #*2 fp32[2,12,512]"),
    _attention("_scaled_dot_product_cudnn_attention_backward _cudnn_attention_backward",
        FusedAttention(query=1, out=4, sums=5, bias=8, lengths=9, longest=11, causal=(14, 11)),
        "_scaled_dot_product_cudnn_attention_backward bf16[2,12,512,64]*5 fp32[2,12,512,1] int64[]*2 -*2"),
    _attention("flash_attn::_flash_attn_backward",
        FusedAttention(query=1, heads_at=2, out=4, sums=5, causal=(11,), window=12, from_last=True),
        "flash_attn::_flash_attn_backward bf16[2,512,12,64]*5 fp32[2,12,512] bf16[2,512,12,64]*3 #0. #0.125 #True "
        "#-1*2"),
    _attention("flash_attn::_flash_attn_varlen_backward",
        FusedAttention(query=1, heads_at=2, out=4, sums=5, lengths=9, longest=11, causal=(15,), window=16,
            from_last=True),
        "flash_attn::_flash_attn_varlen_backward bf16[1024,12,64]*5 fp32[12,1024] -*3 int32[3]*2 #512*2 #0. "
        "#0.125 #False"),
    _attention("flash_attn_3::bwd",
        FusedAttention(query=1, heads_at=2, out=4, sums=5, lengths=9, longest=13, causal=(16,), window=17,
            elsewhere=(11, 12), from_last=True),
        "flash_attn_3::bwd bf16[2,512,12,64]*5 fp32[2,12,512] -*9 #0.125 #True #-1*2"),
)  # fmt: skip

OPERATOR_WORK_RULES: tuple[OperatorRule, ...] = (
    *_PRODUCTS,
    *_ATTENTION,
    _rule("softmax", "_softmax _log_softmax", partial(formulas.elementwise, flops=SOFTMAX_FLOPS),
        "_softmax fp32[4,12,512,512] #*2"),
    _rule("softmax backward", "_softmax_backward_data _log_softmax_backward_data", formulas.softmax_backward,
        "_softmax_backward_data fp32[8,16]*2 #*2"),
    _rule("layer norm", "native_layer_norm", formulas.layer_norm, "native_layer_norm fp32[4,512,768] () fp32[768]*2 #"),
    _rule("layer norm backward", "native_layer_norm_backward", formulas.layer_norm_backward,
        "native_layer_norm_backward fp32[10,8]*2 () fp32[10,1]*2 fp32[8]*2 ()"),
    _rule("rms norm", "_fused_rms_norm", formulas.rms_norm, "_fused_rms_norm fp32[10,8] () fp32[8] -"),
    _rule("rms norm backward", "_fused_rms_norm_backward", formulas.rms_norm_backward,
        "_fused_rms_norm_backward fp32[10,8]*2 () fp32[10,1] fp32[8] ()"),
    _pointwise("neg abs exp exp2 expm1 log log1p log2 sqrt rsqrt reciprocal sin cos tanh erf sign floor ceil round "
        "relu square cumsum", "exp fp32[4,512,10000]", 1),
    _pointwise("add sub rsub mul pow maximum minimum clamp_min clamp_max clamp remainder",
        "mul fp32[4,512,768] fp32[4,512,1]", 1, 2),
    _pointwise("div", "div bf16[16,8] #", 1, 2, "float"),
    _pointwise("addcmul addcdiv", "addcmul_ fp32[768]*3 #", 2, 3),
    # start + weight * (end - start)
    _pointwise("lerp", "lerp_ fp32[768]*2 #", 3, 3),
    # 1 / (1 + exp(-x)); times x; x / 2 * (1 + erf(x / sqrt(2))), the fewer of gelu's two formulas.
    _pointwise("sigmoid", "sigmoid fp32[4,8]", 4),
    _pointwise("silu gelu", "silu bf16[4,8]", 5),
    # dy * (1 - y) * y; dy * (1 - y * y)
    _pointwise("sigmoid_backward tanh_backward", "sigmoid_backward fp32[4,8]*2", 3, 2),
    # dy * s * (1 + x * (1 - s)), s four; dy * (P + x * p), the distribution P four and its density p four.
    _pointwise("silu_backward", "silu_backward fp32[4,8]*2", 9, 2),
    _pointwise("gelu_backward", "gelu_backward fp32[4,8]*2 -", 11, 2),
    _pointwise("threshold_backward masked_fill", "masked_fill_ fp32[4,12,8,8] bool[8,8] #", 0, 2),
    _pointwise("triu tril flip roll bitwise_not", "tril bool[512,512] #", 0),
    _pointwise("where", "where bool[1,8,8] fp32[4,2,8,8] fp32[]", 0, 3),
    _pointwise("eq ne lt le gt ge logical_and logical_or logical_xor", "ge int64[512,1] int64[1,512]", 0, 2, "bool"),
    _pointwise("isnan isinf isneginf isposinf isfinite logical_not", "isnan fp32[512]", 0, 1, "bool"),
    # clone, contiguous and _to_copy make their copy by calling copy_.
    _rule("copy", "copy_", formulas.copy, "copy_ bf16[16,8] fp32[16,8] #"),
    _rule("fill", "fill_ zero_ normal_ uniform_ bernoulli_ random_ exponential_", formulas.fill,
        "fill_ fp32[768,3072] #"),
    _rule("dropout", "native_dropout", formulas.dropout, "native_dropout fp32[16,8] #*2"),
    _rule("dropout backward", "native_dropout_backward", partial(formulas.elementwise, flops=2, operands=2),
        "native_dropout_backward fp32[16,8] bool[16,8] #"),
    _rule("reduction", "sum mean amax amin max min prod argmax argmin any all", partial(formulas.reduction, flops=1),
        "sum fp32[4,12,512,512] () # -"),
    # The mean is one; a subtraction, a square and a sum. A norm: squares and their sum.
    _rule("reduction", "var std var_mean", partial(formulas.reduction, flops=4), "var fp32[16,8] () #*2"),
    _rule("reduction", "linalg_vector_norm norm", partial(formulas.reduction, flops=2),
        "linalg_vector_norm fp32[16,8] # - # -"),
    _rule("embedding", "embedding", partial(formulas.rows, index=1), "embedding fp32[20,8] int64[16] #*3"),
    _rule("embedding", "index_select", partial(formulas.rows, index=2), "index_select fp32[10000,768] # int64[2048]"),
    _rule("embedding backward", "embedding_dense_backward", partial(formulas.elementwise, flops=1, operands=2),
        "embedding_dense_backward fp32[16,8] int64[16] #*3"),
    _rule("gather", "gather", formulas.gather, "gather fp32[4,512,10000] # int64[4,512,1] #"),
    _rule("scatter", "scatter_", partial(formulas.scatter, adds=False), "scatter_ fp32[4,512,100] # int64[4,512,1] #"),
    _rule("scatter", "scatter_add_", partial(formulas.scatter, adds=True),
        "scatter_add_ fp32[4,512,100] # int64[4,512,1] fp32[4,512,1]"),
    _rule("loss", "nll_loss_forward", formulas.loss, "nll_loss_forward fp32[16,8] int64[16] - #*2"),
    _rule("loss backward", "nll_loss_backward", partial(formulas.loss, backward=True),
        "nll_loss_backward fp32[] fp32[16,8] int64[16] - #*2 fp32[]"),
    _rule("concatenation", "cat _cat stack", formulas.foreach, "cat [4,12,512,32][4,12,512,32] #"),
    _rule("foreach",
        "_foreach_add_ _foreach_add _foreach_sub_ _foreach_sub _foreach_mul_ _foreach_mul _foreach_div_ "
        "_foreach_div _foreach_sqrt_ _foreach_sqrt _foreach_neg_ _foreach_neg _foreach_pow_ _foreach_pow "
        "_foreach_reciprocal_ _foreach_maximum_ _foreach_exp_ _amp_foreach_non_finite_check_and_unscale_",
        partial(formulas.foreach, flops=1), "_foreach_mul_ [8,4][4] #"),
    _rule("foreach", "_foreach_addcmul_ _foreach_addcmul _foreach_addcdiv_ _foreach_addcdiv",
        partial(formulas.foreach, flops=2), "_foreach_addcdiv_ [8,4]*3 -"),
    _rule("foreach", "_foreach_lerp_ _foreach_lerp", partial(formulas.foreach, flops=3), "_foreach_lerp_ [8,4]*2 #"),
    _rule("foreach", "_foreach_norm", partial(formulas.foreach, flops=2, writes=False), "_foreach_norm [8,4] # -"),
    _rule("foreach fill", "_foreach_zero_", partial(formulas.foreach, reads=False), "_foreach_zero_ [8,4]"),
    _rule("fused optimizer", "_fused_adamw_ _fused_adam_", formulas.adamw, "_fused_adamw_ [8,4]*4 [?] []"),
)  # fmt: skip


# FLOPs and bytes of an operator call, from what a trace recorded of it.


RULE_OF: dict[str, OperatorRule] = {name: rule for rule in OPERATOR_WORK_RULES for name in rule.operators}
"""The rule that counts an operator's work."""
_NOT_FORESEEN = (Unknown, ArithmeticError, LookupError, TypeError, ValueError)
"""What a formula may raise: Unknown, by rule; the others where a damaged record is one that no formula foresees."""


def is_product(operator: str) -> bool:
    """Whether the operator's FLOPs are those of matrix products; fused attention and convolutions have them too."""
    rule = RULE_OF.get(operator)
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
    if operator not in RULE_OF or not shapes or not countable:
        return None
    return read_call(operator, shapes, dtypes, values, list_element_bytes)


def call_work(call: OperatorCall, causal: CausalConvention = "half") -> Work | None:
    """The work of a call; None where no rule counts it, or the record leaves it open.

    What ran is counted, recomputation included: the result's convention says so. Fused attention counts as `causal`
    says; written out, it is two full formulas.
    """
    rule = RULE_OF.get(call.operator)
    try:
        work = rule.work(call, causal) if rule is not None else None
    except _NOT_FORESEEN:
        return None
    return work and msgspec.structs.replace(work, convention=Convention(causal=causal, recompute=True))


def call_sight(call: OperatorCall) -> Sight | None:
    """Which keys the queries of fused attention see; None for other operators, and where the record leaves it open."""
    rule = RULE_OF.get(call.operator)
    try:
        return rule.attention.sight(call) if rule is not None and rule.attention is not None else None
    except _NOT_FORESEEN:
        return None
