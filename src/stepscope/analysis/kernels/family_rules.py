"""The rules by which kernels and PyTorch's operators are sorted into families: data, each with an example.

A rule looks at the function's name first: a template argument says with what, not what (row 16 of docs/measuring.md).
The first rule that fits holds. Patterns have no nested repetition and are searched in a bounded text.
"""

import re
from dataclasses import dataclass
from typing import Literal

Family = Literal[
    "matrix multiplication", "attention (fused)", "softmax", "normalisation", "activation/elementwise", "copy/cast",
    "reduction", "embedding/gather", "optimizer", "random", "communication", "memcpy/memset",
    "Triton/compiled fusion", "other",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A kernel, or operator, whose function's name has `function` and whose template arguments have `arguments`."""

    family: Family
    function: str
    arguments: str = ""
    example: str


class Rulebook:
    """Rules with their patterns compiled."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self._compiled = [
            (rule, re.compile(rule.function).search, re.compile(rule.arguments).search if rule.arguments else None)
            for rule in rules
        ]

    def find(self, function: str, arguments: str = "") -> Rule | None:
        """The first rule that fits."""
        for rule, in_function, in_arguments in self._compiled:
            if in_function(function) and (in_arguments is None or in_arguments(arguments)):
                return rule
        return None


_VECTORIZED = "void at::native::vectorized_elementwise_kernel<4, "
_APPLY = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"

KERNEL_RULES = Rulebook((
    Rule(family="memcpy/memset", function=r"^Mem(?:cpy|set)\b|^\[CUDA mem(?:cpy|set)\b",
         example="Memcpy DtoD (Device -> Device)"),
    Rule(family="communication", function=r"^nccl(?:Dev)?Kernel|^ncclKernel|^nvshmem",
         example="ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    # Triton: what inductor makes of a template keeps the template's name.
    Rule(family="attention (fused)", function=r"^triton_tem_\w*attention",
         example="triton_tem_fused__to_copy_flex_attention_0"),
    Rule(family="matrix multiplication", function=r"^triton_tem_\w*mm(?:_|$)|^triton_mm",
         example="triton_tem_fused_mm_t_view_7"),
    Rule(family="Triton/compiled fusion", function=r"^triton_(?:poi|red|per|tem|for)_",
         example="triton_per_fused__to_copy_amax_arange_div_exp_gt_masked_fill_mul_sub_sum_unsqueeze_view_10"),
    # Fused attention, before products: its names have their words too.
    Rule(family="attention (fused)", function=r"(?:^|::|_)(?:flash_(?:fwd|bwd)|fmha_|mha_(?:fwd|bwd)|attn_(?:fwd|bwd))",
         example="void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
                 "cutlass::bfloat16_t, Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, false, true, false>"
                 "(pytorch_flash::Flash_fwd_params)"),
    # stepscope's own.
    Rule(family="attention (fused)", function=r"^flash_(?:forward|row_statistics|(?:key|query|joint)_gradients|"
         r"finish_queries|split_operands)$|^hopper_(?:forward|gradients)$", example="hopper_gradients"),
    Rule(family="attention (fused)", function=r"^cudnn\w*(?:_sdpa_|_flash_|_mha_)|^cudnn::fusion::(?:compute_dot_do_o|"
         r"convert_dq)",
         example="cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0"),
    Rule(family="attention (fused)", function=r"^cutlass::(?:Kernel|device_kernel)",
         arguments=r"^(?:\w+::)*(?:enable_sm\d+\w*<)?(?:\w+::)*(?:Flash|Fmha|AttentionKernel|Sm\d+Fmha)",
         example="void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloop"
                 "FwdSm90<2, cute::tuple<cute::C<1>>>>>>(flash::Params)"),
    Rule(family="attention (fused)", function=r"AttentionKernel|attention_kernel_|FmhaFwd|FmhaBwd|BlockFmha",
         example="void PyTorchMemEffAttention::attention_kernel_batched_impl<PyTorchMemEffAttention::AttentionKernel"
                 "<float, cutlass::arch::Sm80, true, 64, 64, 64, true, true> >()"),
    # Matrix products.
    Rule(family="matrix multiplication", function=r"splitKreduce_kernel$",
         example="void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, false, float, float, "
                 "float, true, false, false, false>(cublasLt::cublasSplitKParams<float>, float const*)"),
    Rule(family="matrix multiplication", function=r"^nvjet_", example="nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN"),
    Rule(family="matrix multiplication", function=r"^Cijk?_A", example="Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_"
         "MT256x256x64_MI16x16x1_SN_GSU0_ISA942_K1"),
    Rule(family="matrix multiplication", function=r"(?i)(?:^|[_:]|\d)(?:[sdhcz]|grouped_|scaled_)?"
         r"gem[mv](?:[_:x2Nk]|SN|$)",
         example="sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_"
                 "execute_kernel__5x_cublas"),
    Rule(family="matrix multiplication", function=r"^cutlass::(?:Kernel|device_kernel)",
         arguments=r"^(?:\d+)?cutlass\w*gemm|^(?:\w+::)*gemm::",
         example="void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(T1::Params)"),
    Rule(family="matrix multiplication", function=r"^(?:dot_kernel|reduce_1Block_kernel)$",
         example="void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>, cublasGemvTensorStrided"
                 "<float> > >(cublasDotParams<cublasGemvTensor<float const> >)"),
    # Optimizers.
    Rule(family="optimizer", function=r"(?i)fused_?(?:adam|sgd|adagrad|lamb|lion)|^(?:adam|adamw|sgd|lion)_?\w*kernel$",
         example="void at::native::(anonymous namespace)::fused_adagrad_kernel<float>(float*)"),
    Rule(family="optimizer", function=r"multi_tensor_apply_kernel$",
         arguments=r"FusedOptimizer|Fused(?:Adam|Sgd|SGD)|AdamFunctor|LAMB|SGDFunctor",
         example=_APPLY + "at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, at::native::"
                 "(anonymous namespace)::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false> >()"),
    Rule(family="reduction", function=r"multi_tensor_apply_kernel$", arguments=r"LpNormFunctor|LpMaxFunctor",
         example=_APPLY + "at::native::(anonymous namespace)::TensorListMetadata<1>, at::native::(anonymous namespace)"
                 "::LpNormFunctor<float, (at::native::NormType)1, float, 1, 1, 0> >()"),
    Rule(family="copy/cast", function=r"multi_tensor_apply_kernel$", arguments=r"::Copy<",
         example=_APPLY + "at::native::(anonymous namespace)::TensorListMetadata<2>, at::native::(anonymous namespace)"
                 "::Copy<c10::BFloat16, float> >()"),
    Rule(family="activation/elementwise", function=r"multi_tensor_apply_kernel$",
         example=_APPLY + "at::native::(anonymous namespace)::TensorListMetadata<3>, at::native::(anonymous namespace)"
                 "::PointwiseOpScalarListFunctor<float, 3, 3, 0>, std::divides<float> >()"),
    # Softmax and normalisation.
    Rule(family="softmax", function=r"(?i)soft_?max",
         example="void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*)"),
    Rule(family="normalisation", function=r"(?i)layer_?norm|rms_?norm|group_?norm|batch_?norm|GammaBetaBackward|"
         r"RowwiseMoments|cuComputePartGradGammaBeta",
         example="void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int)"),
    # Random numbers.
    Rule(family="random", function=r"(?:^|::)distribution_\w+kernel|fused_dropout|dropout_kernel|(?i:philox)",
         example="void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4, "
                 "at::native::templates::cuda::normal_and_transform<float, float>()::{lambda()#1}>(long)"),
    Rule(family="random", function=r"^at::native::\w*elementwise_kernel$", arguments=r"masked_scale_kernel|bernoulli",
         example=_VECTORIZED + "at::native::(anonymous namespace)::masked_scale_kernel<bool, float, float>(at::Tensor&)"
                 "::{lambda(float, bool)#1}, std::array<char*, 3ul> >(int)"),
    # Embeddings and indexing.
    Rule(family="embedding/gather", function=r"(?i)embedding|vectorized_gather|scatter_gather|index(?:ing|Select|"
         r"_select|_elementwise|Func|_put|_copy|_kernel)",
         example="void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, bool)"),
    Rule(family="embedding/gather", function=r"(?:::|^)(?:compute_grad_weight\w*|sum_and_scatter|krn_partials?_\w+|"
         r"compute_num_of_partial_segments|write_num_of_segments)$",
         example="void at::native::(anonymous namespace)::sum_and_scatter<float, long>(long const*, float*, long)"),
    # Copies: by what they are made for, then by the functor a general kernel is given.
    Rule(family="copy/cast", function=r"CatArrayBatchedCopy|(?:^|::|_)(?:copy|transpose|permute|concat)_?\w*kernel|"
         r"(?i:tensor_kernel_scan_copy)",
         example="void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)::"
                 "OpaqueType<4u>, unsigned int, 4, 64, 64>(at::native::(anonymous namespace)::OpaqueType<4u>*)"),
    Rule(family="copy/cast", function=r"elementwise_kernel", arguments=r"copy_kernel_(?:cuda|impl)",
         example="void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIterator"
                 "Base&)::{lambda()#3}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}, "
                 "std::array<char*, 2ul>, 4>(int)"),
    # Reductions.
    Rule(family="reduction", function=r"(?:^|::)reduce_kernel$|_reduce_\w*kernel|"
         r"DeviceReduce\w*Kernel|DeviceSegmentedReduce|cumsum|DeviceScan\w*Kernel|tensor_kernel_scan",
         example="void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxOps<float>, "
                 "unsigned int, float, 4, 4> >(at::native::ReduceOp<float, at::native::MaxOps<float> >)"),
    # What is left of pointwise work.
    Rule(family="activation/elementwise", function=r"elementwise_kernel|(?:^|::|_)(?:gelu|silu|swiglu|relu|rope|rotary|"
         r"geglu)_?\w*kernel|(?i:pointwise)|fill_kernel|triu_tril_kernel",
         example=_VECTORIZED + "at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)"),
))  # fmt: skip


OPERATOR_RULES = Rulebook((
    # Communication first: c10d::allreduce_ would be a reduction.
    Rule(family="communication", function=r"^(?:c10d|_c10d_functional|nccl|gloo|mpi)(?:::|:)|^record_param_comms",
         example="nccl:all_reduce"),
    Rule(family="copy/cast", function=r"^aten::_foreach_copy_", example="aten::_foreach_copy_"),
    Rule(family="optimizer", function=r"^Optimizer\.|^aten::_fused_(?:adam|sgd|adagrad)|^aten::_foreach_|"
         r"^aten::_amp_(?:foreach|update)", example="aten::_fused_adamw_"),
    Rule(family="attention (fused)", function=r"scaled_dot_product|_flash_attention|_efficient_attention|"
         r"_cudnn_attention|flex_attention", example="aten::_scaled_dot_product_flash_attention"),
    Rule(family="attention (fused)", function=r"^stepscope::\w*attention_",
         example="stepscope::flash_attention_backward"),
    Rule(family="matrix multiplication", function=r"^aten::(?:_?(?:addmm|mm|bmm|baddbmm|addbmm|matmul|linear|addmv|mv|"
         r"dot|vdot|einsum|_scaled_mm|_scaled_grouped_mm|_grouped_mm|_int_mm|addmm_activation|linear_backward|"
         r"mkldnn_linear|bilinear|chain_matmul|outer))_?$|^mkl(?:dnn)?::_?\w*linear", example="aten::addmm"),
    Rule(family="softmax", function=r"^aten::_?(?:log_)?softmax", example="aten::_softmax_backward_data"),
    Rule(family="normalisation", function=r"^aten::_?\w*(?:layer_norm|rms_norm|group_norm|batch_norm)",
         example="aten::native_layer_norm"),
    Rule(family="embedding/gather", function=r"^aten::_?(?:embedding|index|gather|scatter|take|nonzero|unique|masked_"
         r"select|unsafe_index)(?!_fill)", example="aten::embedding_dense_backward"),
    Rule(family="random", function=r"^aten::_?(?:normal|uniform|bernoulli|rand|native_dropout|dropout|fused_dropout|"
         r"exponential|multinomial|geometric|cauchy|log_normal)", example="aten::normal_"),
    Rule(family="copy/cast", function=r"^aten::(?:copy_?|_copy_from\w*|_to_copy|to|clone|contiguous|cat|_cat|stack|"
         r"repeat|constant_pad_nd|roll|flip|float|half|bfloat16|type_as)$", example="aten::_to_copy"),
    Rule(family="reduction", function=r"^aten::_?(?:sum|mean|amax|amin|max|min|argmax|argmin|norm|linalg_vector_norm|"
         r"linalg_norm|var|std|prod|all|any|logsumexp|cumsum|aminmax|nll_loss|nll_loss_nd|nll_loss_forward|"
         r"nll_loss2d\w*|cross_entropy_loss|topk|count_nonzero|var_mean|sum_to_size)(?:_out)?_?$",
         example="aten::linalg_vector_norm"),
    Rule(family="activation/elementwise", function=r"^aten::_?(?:add|sub|rsub|mul|div|neg|exp|exp2|log|pow|sqrt|rsqrt|"
         r"square|abs|sign|sin|cos|tanh|sigmoid|silu|gelu|relu|leaky_relu|elu|softplus|erf|clamp|clamp_min|clamp_max|"
         r"maximum|minimum|where|masked_fill|fill|zero|zeros|zeros_like|ones|ones_like|full|full_like|arange|lerp|addcmul|"
         r"addcdiv|reciprocal|gt|ge|lt|le|eq|ne|logical_\w+|bitwise_\w+|tril|triu|threshold|hardtanh|floor|ceil|round|"
         r"remainder|isnan|isinf|isfinite|nan_to_num|mse_loss|nll_loss_backward|swiglu|glu|"
         r"conj_physical|log1p|expm1|sigmoid_backward|fill_diagonal|index_fill)(?:_backward|_out)?_*$",
         example="aten::silu_backward"),
))  # fmt: skip
