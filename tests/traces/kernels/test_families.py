"""The family of a kernel: by rules, each tried on its example, then by where the kernel ran."""
# ruff: noqa: E501  (the names are as long as they are)

import pytest

from stepscope.traces.kernels.families import FAMILIES, KERNEL_RULES, OPERATOR_RULES, Rule, classify, rule_of

ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda(at::TensorIteratorBase&)::{lambda()"
    "#2}::operator()() const::{lambda(float)#1}, std::array<char*, 2ul> >(int)"
)
REDUCTION = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxOps<float>, unsigned int> >()"
)
COPY = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda"
    "(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(float)#1}>(at::TensorIteratorBase&)>(int)"
)
FOREACH = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "TensorListMetadata<3>, at::native::(anonymous namespace)::PointwiseOpScalarListFunctor<float, 3, 3, 0> >()"
)
SORT = (
    "void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::detail::radix::"
    "policy_hub<long> >(int)"
)
GEMM = "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel"


@pytest.mark.parametrize("rule", KERNEL_RULES.rules, ids=lambda rule: rule.example[:60])
def test_each_rule_of_kernels_holds_for_its_example(rule: Rule):
    """Through that rule: none is dead, none hidden by an earlier one."""
    assert rule_of(rule.example) is rule
    assert classify(rule.example) == rule.family


@pytest.mark.parametrize("rule", OPERATOR_RULES.rules, ids=lambda rule: rule.example[:60])
def test_each_rule_of_operators_holds_for_its_example(rule: Rule):
    """For a kernel that such an operator launched, and whose own name says nothing."""
    assert OPERATOR_RULES.find(rule.example) is rule
    assert classify("my_kernel", operator=rule.example) == rule.family


def test_every_family_but_other_has_a_rule():
    assert {rule.family for rule in KERNEL_RULES.rules + OPERATOR_RULES.rules} | {"other"} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        # [16] What a kernel works with is no sign of what it is.
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8, 4, 4, "
         "4, false, false, cutlass::half_t>, false, cutlass::gemm::GemmShape<1, 1, 1> >(P)", "attention (fused)"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, cutlass::gemm::X>::Params)",
         "attention (fused)"),
        ("void at::native::vectorized_elementwise_kernel<4, cutlass_gemm_functor, x>(int)", "activation/elementwise"),
        ("void at::native::reduce_kernel<512, 1, softmax_sum_functor<float> >(x)", "reduction"),
        (GEMM, "matrix multiplication"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_nn_align8>(P)",
         "matrix multiplication"),
        ("void cutlass::Kernel<my_epilogue>(P)", "other"),
        ("ampere_sgemm_128x64_tn", "matrix multiplication"),
        ("volta_h884gemm_128x64_ldg8_nn", "matrix multiplication"),
        ("nvjet_hsh_256x144_64x4_1x2_h_bz_coopA_TNT", "matrix multiplication"),
        ("void gemv2T_kernel_val<int, int, float, float>(P)", "matrix multiplication"),
        ("void gemvNSP_kernel<float, float>(P)", "matrix multiplication"),
        ("void gemmSN_NN_kernel<float, 128>(P)", "matrix multiplication"),
        ("void internal::gemvx::kernel<int, int, __nv_bfloat16>(P)", "matrix multiplication"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0",
         "attention (fused)"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*)", "attention (fused)"),
        ("_attn_fwd", "attention (fused)"),
        ("flash_forward", "attention (fused)"),
        ("hopper_forward", "attention (fused)"),
        ("hopper_gradients_of_heads", "attention (fused)"),
        ("hopper_gradients", "attention (fused)"),
        ("flash_query_gradients", "attention (fused)"),
        ("triton_tem_fused_flex_attention_backward_3", "attention (fused)"),
        ("triton_poi_fused_embedding_dense_backward_16", "embedding/gather"),
        ("triton_red_fused__log_softmax__to_copy_nll_loss_forward_sub_view_10", "softmax"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>(x)", "softmax"),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float>(x)", "normalisation"),
        ("_rms_norm_forward_kernel", "normalisation"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>(x)", "embedding/gather"),
        ("void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>(x)",
         "embedding/gather"),
        ("void at::native::_scatter_gather_elementwise_kernel<128, 8, x>(x)", "embedding/gather"),
        ("void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>(x)",
         "random"),
        (SORT, "sorting"),
        ("Memset (Device)", "memcpy/memset"),
        ("[CUDA memcpy Device-to-Host]", "memcpy/memset"),
        ("", "other"),
        ("my_kernel", "other"),
        # Operators, as a CPU trace names what runs.
        ("aten::bmm", "matrix multiplication"),
        ("aten::mul", "activation/elementwise"),
        ("aten::add_", "activation/elementwise"),
        ("aten::_softmax", "softmax"),
        ("aten::copy_", "copy/cast"),
        ("aten::nll_loss_forward", "reduction"),
        ("aten::nll_loss_backward", "activation/elementwise"),
        ("aten::sum", "reduction"),
        ("AddmmBackward0", "matrix multiplication"),
        ("NativeLayerNormBackward0", "normalisation"),
        ("LogSoftmaxBackward0", "softmax"),
        ("ViewBackward0", "view/allocation"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "other"),
        ("torch::autograd::AccumulateGrad", "other"),
        ("aten::empty", "view/allocation"),
        ("aten::view", "view/allocation"),
        ("aten::t", "view/allocation"),
        ("aten::as_strided", "view/allocation"),
        ("aten::index_put_", "embedding/gather"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("c10d::allreduce_", "communication"),
    ],
)  # fmt: skip
def test_by_name(name: str, family: str):
    assert classify(name) == family


