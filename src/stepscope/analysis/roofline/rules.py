"""Which formula counts which operator: data, each rule with an example. The formulas are in `operator_formulas`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from stepscope.analysis.roofline import formulas
from stepscope.analysis.roofline.calls import OperatorCall
from stepscope.core.work import CausalConvention, Work

Formula = Callable[[OperatorCall, CausalConvention], Work]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A call as Kineto records it: JSON texts."""

    operator: str
    shapes: str
    dtypes: str


@dataclass(frozen=True, kw_only=True)
class OperatorRule:
    """Operators whose work follows one formula. An operator that calls another of the same rule leaves it the work."""

    name: str
    operators: tuple[str, ...]
    work: Formula
    example: Example


def _named(name: str) -> str:
    """An operator of PyTorch's, unless the name says whose it is."""
    return name if "::" in name else f"aten::{name}"


def _rule(name: str, operators: str, work: Formula, *, example: tuple[str, str, str]) -> OperatorRule:
    operator, shapes, dtypes = example
    return OperatorRule(
        name=name, operators=tuple(map(_named, operators.split())), work=work,
        example=Example(operator=_named(operator), shapes=shapes, dtypes=dtypes),
    )  # fmt: skip


def _pointwise_rule(
    operators: str, flops: int, operands: int = 1, result: str = "", *, example: tuple[str, str, str]
) -> OperatorRule:
    work = partial(formulas.pointwise, flops=flops, operands=operands, result=result)
    return _rule("pointwise", " ".join(f"{each} {each}_" for each in operators.split()), work, example=example)


_X = '["float", "float", "Scalar"]'
_QKV = ", ".join(["[2, 12, 512, 64]"] * 3)
_BSHD = ", ".join(["[2, 512, 12, 64]"] * 3)
_BF16 = '"c10::BFloat16"'

