"""Kernels of the stacks that people serve and train with, by the names that their sources give them."""
# ruff: noqa: E501  (the names are as long as they are)

import pytest

from stepscope.traces.kernels.families import classify, explain_kernel
from stepscope.traces.kernels.names import kernel_label

KERNELS = {
    "communication": (
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)",
        "void sglang::cross_device_reduce_2stage<__half, 4>(sglang::RankData*)",
        "void aiter::cross_device_reduce_1stage_naive<__hip_bfloat16, 8>(aiter::RankData*)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<__nv_bfloat16, 8, true>(P)",
        "void tensorrt_llm::kernels::lamportStyleOneShotAllReduceNormKernel<__half, 8>(P)",
        "void tensorrt_llm::kernels::twoShotAllReduceKernel<__half, 8, true>(P)",
        "void (anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8, false>(P)",
        "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<float, 16, 4>(P)",
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)",
        "void (anonymous namespace)::multimem_all_gather_kernel<16>(P)",
        "nvshmemi_transfer_amo",
        "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(P)",
        "void deep_ep::layout::get_dispatch_layout<256, 4, 8>(P)",
        "void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(P)",
        "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
        "ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K const)",
        "mscclKernel_Sum_half_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)",
        "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<__half> >(P)",
        "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(P)",
    ),
    "matrix multiplication": (
        "_ZN5aiter36flatmm_uk_gfx9_f16f8_128x256x128_1x4_16x16x32E",
        "void aiter::wvSplitK_hf_sml_<__hip_bfloat16, 64, 2, 16, 8, 2, 1>(int)",
        "_ZN5aiter48fmoe_stage1_bf16_pertokenFp8_g1u1_128x128_pf3E",
        "_ZN5aiter42f4gemm_bf16_per1x32Fp4_BpreShuffle_96x640E",
        "void ck::kernel_moe_gemm<ck::GridwiseMoeGemm<ck::tensor_layout::gemm::RowMajor> >(P)",
        "_ZN2ck20kernel_moe_gemm_2ldsINS_15GridwiseMoeGemmIEEEEvT_",
        "_ZN7ck_tile6kentryILi1ENS_18F8MoeFlatmmKernelIEEEEvDpT1_",
        "bmm_E4m3_E4m3E4m3_Fp32_t128x8x128u2_s6_et64x8_m64x8x32_cga1x1x1_16dp256b_TN_transOut_schedS_bN_dsFp8",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u, 2048u, 1u>(float*)",
        "void marlin_moe_wna16::Marlin<(long)1, 128>(P)",
        "void gptq_marlin::Marlin<__half, 4, 256>(P)",
        "void vllm::gptq::gemm_half_q_half_gptq_4bit_kernel<true, 4>(P)",
        "void vllm::awq::gemm_forward_4bit_cuda_m16nXk32<128>(P)",
        "awq_gemm_kernel",
        "void kgemm_4bit_inference_naive<__nv_bfloat16, 128, 16>(P)",
        "_p_matmul_ogs_NNT_bf16xbf16xmxfp4_128x256x64x1_swiglu",
        "fused_moe_kernel",
        "_w8a8_block_fp8_matmul",
        "_lora_shrink_kernel",
        "bf16gemm_fp32bf16_tn_64x64_splitk_clean",
        "_ZN5aiter37fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_32x256E",
        "void wvSplitK_hf_sml_<__hip_bfloat16, 64, 2, 16, 8, 2, 1>(int)",
        "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm_xdl_cshuffle_v3<ck::tensor_layout::gemm::RowMajor> >(P)",
        "_ZN2ck27kernel_gemm_xdl_cshuffle_v3INS_3FooEEEvT_",
        "void ck_tile::kentry<256, 1, ck_tile::GemmKernel<ck_tile::X> >(ck_tile::GemmKernelArgs)",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<X>>>(P)",
        "void cutlass::Kernel2<vllm::enable_sm89_to_sm90<cutlass::gemm::kernel::DefaultGemmWithVisitor<X> > >(P)",
        "void cutlass::device_kernel<(anonymous namespace)::cutlass_3x_gemm<X>>(P)",
        "cutlass3x_sm100_tensorop_s256x256x16gemm_bf16_bf16_f32_bf16_bf16_256x256x64_0x0x1_0_tnn_align8",
        "kernel_cutlass_kernel_quackgemm_sm90GemmSm90_object_at__TiledMMA",
        "void rocblas_gemvt_warp_reduce_kernel<false, 256, int, float const*, float const, float>(P)",
        "void mul_mat_vec_q<(ggml_type)12, 1, false>(void const*)",
    ),
    "attention (fused)": (
        "void qk_int_sv_f16_attn_kernel<128u, 64u, 32u, 64u, 128u, (DataType)1, (QuantGranularity)3>(signed char*)",
        "void qk_int8_sv_f8_attn_kernel<64u, 128u, 128u, 128u, (QuantGranularity)3>(CUtensorMap_st)",
        "void sageattention_sm89::qk_int_sv_f8_attn_kernel<128u, 64u, 32u>(signed char*)",
        "_ZN5aiter41fmha_fwd_hd128_bf16_causal_rtna_groupE",
        "_ZN5aiter37fmha_bwd_hd128_bf16_a32_rtne_psskE",
        "_ZN5aiter45mla_dec_stage1_bf16_a16w16_subQ128_mqa128E",
        "_ZN5aiter46pa_bf16_pertokenFp8_gqa8_2tg_4w_mtp_msk1E",
        "_ZN5aiter19fwd_fp8_256t_bf16stE",
        "void aiter::kn_mla_reduce_v1<aiter::MlaReduceKernelV1Traits<512, 16, 4>, float, hip_bfloat16>(P)",
        "void paged_attention_ll4mi_QKV_mfma16_kernel<0, __hip_bfloat16, __hip_bfloat16, (vllm::Fp8KVCacheDataType)0>(P)",
        "_ZN7ck_tile6kentryINS_6gfx9_tELi2ENS_13FmhaFwdKernelINS_33BlockFmhaPipelineQRKSVSAsyncIEEEEEvDpT1_",
        "_fwd_grouped_kernel_stage1_rope",
        "void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>, false>(Flash_fwd_params)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<X>>>(P)",
        "void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaMlaKernelTmaWarpspecialized<X>>(P)",
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__tensorptrbf16gmem",
        "void flashinfer::BatchPrefillWithRaggedKVCacheKernel<flashinfer::KernelTraits<X>>(P)",
        "void flashinfer::PrefillWithKVCacheKernel<flashinfer::CollectiveMainloop<X>>(P)",
        "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u, 8u, 4u, __nv_bfloat16>(P)",
        "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvDenseP32MultiCtasKvVarSeqQ16Kv128StaticSwapsAbForGen",
        "void vllm::paged_attention_v2_reduce_kernel<unsigned short, 128, 128, 512>(P)",
        "void paged_attention_ll4mi_QKV_mfma16_kernel<__hip_bfloat16, __hip_bfloat16>(P)",
        "kernel_unified_attention_3d",
        "_fwd_kernel_stage2",
        "_fwd_kernel_stage2_asm",
        "void vllm::merge_attn_states_kernel<__nv_bfloat16, 128u>(P)",
        "void flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, float, long, 512, 32>(P)",
        "void deep_gemm::sm90_fp8_paged_mqa_logits<64u, 128u>(P)",
        "mla_dec_stage1_bf16_a16w16_subQ16_mqa16",
        "pa_bf16_pertokenFp8_gqa8_2tg_4w",
        "bwd_kernel_dk_dv",
        "void flash::prepare_varlen_num_blocks_kernel<1, true>(P)",
    ),
    "convolution": (
        "causal_conv1d_fwd_kernel",
        "ampere_fp16_s16816cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc2nchw_tn_v1",
        "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1",
        "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int)",
        "miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3_stride1",
        "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt256x64x8_wt64x16x4_ws1x1",
        "void cutlass::device_kernel<cutlass::conv::kernel::ConvUniversal<X>>(P)",
    ),
    "recurrence": (
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "_chunk_scan_fwd_kernel",
        "gdr_decode_batch_kernel",
        "void at::native::(anonymous namespace)::kernel::lstm_cell_forward<float>(P)",
    ),
    "normalisation": (
        "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64ELi8ELb0ELb0ELb1ELi1EEEvPT0_PT_PfS4_S4_S4_diiiiiiib",
        "void vllm::rms_norm_static_fp8_quant_kernel<c10::BFloat16>(P)",
        "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(P)",
        "kernel_cutlass_kernel_quackrmsnormRMSNorm_object_at__tensorptrbf16",
        "void tensorrt_llm::kernels::fusedQKNormRopeKernel<128>(P)",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1",
        "triton_per_fused__fused_rms_norm_add_2",
        "triton_red_fused_native_layer_norm_0",
        "_fused_rms_fp8_group_quant_kernel",
    ),
    "softmax": ("triton_per_fused__softmax_add_1", "liger_cross_entropy_kernel"),
    "reduction": ("triton_red_fused_sum_3", "at::native::xpu::ReduceKernel<1, at::native::xpu::ReduceOp<float> >"),
    # A product in the name of Inductor's fusion is what it follows.
    "Triton/compiled fusion": (
        "triton_poi_fused_add_mul_silu_2",
        "triton_poi_fused_convolution_relu_1",
        "triton_poi_fused_addmm_gelu_1",
        "triton_for_fused_0",
    ),
    "expert routing": (
        "void aiter::grouped_topk_opt_sort_kernel<float, 8, true>(P)",
        "void vllm::moe::topkGatingSoftmax<8, 128, 4, 16, 32, int>(P)",
        "void moe::dev::routing::routingDeepSeek::routingMainKernel<X>(P)",
        "void tensorrt_llm::kernels::finalizeMoeRoutingKernel<X>(P)",
        "void tensorrt_llm::kernels::cutlass_kernels::expandInputRowsKernel<X>(P)",
        "_finalize_matmul_scatter_bf16",
        "_topk_forward",
        "_fwd_kernel_ep_gather",
        "compute_masked_m_triton_kernel",
        "void vllm::moe::shuffleInputRowsKernel<X>(P)",
        "_ZN7ck_tile6kentryILi1ENS_23MoeSortingMultiPhaseKernel_P0_v2I",
    ),
    "sampling": (
        "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>(P)",
        "rejection_greedy_sample_kernel",
        "void vllm::apply_repetition_penalties_kernel<float>(P)",
    ),
    "pooling/interpolation": (
        "void at::native::(anonymous namespace)::upsample_nearest2d_out_frame<float>(P)",
        "void at::native::(anonymous namespace)::grid_sampler_2d_kernel<float, int>(P)",
    ),
    "quantisation": (
        "void QuantInt8Kernel<128u, 32u, 1u, false, false, __nv_bfloat16>(__nv_bfloat16*)",
        "void aiter::dynamic_per_token_scaled_quant_kernel<__hip_bfloat16, ck_tile::fp8_t>(P)",
        "void per_token_group_quant_8bit_kernel<c10::BFloat16, c10::Float8_e4m3fn, true>(P)",
        "void vllm::cvt_fp16_to_fp4<__nv_bfloat16, false>(P)",
        "awq_dequantize_kernel",
        "void fbgemm_gpu::(anonymous namespace)::_FP8rowwise_to_float_cuda_kernel<float>(unsigned char const*, int)",
    ),
    "activation/elementwise": (
        "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &silu>(P)",
        "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<true>(P)",
        "_silu_mul_fp8_quant_deep_gemm",
        "at::native::xpu::VectorizedElementwiseKernel<4, at::native::xpu::MulFunctor<float> >",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<convolution_attention_gemm> >(P)",
    ),
    "copy/cast": (
        "void aiter::reshape_and_cache_kernel<__hip_bfloat16, __hip_bfloat16>(P)",
        "void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, unsigned char>(P)",
        "void flashinfer::AppendPagedKVCacheKernel<128u>(P)",
        "batched_transpose_16x32_half",
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>(P)",
    ),
    "memcpy/memset": ("__amd_rocclr_fillBufferAligned",),
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in KERNELS.items() for name in names])
def test_by_the_names_of_their_sources(family: str, name: str):
    assert classify(name) == family


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelINS_8PipelineEEEEEvDpT1_", "FmhaFwdKernel"),
        ("void ck_tile::kentry<256, 1, ck_tile::GemmKernel<ck_tile::X> >(ck_tile::GemmKernelArgs)", "GemmKernel"),
        ("void ck_tile::kentry<1>(int)", "kentry"),
    ],
)
def test_a_wrapper_of_composable_kernel_is_named_by_what_it_runs(name: str, label: str):
    assert kernel_label(name) == label


