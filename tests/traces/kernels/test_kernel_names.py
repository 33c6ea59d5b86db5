"""What a kernel's name says, on names as profilers wrote them."""
# ruff: noqa: E501  (the names are as long as they are)

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from stepscope.core.run_directory import load_runs
from stepscope.traces.kernels.families import KERNEL_RULES, classify
from stepscope.traces.kernels.names import KernelName, decode, is_tf32, split_name

RESULTS = Path(__file__).parents[3] / "results"
IDENTITY = {"name", "function", "arguments", "operation"}
FP32: dict[str, Any] = {"input_dtype": "fp32", "accumulate_dtype": "fp32", "output_dtype": "fp32"}
BF16: dict[str, Any] = {"input_dtype": "bf16", "accumulate_dtype": "fp32", "output_dtype": "bf16"}
FP16: dict[str, Any] = {"input_dtype": "fp16", "accumulate_dtype": "fp32", "output_dtype": "fp16"}
TF32: dict[str, Any] = {"input_dtype": "tf32", "accumulate_dtype": "fp32", "output_dtype": "fp32"}
ELEMENTS: dict[str, Any] = {"library": "ATen", "input_dtype": "fp32", "output_dtype": "fp32"}
SIMT_SGEMM: dict[str, Any] = {
    "library": "CUTLASS", "architecture": "sm80", **FP32, "transposes": "nt", "tile": (128, 256, 8), "stages": 4,
    "unit": "cuda core",
}  # fmt: skip
"""The fields of one kernel. Two profilers write its name differently, one of them mangled."""