OPERATOR_WORK_RULES: tuple[OperatorRule, ...] = (
    _rule("matrix product", "mm bmm mv dot vdot", formulas.product_work,
          example=("bmm", "[[48, 512, 64], [48, 64, 512]]", '["float", "float"]')),
    _rule("matrix product", "addmm baddbmm addmv _addmm_activation addmm_ baddbmm_",
          partial(formulas.product_work, first=1, bias=0),
          example=("addmm", "[[3072], [2048, 768], [768, 3072], [], []]",
                   f'[{_BF16}, {_BF16}, {_BF16}, "Scalar", "Scalar"]')),
    _rule("matrix product", "_scaled_mm", formulas.scaled_product,
          example=("_scaled_mm", "[[32, 64], [64, 16], [], [], [], [], [], []]",
                   '["c10::Float8_e4m3fn", "c10::Float8_e4m3fn", "float", "float", "", "", "Scalar", "Scalar"]')),
    _rule("convolution", "convolution _convolution convolution_overrideable cudnn_convolution_relu",
          partial(formulas.convolution, padding=4, stride=3, dilation=5),
          example=("convolution", "[[8, 3, 32, 32], [16, 3, 3, 3], [16], [1, 1], [1, 1], [1, 1], [], [0, 0], []]",
                   '["float", "float", "float", "ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", '
                   '"Scalar"]')),
    _rule("convolution", "cudnn_convolution", partial(formulas.convolution, padding=2, stride=3, dilation=4),
          example=("cudnn_convolution", "[[8, 3, 32, 32], [16, 3, 3, 3], [1, 1], [2, 2], [1, 1], [], [], [], []]",
                   f'[{_BF16}, {_BF16}, "ScalarList", "ScalarList", "ScalarList", "Scalar", "Scalar", "Scalar", '
                   '"Scalar"]')),
    _rule("convolution", "miopen_convolution mkldnn_convolution miopen_depthwise_convolution",
          partial(formulas.convolution, padding=3, stride=4, dilation=5),
          example=("miopen_convolution", "[[8, 3, 32, 32], [16, 3, 3, 3], [], [1, 1], [2, 2], [1, 1], [], [], []]",
                   f'[{_BF16}, {_BF16}, "", "ScalarList", "ScalarList", "ScalarList", "Scalar", "Scalar", "Scalar"]')),
    _rule("convolution", "_conv_depthwise2d conv_depthwise3d",
          partial(formulas.convolution, padding=5, stride=4, dilation=6),
          example=("_conv_depthwise2d", "[[8, 16, 32, 32], [16, 1, 3, 3], [3, 3], [], [1, 1], [1, 1], [1, 1]]",
                   '["float", "float", "ScalarList", "", "ScalarList", "ScalarList", "ScalarList"]')),
    _rule("convolution backward", "convolution_backward convolution_backward_overrideable",
          formulas.convolution_backward,
          example=("convolution_backward", "[[8, 16, 32, 32], [8, 3, 32, 32], [16, 3, 3, 3], [16], [1, 1], [1, 1], "
                   "[1, 1], [], [0, 0], [], [0, 1, 1]]",
                   '["float", "float", "float", "ScalarList", "ScalarList", "ScalarList", "ScalarList", "Scalar", '
                   '"ScalarList", "Scalar", "ScalarList"]')),
    _rule("attention", "_scaled_dot_product_flash_attention", formulas.attention_work,
          example=("_scaled_dot_product_flash_attention", f"[{_QKV}, [], [], [], []]",
                   f'[{_BF16}, {_BF16}, {_BF16}, "Scalar", "Scalar", "Scalar", "Scalar"]')),
    _rule("attention", "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
          partial(formulas.attention_work, bias=3),
          example=("_scaled_dot_product_efficient_attention", f"[{_QKV}, [2, 12, 512, 512], [], [], [], []]",
                   '["float", "float", "float", "float", "Scalar", "Scalar", "Scalar", "Scalar"]')),
    _rule("attention", "_scaled_dot_product_flash_attention_for_cpu", partial(formulas.attention_work, bias=5),
          example=("_scaled_dot_product_flash_attention_for_cpu", f"[{_QKV}, [], [], [], []]",
                   '["float", "float", "float", "Scalar", "Scalar", "", ""]')),
    _rule("attention", "_flash_attention_forward", partial(formulas.attention_work, heads_at=2, ragged=3),
          example=("_flash_attention_forward", f"[{_BSHD}, [], [], [], []]",
                   f'[{_BF16}, {_BF16}, {_BF16}, "", "", "Scalar", "Scalar"]')),
    _rule("attention", "_efficient_attention_forward", partial(formulas.attention_work, heads_at=2, bias=3, ragged=4),
          example=("_efficient_attention_forward", f"[{_BSHD}, [], [], [], []]",
                   '["float", "float", "float", "", "", "", "Scalar"]')),
    _rule("attention", "_cudnn_attention_forward", partial(formulas.attention_work, bias=3, ragged=4),
          example=("_cudnn_attention_forward", f"[{_QKV}, [], [], [], []]",
                   f'[{_BF16}, {_BF16}, {_BF16}, "", "", "", "Scalar"]')),
    # A window, which shapes do not tell, is counted as none.
    _rule("attention", "stepscope::flash_attention_forward", partial(formulas.attention_work, ragged=6),
          example=("stepscope::flash_attention_forward", f"[{_QKV}, [], [], [], []]",
                   f'[{_BF16}, {_BF16}, {_BF16}, "Scalar", "Scalar", "", ""]')),
    _rule("attention backward", "stepscope::flash_attention_backward",
          partial(formulas.attention_backward, operands=2, out=5, sums=6, ragged=10),
          example=("stepscope::flash_attention_backward",
                   f"[[2, 12, 512, 64], [], {_QKV}, [2, 12, 512, 64], [2, 12, 512], [], [], [], []]",
                   f'[{_BF16}, "", {_BF16}, {_BF16}, {_BF16}, {_BF16}, "float", "Scalar", "Scalar", "", ""]')),
    _rule("attention backward", "_scaled_dot_product_flash_attention_backward",
          partial(formulas.attention_backward, ragged=6),
          example=("_scaled_dot_product_flash_attention_backward",
                   f"[[2, 12, 512, 64], {_QKV}, [2, 12, 512, 64], [2, 12, 512], [], []]",
                   f'[{_BF16}, {_BF16}, {_BF16}, {_BF16}, {_BF16}, "float", "", ""]')),
    _rule("attention backward", "_scaled_dot_product_flash_attention_for_cpu_backward",
          partial(formulas.attention_backward, bias=8),
          example=("_scaled_dot_product_flash_attention_for_cpu_backward",
                   f"[[2, 12, 512, 64], {_QKV}, [2, 12, 512, 64], [2, 12, 512], [], [], [], []]",
                   '["float", "float", "float", "float", "float", "float", "Scalar", "Scalar", "", ""]')),
    _rule("attention backward", "_flash_attention_backward", partial(formulas.attention_backward, heads_at=2, ragged=6),
          example=("_flash_attention_backward",
                   f"[[2, 512, 12, 64], {_BSHD}, [2, 512, 12, 64], [2, 12, 512], [], []]",
                   f'[{_BF16}, {_BF16}, {_BF16}, {_BF16}, {_BF16}, "float", "", ""]')),
    _rule("attention backward", "_scaled_dot_product_efficient_attention_backward",
          partial(formulas.attention_backward, bias=4, out=5, sums=6),
          example=("_scaled_dot_product_efficient_attention_backward",
                   f"[[2, 12, 512, 64], {_QKV}, [], [2, 12, 512, 64], [2, 12, 512]]",
                   '["float", "float", "float", "float", "", "float", "float"]')),
    _rule("attention backward", "_efficient_attention_backward",
          partial(formulas.attention_backward, heads_at=2, bias=4, out=5, ragged=6, sums=10),
          example=("_efficient_attention_backward",
                   f"[[2, 512, 12, 64], {_BSHD}, [], [2, 512, 12, 64], [], [], [], [], [2, 12, 512]]",
                   '["float", "float", "float", "float", "", "float", "", "", "Scalar", "Scalar", "float"]')),
    _rule("attention backward", "_scaled_dot_product_cudnn_attention_backward _cudnn_attention_backward",
          partial(formulas.attention_backward, bias=8, ragged=9),
          example=("_scaled_dot_product_cudnn_attention_backward",
                   f"[[2, 12, 512, 64], {_QKV}, [2, 12, 512, 64], [2, 12, 512, 1], [], [], [], []]",
                   f'[{_BF16}, {_BF16}, {_BF16}, {_BF16}, {_BF16}, "float", "long int", "long int", "", ""]')),
    _rule("softmax", "_softmax _log_softmax", formulas.softmax_work,
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
