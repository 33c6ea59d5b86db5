"""The rules that sort operators into families by their names."""

from stepscope.traces.kernels.family_rules import Rule, Rulebook

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