EXPECTED: dict[str, dict[str, Any]] = {
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas": {
        "library": "cuBLAS", "architecture": "sm80", **FP32, "transposes": "tn", "tile": (128, 128, 8), "stages": 3,
        "unit": "cuda core",
    },
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize256x128x8_stage3_warpsize4x2x1_ffma_aligna4_alignc4_execute_split_k_kernel__5x_cublas": {
        "library": "cuBLAS", "architecture": "sm80", **FP32, "transposes": "nn", "tile": (256, 128, 8), "stages": 3,
        "split_k": True, "second_pass": True,
    },
    "sm80_xmma_gemm_f32f32_tn_n_tilesize128x128x8": {
        "architecture": "sm80", "transposes": "tn", "tile": (128, 128, 8),
    },
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n": {"architecture": "sm80", **FP32, "transposes": "tn"},
    "sm80_xmma_gemm_f32f32_f32f3": {"architecture": "sm80"},
    "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_execute_kernel__5x_cublas": {
        "library": "cuBLAS", "architecture": "sm80", **TF32, "transposes": "nn", "tile": (128, 128, 16), "stages": 4,
        "unit": "tensor core",
    },
    "sm90_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize256x128x32_warpgroupsize2x1x1_execute_segment_k_off_kernel__5x_cublas": {
        "library": "cuBLAS", "architecture": "sm90", **TF32, "transposes": "nt", "tile": (256, 128, 32),
        "unit": "tensor core",
    },
    "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x16_execute_kernel__5x_cublas": {
        "library": "cuBLAS", "architecture": "sm80", **BF16, "transposes": "tn", "tile": (128, 128, 32), "stages": 4,
        "unit": "tensor core",
    },
    "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x128x64_stage4_warpsize2x2x1_tensor16x8x32_execute_kernel__5x_cublas": {
        "library": "cuBLAS", "architecture": "sm89", "input_dtype": "fp8", "accumulate_dtype": "fp32",
        "output_dtype": "bf16", "transposes": "tn", "tile": (64, 128, 64), "stages": 4, "unit": "tensor core",
    },
    "ampere_sgemm_128x64_tn": {
        "library": "cuBLAS", "architecture": "sm80", **FP32, "transposes": "tn", "tile": (128, 64, None),
        "unit": "cuda core",
    },
    "ampere_sgemm_128x32_sliced1x4_nn": {
        "library": "cuBLAS", "architecture": "sm80", **FP32, "transposes": "nn", "tile": (128, 32, None),
        "unit": "cuda core", "sliced_k": 4,
    },
    "volta_sgemm_32x128_nt": {
        "library": "cuBLAS", "architecture": "sm70", **FP32, "transposes": "nt", "tile": (32, 128, None),
        "unit": "cuda core",
    },
    "volta_h884gemm_128x64_ldg8_nn": {
        "library": "cuBLAS", "architecture": "sm70", "input_dtype": "fp16", "accumulate_dtype": "fp16",
        "output_dtype": "fp16", "transposes": "nn", "tile": (128, 64, None), "unit": "tensor core",
    },
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn": {
        "library": "cuBLAS", "architecture": "sm80", **BF16, "transposes": "tn", "tile": (128, 128, 32), "stages": 5,
        "unit": "tensor core",
    },
    "turing_fp16_s1688gemm_fp16_256x128_ldg8_f2f_nt": {
        "library": "cuBLAS", "architecture": "sm75", **FP16, "transposes": "nt", "tile": (256, 128, None),
        "unit": "tensor core",
    },
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(T1::Params)": SIMT_SGEMM,
    "_ZN7cutlass7Kernel2I44cutlass_80_simt_sgemm_128x256_8x4_nt_align1EEvNT_6ParamsE": SIMT_SGEMM,
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x128_32x3_nn_align4>(cutlass_80_tensorop_s1688gemm_64x128_32x3_nn_align4::Params)": {
        "library": "CUTLASS", "architecture": "sm80", **TF32, "transposes": "nn", "tile": (64, 128, 32), "stages": 3,
        "unit": "tensor core",
    },
    "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_nn_align8": {
        "library": "CUTLASS", "architecture": "sm80", **BF16, "transposes": "nn", "tile": (128, 256, 32), "stages": 3,
        "unit": "tensor core",
    },
    "void cutlass::device_kernel<cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_void_bf16_128x128x64_2x1x1_0_tnn_align8_warpspecialized_cooperative_epi_tma>(P)": {
        "library": "CUTLASS", "architecture": "sm90", **BF16, "transposes": "tn", "tile": (128, 128, 64),
        "cluster": (2, 1), "unit": "tensor core", "schedule": ("warpspecialized", "cooperative"),
    },
    "cutlass3x_sm90_tensorop_gemm_f32_f32_f32_f32_f32_128x128x32_1x1x1_0_ntn_align4_warpspecialized_pingpong_epi_tma": {
        "library": "CUTLASS", "architecture": "sm90", **TF32, "transposes": "nt", "tile": (128, 128, 32),
        "cluster": (1, 1), "unit": "tensor core", "schedule": ("warpspecialized", "pingpong"),
    },
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN": {
        "library": "cuBLAS", "architecture": "sm90", **BF16, "transposes": "nt", "tile": (128, 256, 64),
        "cluster": (2, 1), "stages": 4, "unit": "tensor core", "schedule": ("coopA",),
    },
    "nvjet_tst_192x8_64x8_4x1_v_bz_TNT": {
        "library": "cuBLAS", **BF16, "transposes": "tn", "tile": (192, 8, 64), "cluster": (4, 1), "stages": 8,
        "unit": "tensor core",
    },
    "nvjet_hsh_32x64_64x16_4x1_v_bz_splitK_TNN": {
        "library": "cuBLAS", **FP16, "transposes": "tn", "tile": (32, 64, 64), "cluster": (4, 1), "stages": 16,
        "split_k": True, "unit": "tensor core",
    },
    "nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT": {
        "library": "cuBLAS", "architecture": "sm90", **FP16, "output_dtype": "fp32", "transposes": "nn",
        "tile": (64, 8, 64), "cluster": (1, 1), "stages": 16, "split_k": True, "unit": "tensor core",
    },
    "nvjet_sm100_qqtst_128x256_128x6_2x1_2cta_v_bz_bias_TNT": {
        "library": "cuBLAS", "architecture": "sm100", "input_dtype": "fp8", "accumulate_dtype": "fp32",
        "output_dtype": "bf16", "transposes": "tn", "tile": (128, 256, 128), "cluster": (2, 1), "stages": 6,
        "unit": "tensor core", "schedule": ("2cta",),
    },
    "nvjet_sm120_tst_mma_64x64x128_3_32x32x128_tmaAB_alignCD4_bz_TNNN": {
        "library": "cuBLAS", "architecture": "sm120", **BF16, "transposes": "tn", "tile": (64, 64, 128), "stages": 3,
        "unit": "tensor core",
    },
    "nvjet_sss_tf32_128x256_TNT": {
        "library": "cuBLAS", **TF32, "transposes": "tn", "tile": (128, 256, None), "unit": "tensor core",
    },
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false, cublasGemvParams<cublasGemvTensorStridedBatched<float const>, float> >(P, float, float)": {
        "library": "cuBLAS", **FP32, "unit": "cuda core",
    },
    "void gemvNSP_kernel<float, float, float, float, 1, 32, 4, 1024, cublasGemvParams<float> >(P)": {
        "library": "cuBLAS", **FP32, "unit": "cuda core",
    },
    "void gemmSN_NN_kernel<float, 128, 2, 4, 8, 5, 4, false, cublasGemvTensorStridedBatched<float const> >(P)": {
        "library": "cuBLAS", **FP32, "transposes": "nn", "unit": "cuda core",
    },
    "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, false>(P)": {
        "library": "cuBLAS",
    },
    "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>, cublasGemvTensorStrided<float> > >(P)": {
        "library": "cuBLAS", **FP32, "unit": "cuda core",
    },
    "void cublasLt::splitKreduce_kernel<(int)32, (int)16, int, float, float, float, float, (bool)0>(P)": {
        "library": "cuBLAS", **FP32, "split_k": True, "second_pass": True,
    },
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t, Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, false, true, false>(pytorch_flash::Flash_fwd_params)": {
        "library": "FlashAttention", "input_dtype": "bf16", "accumulate_dtype": "fp32", "tile": (128, 128, None),
        "head_dim": 64, "unit": "tensor core",
    },
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<(int)128, (int)64, (int)128, (int)8, (int)2, (int)4, (int)2, (bool)0, (bool)0, cutlass::half_t>, (bool)0>(P)": {
        "library": "FlashAttention", "input_dtype": "fp16", "accumulate_dtype": "fp32", "tile": (64, 128, None),
        "head_dim": 128, "unit": "tensor core",
    },
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm80, true, 64, 64, 64, true, true>::Params)": {
        "library": "xFormers", "architecture": "sm80", "input_dtype": "fp32", "tile": (64, 64, None),
        "unit": "tensor core",
    },
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0": {
        "library": "cuDNN", "architecture": "sm90", "head_dim": 64, "cluster": (1, 1), "unit": "tensor core",
    },
    "triton_poi_fused_add_mul_3": {"library": "Triton"},
    "triton_tem_fused_mm_t_view_7": {"library": "Triton"},
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)": ELEMENTS,
    "void at::native::vectorized_elementwise_kernel<8, at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int)": {
        "library": "ATen", "input_dtype": "bf16", "output_dtype": "bf16",
    },
    "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}, std::array<char*, 2ul> >(int)": {
        "library": "ATen", "input_dtype": "fp32", "output_dtype": "bf16",
    },
    # Loads that cast take the type in memory at run time.
    "void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>, 4, at::native::memory::LoadWithCast<2>, at::native::memory::StoreWithoutCast>(int)": {
        "library": "ATen", "output_dtype": "fp32",
    },
    # The same, cut off before it says so: nothing is claimed of its types.
    "void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>, 4, Tri": {
        "library": "ATen", "cut": True,
    },
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*, float const*)": ELEMENTS,
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": {
        "library": "NCCL", "input_dtype": "bf16", "output_dtype": "bf16",
    },
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": {"library": "NCCL"},
    "void at_cuda_detail::cub::detail::scan::DeviceScanInitKernel<at_cuda_detail::cub::ScanTileState<long, true> >(int)": {
        "library": "CUB",
    },
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_CMS_SN_GSU0_ISA950_IU1_K1": {
        "library": "Tensile", "architecture": "gfx950", **BF16, "transposes": "tn", "tile": (256, 256, 64),
    },
    "Cijk_Ailk_Bjlk_SB_MT128x128x16_SN_GSU4_ISA90a": {
        "library": "Tensile", "architecture": "gfx90a", **FP32, "transposes": "nt", "tile": (128, 128, 16),
        "split_k": True,
    },
    "aten::addmm": {"library": "ATen"},
    "Memcpy DtoD (Device -> Device)": {},
    "Memset (Device)": {},
    "_my_kernel_0d1d2de": {},
    "": {},
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED, ids=lambda name: name[:70])
def test_the_whole_of_what_a_name_says(name: str):
    """Every field: what is not expected must be left out."""
    decoded = decode(name)
    said = {f.name: getattr(decoded, f.name) for f in fields(decoded) if f.name not in IDENTITY}
    blank = {f.name: f.default for f in fields(KernelName) if f.name not in IDENTITY}
    assert said == blank | EXPECTED[name]