@pytest.mark.parametrize("operator", ["aten::cudnn_convolution", "aten::convolution_backward"])
def test_a_product_that_a_convolution_launches_is_the_convolution(operator: str):
    """A layout changed for it stays a copy, which a reader can avoid."""
    assert classify("volta_sgemm_64x64_nt", operator=operator) == "convolution"
    assert classify("volta_sgemm_64x64_nt", operator="aten::mm") == "matrix multiplication"
    assert classify("void cudnn::ops::nchwToNhwcKernel<float>(P)", operator=operator) == "copy/cast"


@pytest.mark.parametrize(
    ("operator", "family"),
    [
        ("symm_mem::one_shot_all_reduce", "communication"),
        ("c10d::allreduce_", "communication"),
        ("vllm::unified_attention_with_output", "attention (fused)"),
        ("_C::cutlass_scaled_mm", "matrix multiplication"),
        ("vllm::moe_forward", "other"),
        ("vllm::rocm_unquantized_gemm", "matrix multiplication"),
        ("aten::_scaled_grouped_mm_v2", "matrix multiplication"),
        ("aten::_weight_int4pack_mm_for_cpu", "matrix multiplication"),
        ("aten::_foreach_mm", "matrix multiplication"),
        ("aiter::mla_decode_stage1_asm_fwd", "attention (fused)"),
        ("aiter::concat_and_cache_mla", "copy/cast"),
        ("aiter::fmoe_g1u1", "matrix multiplication"),
        ("flash_attn_3::fwd", "attention (fused)"),
        ("sageattention_sm89::qk_int8_sv_f8_accum_f32_fuse_v_scale_attn", "attention (fused)"),
        ("sageattention_fused::transpose_pad_permute_cuda", "copy/cast"),
    ],
)
def test_an_operator_tells_what_a_name_does_not(operator: str, family: str):
    assert classify("my_kernel", operator=operator) == family


def test_volta_and_turing_are_told_of_fp16_alone():
    for name, own in (
        ("volta_sgemm_64x64_nt", True),
        ("turing_sgemm_64x64_nt", True),
        ("ampere_sgemm_64x64_nt", False),
    ):
        unit = dict(explain_kernel(name).lines)["unit"]
        assert ("GradScaler" in unit) is own and ("set_float32_matmul_precision" in unit) is not own
