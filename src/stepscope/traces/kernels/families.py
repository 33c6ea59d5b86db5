"""Which kind of work a kernel does: its family, by its name, and where the name leaves it open by where it ran."""

import re
from dataclasses import dataclass, field
from typing import Literal, get_args

from stepscope.core.answer import PROSE, Answer, Line, table_of
from stepscope.core.errors import LONGEST_NAME, middle_cut, printable
from stepscope.core.range_names import OPTIMIZER, SOFTMAX
from stepscope.traces.kernels.names import KernelName, decode, is_tf32, split_name

# Families of kernels, and the rules that sort kernels and operators into them: data, each with an example.
#
# A rule looks at the function's name first: a template argument says with what, not what (row 16 of docs/measuring.md).
# The first rule that fits holds. Patterns have no nested repetition and are searched in a bounded text.


Family = Literal[
    "matrix multiplication", "attention (fused)", "convolution", "recurrence", "softmax", "normalisation",
    "activation/elementwise", "quantisation", "copy/cast", "reduction", "pooling/interpolation", "sorting",
    "embedding/gather", "expert routing", "sampling", "optimizer", "random", "communication", "memcpy/memset",
    "view/allocation", "Triton/compiled fusion", "other",
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


# The rules that sort operators into families by their names.


_OTHERS = r"^(?!aten::|prims::|profiler::|autograd)\w+::\w*"
"""An operator that is not PyTorch's own: a library's, as vllm::unified_attention."""

OPERATOR_RULES = Rulebook((
    # Communication first: c10d::allreduce_ would be a reduction.
    Rule(family="communication", function=r"^(?:c10d|_c10d_functional|symm_mem|nccl|gloo|mpi|deep_ep)(?:::|:)|"
         r"^record_param_comms", example="nccl:all_reduce"),
    Rule(family="communication", function=_OTHERS + r"(?:all_?reduce|all_?gather|reduce_scatter|all_?to_?all)",
         example="_C_custom_ar::all_reduce"),
    Rule(family="copy/cast", function=r"^aten::_foreach_copy_", example="aten::_foreach_copy_"),
    Rule(family="matrix multiplication", function=r"^aten::_foreach_mm$", example="aten::_foreach_mm"),
    Rule(family="optimizer", function=r"^Optimizer\.|^aten::_fused_(?:adam|sgd|adagrad)|^aten::_foreach_|"
         r"^aten::_amp_(?:foreach|update)", example="aten::_fused_adamw_"),
    Rule(family="attention (fused)", function=r"scaled_dot_product|_flash_attention|_efficient_attention|"
         r"_cudnn_attention|flex_attention", example="aten::_scaled_dot_product_flash_attention"),
    Rule(family="attention (fused)", function=r"^stepscope::\w*attention_",
         example="stepscope::flash_attention_backward"),
    Rule(family="normalisation", function=r"^stepscope::rms_norm_", example="stepscope::rms_norm_forward"),
    Rule(family="activation/elementwise", function=r"^stepscope::(?:silu_product_|rotate_halves|"
         r"linear_cross_entropy_backward)", example="stepscope::rotate_halves"),
    Rule(family="matrix multiplication", function=r"^stepscope::(?:linear_cross_entropy_forward|joint_projections)",
         example="stepscope::linear_cross_entropy_forward"),
    Rule(family="matrix multiplication", function=r"^aten::(?:_?(?:addmm|mm|bmm|baddbmm|addbmm|matmul|linear|addmv|mv|"
         r"dot|vdot|einsum|addr|scaled_mm(?:_v2)?|scaled_grouped_mm(?:_v2)?|grouped_mm|int_mm|addmm_activation|"
         r"linear_backward|mkldnn_linear|mkldnn_linear_backward(?:_input|_weights)?|bilinear|trilinear|chain_matmul|"
         r"outer|weight_int[48]pack_mm\w*|sparse_semi_structured_(?:linear|mm|addmm)|cslt_sparse_mm|"
         r"dyn_quant_matmul_4bit))_?$|^mkl(?:dnn)?::_?\w*linear", example="aten::addmm"),
    Rule(family="convolution", function=r"^aten::_?(?:(?:cudnn|miopen|mkldnn|thnn|slow|nnpack)_)*_?conv(?:olution|"
         r"[123]d|"
         r"_transpose|_depthwise|_tbc|_dilated)|^aten::_?\w*_conv(?:olution|[123]d|_transpose|_depthwise)|"
         r"^mkldnn::\w*conv",
         example="aten::convolution_backward"),
    Rule(family="recurrence", function=r"^aten::_?(?:\w*_)?(?:rnn|lstm|gru)(?:_|$)", example="aten::_cudnn_rnn"),
    Rule(family="pooling/interpolation", function=r"^aten::_?\w*(?:_pool[123]d|upsample|grid_sampler)",
         example="aten::max_pool2d_with_indices_backward"),
    Rule(family="sampling", function=r"^aten::multinomial", example="aten::multinomial"),
    Rule(family="sorting", function=r"^aten::(?:sort|argsort|msort|topk|kthvalue|median|searchsorted|bucketize)$",
         example="aten::topk"),
    Rule(family="quantisation", function=r"^aten::_?(?:\w+_)?(?:de)?quantize_", example="aten::quantize_per_tensor"),
    Rule(family="softmax", function=r"^aten::_?(?:log_)?softmax", example="aten::_softmax_backward_data"),
    Rule(family="normalisation", function=r"^aten::_?\w*(?:layer_norm|rms_norm|group_norm|batch_norm)",
         example="aten::native_layer_norm"),
    Rule(family="embedding/gather", function=r"^aten::_?(?:embedding|index|gather|scatter|take|nonzero|unique|masked_"
         r"select|unsafe_index)(?!_fill)", example="aten::embedding_dense_backward"),
    Rule(family="random", function=r"^aten::_?(?:normal|uniform|bernoulli|rand|native_dropout|dropout|fused_dropout|"
         r"exponential|geometric|cauchy|log_normal)", example="aten::normal_"),
    Rule(family="copy/cast", function=r"^aten::(?:copy_?|_copy_from\w*|_to_copy|to|clone|contiguous|cat|_cat|stack|"
         r"repeat|constant_pad_nd|roll|flip|float|half|bfloat16|type_as)$", example="aten::_to_copy"),
    Rule(family="reduction", function=r"^aten::_?(?:sum|mean|amax|amin|max|min|argmax|argmin|norm|linalg_vector_norm|"
         r"linalg_norm|var|std|prod|all|any|logsumexp|cumsum|aminmax|nll_loss|nll_loss_nd|nll_loss_forward|"
         r"nll_loss2d\w*|cross_entropy_loss|count_nonzero|var_mean|sum_to_size)(?:_out)?_?$",
         example="aten::linalg_vector_norm"),
    Rule(family="activation/elementwise", function=r"^aten::_?(?:add|sub|rsub|mul|div|neg|exp|exp2|log|pow|sqrt|rsqrt|"
         r"square|abs|sign|sin|cos|tanh|sigmoid|silu|gelu|relu|leaky_relu|elu|softplus|erf|clamp|clamp_min|clamp_max|"
         r"maximum|minimum|where|masked_fill|fill|zero|zeros|zeros_like|ones|ones_like|full|full_like|arange|lerp|"
         r"addcmul|"
         r"addcdiv|reciprocal|gt|ge|lt|le|eq|ne|logical_\w+|bitwise_\w+|tril|triu|threshold|hardtanh|floor|ceil|round|"
         r"remainder|isnan|isinf|isfinite|nan_to_num|mse_loss|nll_loss_backward|swiglu|glu|"
         r"conj_physical|log1p|expm1|sigmoid_backward|fill_diagonal|diff|index_fill)(?:_backward|_out)?_*$",
         example="aten::silu_backward"),
    # No work on elements: a tensor is made, or seen in another shape.
    Rule(family="view/allocation", function=r"^aten::_?(?:empty(?:_like|_strided)?|new_empty(?:_strided)?|view|"
         r"unsafe_view|"
         r"view_as|reshape|reshape_alias|as_strided|t|transpose|permute|expand|expand_as|slice|select|narrow|split|"
         r"split_with_sizes|chunk|unbind|squeeze|unsqueeze|detach|alias|resize|resize_as|set|numpy_T|lift_fresh|"
         r"flatten|"
         r"unflatten|diagonal|movedim|swapaxes|unfold|broadcast_tensors|broadcast_to|real|imag|view_as_real|"
         r"view_as_complex)_?$|^detach_?$", example="aten::as_strided"),
    # Operators of libraries, for kernels whose own name says nothing.
    Rule(family="recurrence", function=_OTHERS + r"(?:mamba|selective_scan|delta_rule|gdn_attention|linear_attention)",
         example="vllm::mamba_mixer2"),
    Rule(family="copy/cast", function=_OTHERS + r"(?:reshape_and_cache|concat_and_cache|store_cache|kv_buffer|permute_|"
         r"copy_|transpose_pad)", example="_C_cache_ops::reshape_and_cache_flash"),
    Rule(family="quantisation", function=r"^sageattention\w*::\w*quant",
         example="sageattention_fused::quant_per_warp_int8_cuda"),
    Rule(family="attention (fused)", function=_OTHERS + r"(?i:attention|attn|fmha|mha_|_mla|flash_fwd|flash_bwd)|"
         r"^aiter::(?:mla|pa)_|^(?:flash_attn\w*|sageatt\w+|_vllm_fa\d_C)::|^sgl_kernel::fwd$",
         example="vllm::unified_attention_with_output"),
    Rule(family="normalisation", function=_OTHERS + r"(?:_norm|rmsnorm|layernorm)", example="_C::fused_add_rms_norm"),
    Rule(family="expert routing", function=_OTHERS + r"(?:moe_align|moe_sum|topk_softmax|topk_sigmoid|grouped_topk|"
         r"moe_fused_gate|moe_permute|moe_unpermute|moe_sorting)", example="_moe_C::moe_align_block_size"),
    Rule(family="activation/elementwise", function=_OTHERS + r"(?:_and_mul|rotary|rope|silu|gelu)",
         example="_C::silu_and_mul"),
    Rule(family="quantisation", function=_OTHERS + r"(?i:(?<!un)quant|FP8Rowwise)",
         example="_C::static_scaled_fp8_quant"),
    Rule(family="embedding/gather", function=_OTHERS + r"(?:embedding|bounds_check_indices)",
         example="fbgemm::bounds_check_indices"),
    Rule(family="matrix multiplication", function=_OTHERS + r"(?:gemm|scaled_mm|_mm$|marlin|fused_experts|fused_moe|"
         r"moe_stage\d|_moe$|\bf?moe(?:_g1u1)?$|flatmm|wvSplitK|LLMM1)",
         example="_C::cutlass_scaled_mm"),
    Rule(family="convolution", function=_OTHERS + r"conv[123]d", example="vllm::causal_conv1d_update"),
))  # fmt: skip


# One spelling for kernels' names, which each profiler's demangler writes in its own way.
#
# void k<4, f(T const&)::{lambda(float)#1}, std::array<char*, 2ul> >(int)                             Kineto
# void k<(int)4, void f(T1)::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(T1)  Nsight Systems


_LAMBDA = re.compile(r"[\[{]lambda\(([^()]*)\)(?: \(instance (\d+)\)\]|#(\d+)\})")
_BRACKETS = re.compile(r"\([^()]*\)")
"""Parameter lists, which repeat the template arguments in either spelling, and casts of those."""
_DEEPEST = 16
_STEPS = (
    (re.compile(r"\(anonymous namespace\)|<unnamed>"), "{anonymous}"),
    (_LAMBDA, r"{lambda \1#\2\3}"),
    (re.compile(r"\bvoid (?=\w)"), ""),
    (re.compile(r"(?<![\w.])(\d+)(?:u?l{1,2}|u)(?!\w)"), r"\1"),
    (re.compile(r"(?<![\w.])true(?!\w)"), "1"),
    (re.compile(r"(?<![\w.])false(?!\w)"), "0"),
)


def one_spelling(name: str) -> str:
    """The kernel's function and template arguments, the same whichever profiler wrote the name."""
    function, arguments, _ = split_name(name)
    text = f"{function}<{arguments}>" if arguments else function
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    for _ in range(_DEEPEST):
        text, removed = _BRACKETS.subn("", text)
        if not removed:
            break
    return "".join(text.split())


# The rules that sort kernels into families by their names.
#
# Order matters: what a kernel does as a whole comes before the words that name its parts. A kernel of attention has
# "softmax" and "gemm" in its name, a product of experts has "moe", a fused norm has "quant".


_VECTORIZED = "void at::native::vectorized_elementwise_kernel<4, "
_APPLY = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"
_CUTLASS = r"^cutlass::(?:Kernel2?|device_kernel)$"
"""CUTLASS's wrappers: what runs is the template argument."""
_KENTRY = r"^ck_tile::kentry"
"""Composable Kernel's wrapper: `kentry<2, ck_tile::FmhaFwdKernel<...>>`, or mangled `Li2ENS_13FmhaFwdKernel`."""

KERNEL_RULES = Rulebook((
    Rule(family="memcpy/memset", function=r"^Mem(?:cpy|set)\b|^\[CUDA mem(?:cpy|set)\b|"
         r"^(?:__amd_rocclr_)?(?:copyBuffer|"
         r"fillBuffer)|^Copy(?:Device|Host)To(?:Device|Host)",
         example="Memcpy DtoD (Device -> Device)"),
    # Communication before all else: an all-reduce is no reduction.
    Rule(family="communication", function=r"^(?:nccl|rccl|msccl|oneccl|ccl_|hcom_)|nvshmem|rocshmem|mscclpp",
         example="ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    Rule(family="communication", function=r"multimem_|(?i:one_?shot|two_?shot)_?\w*(?i:reduce|lamport)|"
         r"cross_device_(?:reduce|store|load)|(?i:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|"
         r"quick_?reduce|user_?buffers)",
         example="void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)"),
    Rule(family="communication", function=r"^deep_ep::|^mori::|^(?:dispatch|combine)$|^pplx::|(?i:moe_?a2a|"
         r"ep_?dispatch|ep_?combine|"
         r"notify_dispatch|put_signal|wait_signal|sendrecv)|^c10d::|^(?:symm_mem::|"
         r"\(anonymous namespace\)::)barrier_kernel",
         example="void deep_ep::internode_ll::dispatch<true, 3, 7168>(void*, void*, int*, long*)"),
    # Triton: what Inductor makes of a template keeps the template's name.
    Rule(family="attention (fused)", function=r"^triton_tem_\w*attention",
         example="triton_tem_fused__to_copy_flex_attention_0"),
    Rule(family="convolution", function=r"^triton_tem_\w*convolution", example="triton_tem_fused_convolution_relu_3"),
    Rule(family="matrix multiplication", function=r"^triton_tem_\w*mm(?:_|$)|^triton_mm",
         example="triton_tem_fused_mm_t_view_7"),
    # Inductor's fusions name the operators that they fuse, and the heaviest of them decides. A product or a convolution
    # in these names is only what the fusion follows: the product itself is another kernel.
    Rule(family="softmax", function=r"^triton_(?:red|per|poi|for)_fused_\w*(?:softmax|logsumexp|nll_loss|"
         r"cross_entropy)",
         example="triton_red_fused__log_softmax__to_copy_nll_loss_forward_sub_view_10"),
    Rule(family="softmax", function=r"^triton_(?:red|per)_fused_\w*amax_\w*exp_\w*sum",
         example="triton_per_fused__to_copy_amax_arange_div_exp_gt_masked_fill_mul_sub_sum_unsqueeze_view_10"),
    Rule(family="normalisation", function=r"^triton_(?:red|per|poi|for)_fused_\w*_norm(?:_|$)|^triton_(?:red|"
         r"per)_fused_"
         r"\w*(?:mean|var|sum)\w*_rsqrt",
         example="triton_red_fused_native_layer_norm_native_layer_norm_backward_3"),
    Rule(family="embedding/gather", function=r"^triton_(?:red|per|poi|for)_fused_\w*embedding",
         example="triton_poi_fused_embedding_dense_backward_16"),
    Rule(family="sorting", function=r"^triton_(?:red|per)_fused_\w*(?:sort|topk)(?:_|$)",
         example="triton_per_fused_sort_2"),
    Rule(family="pooling/interpolation", function=r"^triton_(?:red|per|poi)_fused_\w*(?:_pool[123]?d?|upsample|"
         r"interpolate)", example="triton_poi_fused_max_pool2d_with_indices_4"),
    Rule(family="reduction", function=r"^triton_(?:red|per)_fused_\w*(?:sum|mean|amax|amin|max|min|argmax|argmin|prod|"
         r"any|all|var|std|vector_norm|cumsum|cumprod)(?:_|$)", example="triton_red_fused__to_copy_mul_sum_12"),
    Rule(family="Triton/compiled fusion", function=r"^triton_(?:poi|red|per|tem|for|unk)_|^(?:loop|input)_\w*fusion",
         example="triton_poi_fused__unsafe_view_mul_silu_2"),
    # Which tokens go to which experts, and where their rows lie. The experts' products are products.
    Rule(family="expert routing", function=r"(?i)^moe::dev::(?:routing|finalize|permute)|moe_?(?:align|sum|sort|top_?k|"
         r"softmax|fused_gate|permute|unpermute|finali[sz]e|gate_?top)|top_?k_?(?:gating|softmax|sigmoid|with_k2)|"
         r"grouped_top_?k|(?:sort|count)_?\w*expert|expert_?\w*(?:sort|offset|prefix_?sum|map|tokens)|finali[sz]e_?moe|"
         r"expand_?input_?rows|_expt_data|_topk_(?:forward|backward)|bitmatrix|combined_routing|routing_?\w*(?:compute|"
         r"indices|indx)|finalize_matmul_scatter|^_?reduce_grouped|ep_(?:scatter|gather)|(?:pre|post)_reorder|"
         r"compute_src2dst|row_id_map|sort_chunks|_?permute_with_mask|unpermute|group_idx_and_topk|"
         r"compute_problem_sizes|compute_masked_m|seg_indptr|fill_gateup|shuffle_?(?:input_?)?rows|"
         r"grouped_?gemm_?\w*(?:starts|data)|group_gemm_starts|ComputeStridesTma|gating_kernel",
         example="void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*, int*, int*, int, int, int, long)"),
    Rule(family="expert routing", function=_KENTRY, arguments=r"^[^<]{0,40}(?:MoeSorting|TopkSoftmax)",
         example="_ZN7ck_tile6kentryILi1ENS_16MoeSortingKernelINS_16MoeSortingProblemEEEEEvDpT2_"),
    # Recurrences: LSTMs, state-space models, linear attention in chunks.
    Rule(family="recurrence", function=r"(?i)delta_?rule|gated_delta|fused_recurrent|selective_(?:scan|state)|(?:^|"
         r"_)ssd_|mamba|"
         r"chunk_(?:scan|state|cumsum|local_cumsum|fwd_kernel|bwd_kernel|gla|kda|scaled_dot_kkt)|state_passing|"
         r"recompute_w_u|solve_tril|rwkv|wkv\d?_|lstm|gru_cell|elemWiseRNN|(?:^|[_:])RNN_|_rnn_|retention_|_bmm_chunk_|"
         r"(?:^|_)(?:gdr|gdn|kda)_",
         example="void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128, 16, 1, true, true> "
                 ">(SSMParams)"),
    # Attention, before products: its names have their words too. Copies into the key-value cache are copies.
    Rule(family="copy/cast", function=r"(?i)reshape_and_cache|concat_and_cache|store_?kv_?cache|append_?paged_?kv|"
         r"kv_?(?:cache|buffer)_?\w*(?:copy|store|write|update|scatter|append)|set_\w*kv_buffer|copy_blocks|"
         r"swap_blocks|"
         r"gather_cache|gather_and_maybe_dequant_cache|(?:load|store)_?paged_?kv|kv_indices|page_indices|page_table",
         example="void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char, (vllm::Fp8KVCacheDataType)1>"
                 "(__nv_bfloat16 const*)"),
    Rule(family="copy/cast", function=_KENTRY, arguments=r"^[^<]{0,40}FmhaFwdAppendKV",
         example="_ZN7ck_tile6kentryILi1ENS_21FmhaFwdAppendKVKernelINS_22FmhaFwdAppendKVPipelineIEEEEEvDpT1_"),
    Rule(family="attention (fused)", function=r"(?:^|::|_)(?:flash_(?:fwd|bwd)|fmha_|mha_(?:fwd|bwd)|attn_(?:fwd|bwd))",
         example="void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
                 "cutlass::bfloat16_t, Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, false, true, false>"
                 "(pytorch_flash::Flash_fwd_params)"),
    # SageAttention, which quantises q, k and v by kernels of its own.
    Rule(family="attention (fused)", function=r"(?:^|::)qk_int\d?_sv_[a-z]\d|(?:^|::|_)sage_?(?:attn_)?(?:fwd|bwd)",
         example="void qk_int_sv_f8_attn_kernel<128u, 64u, 32u, 64u, 128u, (DataType)1, (QuantGranularity)3, "
                 "(QuantGranularity)3, float, false, __nv_bfloat16, (ComputeUnit)1, (MaskMode)0, false, true, false>"
                 "(signed char*, signed char*, signed char*, __nv_bfloat16*, float*, float*, float*, float*)"),
    Rule(family="quantisation", function=r"(?:^|::)(?:QuantInt8|MeanScale|SubMean)Kernel$",
         example="void MeanScaleKernel<64u, true, __nv_bfloat16>(__nv_bfloat16*, signed char*, float*, float, "
                 "unsigned int)"),
    Rule(family="copy/cast", function=r"(?:^|::)TransposePadPermuteKernel$",
         example="void TransposePadPermuteKernel<128u, 64u, true, __half>(__half*, __half*, unsigned int)"),
    # AITER's kernels in assembly: `pa` attends to a cache in pages, and `noquant` in its name is no quantisation.
    Rule(family="attention (fused)", function=r"^aiter::(?:pa|mla|fwd|bwd)_",
         example="_ZN5aiter22pa_bf16_noquant_gqa8_1tg_4wE"),
    Rule(family="activation/elementwise", function=r"^aiter::kn_entry_\dc_",
         example="void aiter::kn_entry_2c_sbhd_cached_indirect_inplace<aiter::OpCachedFwd, 0, false, false, "
                 "__hip_bfloat16>(__hip_bfloat16*, __hip_bfloat16*)"),
    Rule(family="quantisation", function=r"^aiter::initializeScale$", example="void aiter::initializeScale(float*)"),
    # stepscope's own.
    Rule(family="attention (fused)", function=r"^flash_(?:forward|row_statistics|(?:key|query|joint)_gradients|"
         r"finish_(?:queries|keys)|split_operands)$|^hopper_(?:forward|gradients)$", example="hopper_gradients"),
    Rule(family="normalisation", function=r"^rms_norm_(?:forward|backward|shares)$", example="rms_norm_backward"),
    Rule(family="activation/elementwise", function=r"^(?:silu_product_(?:forward|backward)|rotate_halves|scaled_by)$",
         example="silu_product_forward"),
    Rule(family="softmax", function=r"^cross_entropy_rows$", example="cross_entropy_rows"),
    Rule(family="quantisation", function=r"^(?:largest_of|scale_to|cast_to)_eight_bits$", example="cast_to_eight_bits"),
    Rule(family="optimizer", function=r"^(?:adamw_update|square_sums|clip_coefficient)$", example="adamw_update"),
    Rule(family="attention (fused)", function=r"^cudnn\w*(?:_sdpa_|_flash_|_mha_)|^cudnn::fusion::(?:compute_dot_do_o|"
         r"convert_dq)",
         example="cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_"
                 "kernel0_0"),
    Rule(family="attention (fused)", function=_CUTLASS,
         arguments=r"^(?:[\w:]+<)?(?:\w+::)*(?:Flash|Fmha|AttentionKernel|Sm\d+Fmha)",
         example="void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloop"
                 "FwdSm90<2, cute::tuple<cute::C<1>>>>>>(flash::Params)"),
    Rule(family="attention (fused)", function=_KENTRY, arguments=r"^[^<]{0,40}(?:Fmha|UnifiedAttention)",
         example="_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelINS_40BlockFmhaBatchPrefillPipeline"
                 "QRKSVSAsyncIEEEEEvDpT1_"),
    Rule(family="attention (fused)", function=r"(?i)attention(?!.{0,40}softmax)|fmha|flash_?attn|flash_?mla|"
         r"flash_?infer_?"
         r"mla|sparse_?mla|mla_?(?:dec|pfl|prefill|combine|reduce|metadata|a\d+w\d+)|[mg]qa_logits|(?:^|"
         r"[_:])attn(?:[_:]|$)|"
         r"merge_?(?:attn_?)?states|(?:batch|single|^|[:_])(?:prefill|decode)_?with|lightning_indexer",
         example="void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u, 4u, 8u, "
                 "16u>(P)"),
    Rule(family="attention (fused)", function=r"^flash(?:_\w*(?:decode|prefill|combine)|::)|^_?kernel_mha|"
         r"masked_multihead|(?:^|_)xqa|^_(?:fwd|"
         r"bwd)(?:_grouped)?_kernel"
         r"(?:_stage\d|_dkdv\w*|_dq)?(?:_rope|_(?:non)?causal|_asm)?$|^_?bwd_(?:kernel_(?:dk_dv|dq|fuse)|preprocess|"
         r"dkdvdq|dq_inner)|^_?_?decode_att|^reduce_segments$|"
         r"^_?pa_(?:bf16|fp16|fp8|fwd|decode|dec)|^_paged_|paged_attn",
         example="_fwd_grouped_kernel_stage1"),
    # Convolutions, whose implicit products name themselves gemm.
    Rule(family="convolution", function=r"(?i)conv(?:olution|olve|[123]d|1x1|_(?:fwd|bwd|depthwise|dw|transpose|ck|"
         r"ab|v\d))|"
         r"AsmConv|^conv_|_conv_kernel|winograd|im2(?:d2)?col|col2im|vol2(?:col|im)",
         example="void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>(int)"),
    Rule(family="convolution", function=r"xmma_(?:fprop|dgrad|wgrad)|implicit_gemm|^igemm_(?:fwd|bwd|wrw)_|scudnn_|"
         r"\d(?:scudnn|cudnn)_|^cudnn::cnn::|^cask_\w*cudnn|^cutlass\w*_cudnn|(?:dgrad|wgrad|conv)\w*_engine|"
         r"cudnn::detail::(?:implicit|explicit|precomputed|dgrad|wgrad)|^fft2d_(?:r2c|c2r)|flip_filter",
         example="sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x128x32_stage5_"
                 "warpsize2x2x1_"
                 "g1_tensor16x8x8_execute_kernel_cudnn_infer"),
    Rule(family="convolution", function=_CUTLASS,
         arguments=r"^(?:[\w:]+<)?(?:\w+::)*conv::|^cutlass\w*(?:fprop|dgrad|wgrad)|"
         r"^(?:\w+::)*\w*(?:ImplicitGemmConv|Conv"
         r"Universal)",
         example="void "
                 "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816fprop_optimized_bf16_128x128_32x4_nhwc_align8>(P)"),
    Rule(family="convolution", function=_KENTRY, arguments=r"^[^<]{0,40}(?:GroupedConv|ImageToColumn)",
         example="void ck_tile::kentry<1, ck_tile::GroupedConvolutionForwardKernel<ck_tile::Traits> >(ck_tile::Args)"),
    # Matrix products.
    Rule(family="matrix multiplication", function=r"splitKreduce_kernel$",
         example="void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, false, float, float, "
                 "float, true, false, false, false>(cublasLt::cublasSplitKParams<float>, float const*)"),
    Rule(family="matrix multiplication", function=r"^nvjet_", example="nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN"),
    Rule(family="matrix multiplication", function=r"^(?:Custom_)?Cijk?_A",
         example="Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_"
         "UserArgs_MT256x256x64_MI16x16x1_SN_GSU0_ISA942_K1"),
    Rule(family="copy/cast", function=r"(?i)gptq_marlin_repack|marlin_repack|awq_repack|pack_fp32_into_ue8m0",
         example="void marlin::gptq_marlin_repack_kernel<256, 4, false>(unsigned int const*, unsigned int*, int, int)"),
    Rule(family="activation/elementwise", function=r"(?i)(?:silu|gelu|swiglu)\w*_mul\w*gemm",
         example="_silu_mul_fp8_quant_deep_gemm"),
    Rule(family="matrix multiplication", function=_CUTLASS,
         arguments=r"^(?:\d+)?cutlass\w*gemm|^(?:\(anonymous namespace\)::)?(?:[\w:]+<)?(?:\w+::)*(?:gemm::|\w*gemm)|"
         r"^[^<]{0,60}(?:GemmUniversal|_gemm)",
         example="void "
                 "cutlass::device_kernel<vllm::enable_sm90_or_later<cutlass::gemm::kernel::GemmUniversal<cute::tuple"
                 "<int, int, int, int> > > >(P)"),
    Rule(family="matrix multiplication", function=_KENTRY,
         arguments=r"^[^<]{0,40}\w*(?:Gemm|FusedMoe|Flatmm|Contraction)",
         example="void ck_tile::kentry<1, ck_tile::UniversalGemmKernel<ck_tile::Traits> >(ck_tile::Args)"),
    Rule(family="matrix multiplication", function=r"(?i)(?<!fb)gem[mv](?!.{0,40}softmax)",
         example="sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_"
                 "execute_kernel__5x_cublas"),
    Rule(family="matrix multiplication", function=r"(?i)mat_?mul|mul_mat|(?:^|::)flat_?mm|"
         r"^_ff_a\d+w\d+|spmm|csrmm|(?:^|[_:])(?:\w*scaled_|"
         r"\w*grouped_)?b?mm(?:_|$)|"
         r"(?:^|[_:])f?moe_(?:kernel|mmk|bf16|fp16|fp8|i8|int8|a8w8|wna16|stage\d)|fused_moe|batched_triton_kernel|"
         r"(?:^|::)wv_?split_?k|marlin|machete|sgmv|bgmv|lora_(?:shrink|expand)",
         example="bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_rM_TN_transOut_"
                 "schedP2x1x2x3_biasM_bN_tma_tmaOpt_clmp_swiGlu_dynBatch_sm100f"),
    Rule(family="matrix multiplication", function=r"^(?:dot_kernel|reduce_1Block_kernel)$|^deep_gemm::|LLMM1|"
         r"^(?:cublasLt::)?epilogue::impl::globalKernel|rocblas_dot|\d+wmma|^cublas",
         example="void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>, cublasGemvTensorStrided"
                 "<float> > >(cublasDotParams<cublasGemvTensor<float const> >)"),
    # Optimizers.
    Rule(family="optimizer", function=r"(?i)fused_?(?:adam|sgd|adagrad|lamb|lion)|^(?:adam|adamw|sgd|lion)_?\w*kernel$|"
         r"kOptimizer|kPreconditionOptimizer|newton_?schulz|amp_update_scale|amp_non_finite",
         example="void at::native::(anonymous namespace)::fused_adagrad_kernel<float>(float*)"),
    Rule(family="optimizer", function=r"multi_tensor_apply_kernel$",
         arguments=r"FusedOptimizer|Fused(?:Adam|Sgd|SGD)|AdamFunctor|LAMB|SGDFunctor",
         example=_APPLY + "at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, at::native::"
                 "(anonymous namespace)::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false> >()"),
    Rule(family="reduction", function=r"multi_tensor_apply_kernel$", arguments=r"LpNormFunctor|LpMaxFunctor|"
         r"L2NormFunctor",
         example=_APPLY + "at::native::(anonymous namespace)::TensorListMetadata<1>, at::native::(anonymous namespace)"
                 "::LpNormFunctor<float, (at::native::NormType)1, float, 1, 1, 0> >()"),
    Rule(family="copy/cast", function=r"multi_tensor_apply_kernel$", arguments=r"::Copy<",
         example=_APPLY + "at::native::(anonymous namespace)::TensorListMetadata<2>, at::native::(anonymous namespace)"
                 "::Copy<c10::BFloat16, float> >()"),
    Rule(family="activation/elementwise", function=r"multi_tensor_apply_kernel$",
         example=_APPLY + "at::native::(anonymous namespace)::TensorListMetadata<3>, at::native::(anonymous namespace)"
                 "::PointwiseOpScalarListFunctor<float, 3, 3, 0>, std::divides<float> >()"),
    # Choosing tokens. A picture is upsampled and its grid has a sampler: neither is sampling.
    Rule(family="sampling", function=r"::sampling::|(?<![a-z])sampl(?:ing|e_|e$)|(?<!Up)(?<!Down)Sampl(?:ing|e(?!r))|"
         r"(?i:multinomial|top_?[kp]_?(?:mask_?logits|renorm|sampl)|rejection_\w*sample|speculative|penalt(?:y|ies)|"
         r"token_bitmask|gumbel|_min_p_|tree_greedy)",
         example="void flashinfer::sampling::TopPSamplingFromProbKernel<1024u, (cub::BlockScanAlgorithm)2, "
                 "float>(float*)"),
    # Softmax and normalisation.
    Rule(family="softmax", function=r"(?i)soft_?max|cross_?entropy",
         example="void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*)"),
    Rule(family="normalisation", function=r"(?i)(?:layer|rms|group|batch|instance|qk|l2)_?norm|GammaBetaBackward|"
         r"RowwiseMoments|cuCompute(?:Part)?GradGammaBeta|cuComputeGradInput|bn_(?:fw|bw)_|ln_(?:fwd|bwd)_|"
         r"Compute(?:Internal"
         r"Gradients|FusedParams|BackwardFusedParams)CUDA|(?:^|::)norm::|_norm_(?:fwd|bwd|kernel|rope)|(?:^|_)rms_|"
         r"welford",
         example="void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int)"),
    Rule(family="normalisation", function=_KENTRY, arguments=r"^[^<]{0,40}(?i:rmsnorm|layernorm)",
         example="_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwdPipelineOnePassIEEEEEvDpT1_"),
    # Random numbers.
    Rule(family="random", function=r"(?:^|::)distribution_\w+kernel|fused_dropout|dropout_kernel|(?i:philox)|curand|"
         r"rocrand|randperm",
         example="void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4, "
                 "at::native::templates::cuda::normal_and_transform<float, float>()::{lambda()#1}>(long)"),
    Rule(family="random", function=r"^at::native::\w*elementwise_kernel$", arguments=r"masked_scale_kernel|bernoulli",
         example=_VECTORIZED + "at::native::(anonymous namespace)::masked_scale_kernel<bool, float, float>(at::Tensor&)"
                 "::{lambda(float, bool)#1}, std::array<char*, 3ul> >(int)"),
    # Rotary embedding is arithmetic, and looks nothing up that matters.
    Rule(family="activation/elementwise", function=r"(?i:rotary)|(?:^|[_:])rope(?:_|$)|R[oO]P[eE]|Rope",
         example="void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*, int)"),
    # Embeddings and indexing.
    Rule(family="embedding/gather", function=r"(?i)embedding|vectorized_gather|scatter_gather|get_rows|(?:bounds_check|"
         r"linearize)_ind|write_indices|DeviceSelect|DeviceCompactInit|index(?:ing|Select|_select|_elementwise|Func|"
         r"_put|_copy|_kernel)",
         example="void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, bool)"),
    Rule(family="embedding/gather", function=r"(?:::|^)(?:compute_grad_weight\w*|sum_and_scatter|krn_partials?_\w+|"
         r"compute_num_of_partial_segments|write_num_of_segments)$",
         example="void at::native::(anonymous namespace)::sum_and_scatter<float, long>(long const*, float*, long)"),
    Rule(family="sorting", function=r"(?i)radix_?sort|bitonic|merge_?sort|segmented_?sort|sort_by_key|sort_?kv|"
         r"(?:^|[_:a-z])top_?k|radix_?(?:select|find)|find_?kth|(?:^|::)sort\w*kernel",
         example="void at::native::bitonicSortKVInPlace<2, -1, 16, 16, float, long, at::native::GTOp<float, true> "
                 ">(P)"),
    Rule(family="sorting", function=r"^rocprim::", arguments=r"sort", example="void rocprim::detail::trampoline_kernel<"
         "rocprim::detail::wrapped_radix_sort_onesweep_config<rocprim::default_config, long> >()"),
    # Quantisation, after the norms and activations that quantise what they write.
    Rule(family="activation/elementwise", function=r"(?i)(?:silu|gelu|swiglu|relu|act)_(?:and_)?mul",
         example="void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel, true>(c10::BFloat16*, int)"),
    Rule(family="quantisation", function=r"(?i)quant(?!ile|um)|cvt_\w*to_fp[468]|fp8_?rowwise|hfp8|fp8_qparam|cast_?"
         r"(?:transpose|fp8|mxfp8|dbias)|(?:down|up)cast_(?:to|from)_mx|block_?scale_?interleave|data_to_scale|"
         r"reconstruct_\w*(?:gptq|exllama|bit)|swizzle_?(?:sf|scale)|hadamard",
         example="void vllm::scaled_fp8_quant_kernel_strided<c10::BFloat16, c10::Float8_e4m3fn>(c10::Float8_e4m3fn*)"),
    Rule(family="quantisation", function=_KENTRY, arguments=r"^[^<]{0,40}(?i:smoothquant|quant)",
         example="void ck_tile::kentry<1, ck_tile::MoeSmoothquant<ck_tile::Pipeline> >(ck_tile::Args)"),
    # Copies: by what they are made for, then by the functor a general kernel is given.
    Rule(family="copy/cast", function=r"CatArrayBatchedCopy|(?:^|::|_)(?:copy|transpose|permute|concat)_?\w*kernel|"
         r"(?i:tensor_kernel_scan_copy|batched_transpose|nchw_?to_?nhwc|nhwc_?to_?nchw|chunk_cat|split_\w*copy|"
         r"(?:reflection|replication|constant)_pad|AddPadding|(?:^|[_:])transpose_|(?:^|[_:])cast_\w{0,20}kernel|"
         r"(?:^|_)cpy_|_pack_|_unpack_|reorder)|"
         r"roll_cuda_kernel|flip_kernel|permute_\w+_kernel",
         example="void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)::"
                 "OpaqueType<4u>, unsigned int, 4, 64, 64>(at::native::(anonymous namespace)::OpaqueType<4u>*)"),
    Rule(family="copy/cast", function=r"(?i:elementwise_?kernel)", arguments=r"copy_kernel_(?:cuda|impl)",
         example="void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIterator"
                 "Base&)::{lambda()#3}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}, "
                 "std::array<char*, 2ul>, 4>(int)"),
    Rule(family="pooling/interpolation", function=r"(?i)(?:max|avg|average|adaptive\w*|lp)_?pool|pooling_?(?:fw|bw)|"
         r"^(?:mlo|MIO)\w*Pooling|upsampl|grid_sampler|interpolat|roi_?(?:align|pool)",
         example="void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>(int, float const*, "
                 "long)"),
    # Reductions.
    Rule(family="reduction", function=r"(?:^|::)(?:reduce_kernel|ReduceKernel)$|_reduce_\w*kernel|"
         r"DeviceReduce\w*Kernel|DeviceSegmentedReduce|cumsum|DeviceScan\w*Kernel|tensor_kernel_scan|lpnorm_cleanup",
         example="void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxOps<float>, "
                 "unsigned int, float, 4, 4> >(at::native::ReduceOp<float, at::native::MaxOps<float> >)"),
    Rule(family="reduction", function=r"^rocprim::", arguments=r"wrapped_(?:scan|reduce)",
         example="void rocprim::detail::"
         "trampoline_kernel<rocprim::detail::wrapped_scan_config<rocprim::default_config, long> >()"),
    # What is left of pointwise work.
    Rule(family="activation/elementwise", function=r"(?i:elementwise)|(?:^|::|_)(?:add|sub|mul|div|scale|exp|clamp|"
         r"cast)_kernel|transform_kernel|"
         r"(?:^|::|_)(?:gelu|silu|swiglu|relu|"
         r"geglu)_?\w*kernel|(?i:pointwise|element_mul)|fill_kernel|triu_tril_kernel|scalePackedTensor|SubTensorOp|"
         r"^Op(?:1d|2d|3d|4d|5d)?Tensor|op_tensor\d?_kernel|unary_kernel|doActivationKernel|moe::dev::activation",
         example=_VECTORIZED + "at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)"),
    Rule(family="activation/elementwise", function=r"^thrust::", arguments=r"parallel_for|__transform", example="void "
         "thrust::cuda_cub::core::_kernel_agent<thrust::cuda_cub::__parallel_for::ParallelForAgent<int> >(int)"),
    Rule(family="activation/elementwise", function=_KENTRY, arguments=r"^[^<]{0,40}ElementWise",
         example="void ck_tile::kentry<1, ck_tile::ElementWiseKernel<ck_tile::Problem> >(ck_tile::Args)"),
))  # fmt: skip


__all__ = ["FAMILIES", "Family", "classify", "is_generated", "rule_of"]

FAMILIES: tuple[Family, ...] = get_args(Family)

FUNCTION_LIMIT = 512
"""Characters of a function's name that patterns look at; the longest real ones have some 250."""

_POINTWISE: frozenset[Family] = frozenset(
    {"activation/elementwise", "copy/cast", "reduction", "sorting", "Triton/compiled fusion"}
)
"""Kernels of these families serve any layer: what they belong to is decided by operator, part and phase."""


def classify(name: str, *, operator: str | None = None, part: str | None = None, phase: str | None = None) -> Family:
    """The family of a kernel, or in a CPU trace of an operator, by its name.

    Where the name leaves it open, the innermost PyTorch operator decides, then the phase of the step and the part of
    the model: a softmax made of max, sub, exp, sum and div is softmax. A kernel named pointwise is never a product,
    wherever it ran. A product that an operator of convolution launches is how that convolution is computed.
    """
    rule = rule_of(name)
    family: Family = rule.family if rule else "other"
    if family == "matrix multiplication" and operator and not _is_operator(name):
        return "convolution" if _family_of_operator(operator) == "convolution" else family
    if family in _POINTWISE:
        return _place(family, operator, part, phase)
    if family == "other" and operator and not _is_operator(name):
        return _family_of_operator(operator)
    return family


def _place(family: Family, operator: str | None, part: str | None, phase: str | None) -> Family:
    """The family that a pointwise kernel, copy or reduction works for; its own where nothing says."""
    by_operator = _family_of_operator(operator) if operator else "other"
    # A copy launched by aten::addmm itself is the bias's, one by a convolution changes a layout: they stay what their
    # names say.
    if by_operator not in _POINTWISE | {"other", "matrix multiplication", "convolution", "view/allocation"}:
        return by_operator
    if phase == OPTIMIZER:
        return "optimizer"
    if part == SOFTMAX:
        return "softmax"
    return "copy/cast" if (family, by_operator) == ("activation/elementwise", "copy/cast") else family


_GENERATED = re.compile(r"triton_(?:poi|red|per|for|unk)_")


def is_generated(name: str) -> bool:
    """Whether a compiler made the kernel of several operators, whatever its family."""
    return _GENERATED.match(name) is not None


def rule_of(name: str) -> Rule | None:
    """The rule that the name alone falls under."""
    if _is_operator(name):
        return OPERATOR_RULES.find(_operator_of(name[:FUNCTION_LIMIT]))
    function, arguments, _ = split_name(name)
    return KERNEL_RULES.find(function[:FUNCTION_LIMIT], arguments)


_OPERATOR = re.compile(
    r"(?:aten|stepscope|c10d|_c10d_functional|prims|autograd|torch|profiler|mkl|mkldnn|gloo|mpi)::|(?:nccl|gloo|mpi):|"
    r"Optimizer\.|record_param_comms|\w+Backward\d*$"
)
_BACKWARD = re.compile(r"(\w+?)Backward\d*$")


def _is_operator(name: str) -> bool:
    return _OPERATOR.match(name[:FUNCTION_LIMIT]) is not None


def _family_of_operator(operator: str) -> Family:
    rule = OPERATOR_RULES.find(_operator_of(operator[:FUNCTION_LIMIT]))
    return rule.family if rule else "other"


def _operator_of(name: str) -> str:
    """An autograd node is what it is the gradient of: AddmmBackward0 -> aten::addmm."""
    match = _BACKWARD.match(name)
    if match is None:
        return name
    return "aten::" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", match[1]).lower()


# One kernel's name in plain words.


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelExplanation:
    """What a name says, and what follows from it, as (heading, sentence) pairs."""

    kernel: KernelName
    family: Family
    lines: list[tuple[str, str]] = field(default_factory=list)


def explain_kernel(name: str) -> KernelExplanation:
    """What the name says of its kernel. Of an unknown kernel that is its function's name and no more."""
    kernel, family = decode(name), classify(name)
    sayings = (
        ("runs", "" if kernel.operation in kernel.function else kernel.operation),
        ("family", family),
        ("library", _library(kernel)),
        ("architecture", _architecture(kernel)),
        ("types", _types(kernel)),
        ("unit", _unit(kernel)),
        ("layout", _layout(kernel)),
        ("products", _products(kernel)),
        ("tile", _tile(kernel, family)),
        ("split", _split(kernel)),
        ("schedule", ", ".join(kernel.schedule)),
    )
    lines = [(heading, sentence) for heading, sentence in sayings if sentence]
    if len(lines) == 1 and family == "other":
        lines.append(("known", "nothing beyond the function's name"))
    return KernelExplanation(kernel=kernel, family=family, lines=lines)


def answer_kernel(explanation: KernelExplanation) -> Answer:
    """The function's name, and a line for each thing that it says."""
    function = middle_cut(printable(explanation.kernel.function), LONGEST_NAME)
    rows = [(heading, printable(sentence)) for heading, sentence in explanation.lines]
    return Answer(
        study="kernel",
        question="",
        lead=(Line(function, "strong"),),
        tables=(table_of("part", ("meaning", PROSE), rows=rows),),
    )


_LIBRARY_NOTES = {
    "CUTLASS": "; cuBLAS ships kernels made with it, so a call of cuBLAS may have chosen it",
    "Triton": ", generated by torch.compile (TorchInductor) from the operators in the name",
    "xFormers": ": memory-efficient attention, as PyTorch carries it",
    "ATen": ", PyTorch's own kernels",
    "Tensile": ", which makes the kernels of AMD's rocBLAS and hipBLASLt",
    "NCCL": " (RCCL on AMD names its kernels alike)",
}


def _library(kernel: KernelName) -> str:
    if kernel.library is None:
        return ""
    if kernel.function.startswith("aten::"):
        return "ATen: no kernel but an operator of PyTorch, as traces of a CPU name what runs"
    if kernel.operation.startswith("nvjet_"):
        return "cuBLAS, whose family of kernels for Hopper and later is called nvjet"
    return kernel.library + _LIBRARY_NOTES.get(kernel.library, "")


def _architecture(kernel: KernelName) -> str:
    built = kernel.architecture
    if built is None:
        return ""
    if not built.startswith("sm"):
        return f"written for {built}"
    number = int(built[2:])
    if number == 90 and kernel.unit == "tensor core":
        return "written for sm90 (Hopper), whose warp-group Tensor Core instructions (wgmma) no other GPU has"
    if number >= 90:
        return f"written for {built}"
    plain = kernel.unit == "cuda core" and kernel.input_dtype == "fp32"
    fp32 = ": fp32 products on a Hopper are usually taken by kernels written for sm80" if plain else ""
    where = f" (sm90, Hopper, say){fp32}" if number == 80 else ""
    return f"written for {built}, used on later GPUs too{where}"


def _types(kernel: KernelName) -> str:
    if kernel.input_dtype is None and kernel.output_dtype is None:
        return "a part of the name is cut off: it does not tell them" if "_xmma_gemm_" in kernel.name else ""
    if kernel.second_pass or (kernel.unit is None and kernel.accumulate_dtype is None):
        if kernel.input_dtype == kernel.output_dtype:
            return f"{kernel.input_dtype} elements"
        return f"reads {kernel.input_dtype or 'a type the name does not say'}, writes {kernel.output_dtype or 'unsaid'}"
    operands = kernel.input_dtype or "operands of a type the name does not say"
    text = "fp32 operands rounded to tf32 (10 bits of mantissa)" if is_tf32(kernel) else f"{operands} operands"
    if kernel.input_dtype is None:
        text = operands
    if kernel.accumulate_dtype:
        text += f", products summed in {kernel.accumulate_dtype}"
    if kernel.output_dtype:
        text += f", result written as {kernel.output_dtype}"
    return text


_WITHOUT_TF32 = ("sm70", "sm72", "sm75")
"""Volta and Turing, whose Tensor Cores multiply fp16 and integers."""


def _unit(kernel: KernelName) -> str:
    if kernel.unit == "tensor core":
        return "Tensor Cores" + (
            "; true fp32 is torch.set_float32_matmul_precision('highest')" if is_tf32(kernel) else ""
        )
    if kernel.unit is None:
        return ""
    if kernel.input_dtype == "fp32" and kernel.architecture in _WITHOUT_TF32:
        return (
            "CUDA cores, by fused multiply-adds (FFMA): Tensor Cores have no fp32 of their own, and those of Volta and "
            "Turing multiply neither TF32 nor bf16, but fp16 (torch.autocast with a GradScaler)"
        )
    if kernel.input_dtype == "fp32":
        return (
            "CUDA cores, by fused multiply-adds (FFMA): Tensor Cores have no fp32 of their own. To use them, allow "
            "TF32 (torch.set_float32_matmul_precision('high')) or take the products in bf16 (torch.autocast)"
        )
    return "CUDA cores, not Tensor Cores"


# cuBLAS is column-major: a row-major tensor is to it the transposed matrix, so PyTorch's C = A B is asked of it as
# C' = B' A', and its first letter is of PyTorch's second operand. A row-major operand is then n if it is that second
# one used as it lies, and so is the first; an operand that PyTorch reads transposed is t. Traces with shapes and
# strides agree: (2048x768)(768x3072, strides 1, 768) is tn, strides (3072, 1) nn, (2048x768 transposed)(2048x768) nt.
_LAYOUTS = {
    "tn": "A transposed, B not (column-major); to row-major PyTorch: X Wᵀ, the second operand read transposed",
    "nn": "neither operand transposed (column-major); to row-major PyTorch: X Y, both read as they lie",
    "nt": "B transposed, A not (column-major); to row-major PyTorch: Xᵀ Y, the first operand read transposed",
    "tt": "both operands transposed (column-major); to row-major PyTorch: Xᵀ Yᵀ, both read transposed",
}
_PRODUCTS = {
    "tn": "of a linear layer: the forward Y = X Wᵀ; of attention: scores Q Kᵀ, and in backward dP = dO Vᵀ",
    "nn": "of a linear layer: the gradient of its input dX = dY W (not of its weight, as is sometimes written); "
    "of attention: the output P V, and in backward dQ = dS K",
    "nt": "of a linear layer: the gradient of its weight dW = dYᵀ X; of attention, in backward: dV = Pᵀ dO and "
    "dK = dSᵀ Q",
    "tt": "of no product of a usual step",
}


def _layout(kernel: KernelName) -> str:
    return f"{kernel.transposes}: {_LAYOUTS[kernel.transposes]}" if kernel.transposes else ""


def _products(kernel: KernelName) -> str:
    if kernel.transposes is None:
        return ""
    text = _PRODUCTS[kernel.transposes]
    if kernel.transposes in {"tn", "nn"}:
        text += ". With a weight kept as (in, out) instead of PyTorch's (out, in), tn and nn of a linear layer swap"
    return text


def _tile(kernel: KernelName, family: Family) -> str:
    if kernel.tile is None:
        return f"head dimension up to {kernel.head_dim}" if kernel.head_dim else ""
    m, n, k = kernel.tile
    if family == "attention (fused)":
        text = f"each thread block works on {m} queries and {n} keys at a time"
        # Kernels are built for some head dimensions; others are padded to the next.
        return text + (f", head dimension up to {kernel.head_dim}" if kernel.head_dim else "")
    text = f"each thread block computes a {m}x{n} piece of the output"
    if k:
        text += f", stepping over K by {k}"
    if kernel.stages:
        text += f", with {kernel.stages} stages of K in shared memory: one in use, the others on their way"
    if kernel.cluster and kernel.cluster != (1, 1):
        text += f", in clusters of {kernel.cluster[0]}x{kernel.cluster[1]} thread blocks that share what they load"
    return text


def _split(kernel: KernelName) -> str:
    if kernel.second_pass:
        return "adds up the partial results of a product whose K was split over thread blocks: part of that product"
    if kernel.split_k:
        return "K is split over several thread blocks, whose partial results are added up afterwards (split-K)"
    if kernel.sliced_k and kernel.sliced_k > 1:
        return f"K is sliced in {kernel.sliced_k} among the warps of a thread block"
    return ""