KNOWN = [*(name for name in EXPECTED if not name.endswith("...")), *(rule.example for rule in KERNEL_RULES.rules)]


@pytest.mark.parametrize("name", KNOWN, ids=lambda name: name[:70])
def test_a_name_that_is_cut_anywhere_says_what_the_whole_one_says_or_less(name: str):
    whole, family = decode(name), classify(name)
    for length in range(1, len(name)):
        cut = name[:length] + ("…" if length % 2 else "...")
        decoded = decode(cut)
        assert decoded.cut and "..." not in decoded.operation, cut
        assert classify(cut) in (family, "other"), cut
        for field in fields(KernelName):
            value, right = getattr(decoded, field.name), getattr(whole, field.name)
            if field.name in (*IDENTITY, "cut") or value == field.default:
                continue
            if field.name == "schedule":
                assert set(value) <= set(right), cut
            elif field.name == "tile" and value[2] is None:
                assert value[:2] == right[:2], cut
            else:
                assert value == right, (cut, field.name)


@pytest.mark.parametrize(
    ("name", "function", "arguments", "complete"),
    [
        ("void f<a<b>, (c)1>(int)", "f", "a<b>, (c)1", True),
        ("void at::native::(anonymous namespace)::f<int>(x)", "at::native::(anonymous namespace)::f", "int", True),
        ("void at::native::<unnamed>::f<int>(x)", "at::native::(anonymous namespace)::f", "int", True),
        ("void f<g(int)::{lambda(float)#1}::operator()() const, h->k>(x)", "f",
         "g(int)::{lambda(float)#1}::operator()() const, h->k", True),
        ("void f<a, b", "f", "a, b", False),
        ("outer<int>::inner<float>(x)", "outer::inner", "int, float", True),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD", "", True),
        ("autograd::engine::evaluate_function: MmBackward0", "autograd::engine::evaluate_function: MmBackward0", "", True),
        ("_ZN2at6native29vectorized_elementwise_kernelILi4EEEvi", "at::native::vectorized_elementwise_kernel", "Li4EEEvi",
         False),
        ("_Z5saxpyifPfS_", "saxpy", "", True),
        ("_Z", "_Z", "", True),
    ],
)  # fmt: skip
def test_function_and_template_arguments_part(name: str, function: str, arguments: str, complete: bool):
    assert split_name(name) == (function, arguments, complete)