@pytest.mark.parametrize(
    ("name", "where", "family"),
    [
        (ELEMENTWISE, {"part": "softmax"}, "softmax"),
        (REDUCTION, {"part": "softmax"}, "softmax"),
        (COPY, {"part": "softmax"}, "softmax"),
        ("aten::exp", {"part": "softmax"}, "softmax"),
        ("aten::view", {"part": "softmax"}, "view/allocation"),
        (GEMM, {"part": "softmax"}, "matrix multiplication"),
        # A scale or mask beside a product is none, whether range or operator says where it ran.
        (ELEMENTWISE, {"part": "attention scores"}, "activation/elementwise"),
        (ELEMENTWISE, {"part": "attention output", "operator": "aten::bmm"}, "activation/elementwise"),
        (COPY, {"operator": "aten::addmm"}, "copy/cast"),
        ("a_new_product", {"operator": "aten::addmm"}, "matrix multiplication"),
        (COPY, {"operator": "aten::_to_copy"}, "copy/cast"),
        (ELEMENTWISE, {"operator": "aten::copy_"}, "copy/cast"),
        (REDUCTION, {"operator": "aten::native_layer_norm"}, "normalisation"),
        (ELEMENTWISE, {"operator": "aten::_softmax"}, "softmax"),
        (ELEMENTWISE, {"operator": "aten::normal_"}, "random"),
        (SORT, {"operator": "aten::embedding_dense_backward"}, "embedding/gather"),
        (FOREACH, {}, "activation/elementwise"),
        (FOREACH, {"phase": "optimizer"}, "optimizer"),
        (FOREACH, {"operator": "aten::_foreach_addcdiv_"}, "optimizer"),
        (ELEMENTWISE, {"phase": "optimizer"}, "optimizer"),
        ("aten::addcdiv_", {"phase": "optimizer"}, "optimizer"),
        (GEMM, {"phase": "optimizer"}, "matrix multiplication"),
        ("triton_for_fused_3", {"phase": "optimizer"}, "optimizer"),
        ("triton_per_fused_amax_exp_sub_sum_2", {"part": "softmax"}, "softmax"),
        ("aten::mul", {"operator": "aten::mul", "phase": "forward", "part": "feed-forward"}, "activation/elementwise"),
    ],
)
def test_by_where_it_ran(name: str, where: dict[str, str], family: str):
    assert classify(name, **where) == family