def test_tf32_is_known_by_its_products():
    """[3] Also where the name does not spell it: a Tensor Core has no other way to take fp32 operands of m16n8k8."""
    assert {name for name in EXPECTED if is_tf32(decode(name))} == {
        name for name, expected in EXPECTED.items() if expected.get("input_dtype") == "tf32"
    }


def test_an_fp32_product_on_cuda_cores_is_no_tensor_core_product():
    """[16] cuBLAS's fp32 kernels share prefix, words and library with its Tensor Core kernels."""
    decoded = decode(next(iter(EXPECTED)))
    assert decoded.unit == "cuda core" and not is_tf32(decoded)
    assert decode("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(P)").unit == "cuda core"


def test_each_layout_occurs_as_often_as_the_others_in_measured_steps():
    """A training step takes one product of each layout for a linear layer, and two for attention: in fp32, TF32 and
    bf16, whatever the kernels. What is known of nvjet's layouts, third letter and all, rests on this."""
    runs, _ = load_runs([RESULTS / "h200" / "plain", RESULTS / "h200" / "tf32"])
    counted: Counter[str] = Counter()
    for run in runs:
        layouts: Counter[str] = Counter()
        for kernel in run.evidence.profile.kernels if run.evidence.profile else ():
            decoded = decode(kernel.name)
            if decoded.transposes and not decoded.second_pass:
                layouts[decoded.transposes] += kernel.calls
        assert layouts["tn"] == layouts["nn"] == layouts["nt"] > 0
        counted[run.workload.dtype] += 1
    assert min(counted[dtype] for dtype in ("fp32", "tf32", "bf16")) >= 8


@given(st.text(max_size=300))
def test_any_text_is_a_name(text: str):
    assert decode(text).name == text
    classify(text, operator=text, part=text, phase=text)


@given(st.lists(st.sampled_from(["<", ">", "(", ")", "::", "_", "gemm", "cutlass::Kernel2", "128x128", "nvjet_", "_Z9", "ZN",
                                 "(anonymous namespace)", "float", "Flash_fwd_kernel_traits<", "9" * 50, "void "]),
                max_size=60))  # fmt: skip
def test_pieces_of_names_in_any_order_are_names(pieces: list[str]):
    assert isinstance(decode("".join(pieces)), KernelName)


HOSTILE = [
    "<",
    "a<",
    "(",
    "_",
    "1x",
    "x1_",
    "128x128_",
    "sliced1x1_",
    "::a",
    "_Z",
    "{",
    "cutlass::Kernel2<",
    "s1",
    "\x00",
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_a_huge_name_takes_no_longer_than_a_long_one(piece: str):
    start = time.perf_counter()
    for front in ("", "void ", "nvjet_sm90_tst_", "cutlass_80_tensorop_s1688gemm", "sm80_xmma_gemm_", "triton_tem_"):
        name = front + piece * (100_000 // len(piece))
        decode(name)
        classify(name, operator=name, part=name, phase=name)
    assert time.perf_counter() - start < 1
