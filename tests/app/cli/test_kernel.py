"""`stepscope kernel`, as its users meet it."""

import json

import pytest

from stepscope.traces.kernels.families import explain_kernel
from tests.app.cli.test_cli import stepscope

pytestmark = pytest.mark.slow

FP32 = (
    "sm80_xmma_gemm_f32f32_f32f32_f32_{}_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_kernel"
    "__5x_cublas"
)


def said(name: str) -> dict[str, str]:
    return dict(explain_kernel(name).lines)


def test_an_fp32_product_is_explained():
    result = stepscope("kernel", FP32.format("tn"))
    assert (result.returncode, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    for words in (
        "cuBLAS", "written for sm80, used on later GPUs too", "fp32 operands", "Tensor Cores have no fp32 of their own",
        "allow TF32", "torch.autocast", "Y = X Wᵀ", "scores Q Kᵀ", "128x128 piece of the output, stepping over K by 8",
        "3 stages",
    ):  # fmt: skip
        assert words in text, words


def test_a_name_cut_short_is_explained_as_far_as_it_goes():
    """As a write-up prints it: which types were left out cannot be told, so neither can what rounds the operands."""
    lines = said("sm80_xmma_gemm_f32f32_tn_n_tilesize128x128x8")
    assert "cut off" in lines["types"] and lines["architecture"].startswith("written for sm80")
    assert lines["layout"].startswith("tn: A transposed") and "128x128 piece" in lines["tile"]
    assert "unit" not in lines and "cut off" not in said(FP32.format("tn"))["types"]


def test_a_wrapper_whose_class_is_cut_off_is_most_likely_a_product():
    lines = said("void cutlass::Kernel2<cut...")
    assert lines["cut"].endswith("runs its matrix products, so this is most likely one")
    assert (lines["family"], "runs" in lines, "library" in lines) == ("other", False, False)
    assert "cut" not in said("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(T1::Params)")


@pytest.mark.parametrize(
    ("kernel", "does"),
    [
        ("vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, at::native::binary_internal::"
         "MulFunctor<float>>, std::array<char*, 3ul>>", "multiplies; vectorised: loads and stores 4 numbers at a time"),
        ("vectorized_elementwise_kernel<(int)4, at::native::AUnaryFunctor<float, float, float, at::native::"
         "binary_internal::MulFunctor<float>>, T>", "multiplies, with one number as the other operand; vectorised"),
        ("elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float, float, float, "
         "at::native::binary_internal::DivFunctor<float>>>>", "divides; works out the place of each number"),
        ("unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}, T>",
         "copies, and casts where the types differ; number by number"),
    ],
)  # fmt: skip
def test_what_a_pointwise_kernel_does_is_said(kernel: str, does: str):
    assert said(f"void at::native::{kernel}(int, T2, T3)")["does"].startswith(does)


def test_nothing_is_left_out_of_a_sentence():
    assert "…" not in stepscope("kernel", "ampere_sgemm_128x32_sliced1x4_nn").stdout


@pytest.mark.parametrize(
    ("layout", "linear", "attention"),
    [
        ("tn", "the forward Y = X Wᵀ", "scores Q Kᵀ, and in backward dP = dO Vᵀ"),
        ("nn", "the gradient of its input dX = dY W", "the output P V, and in backward dQ = dS K"),
        ("nt", "the gradient of its weight dW = dYᵀ X", "in backward: dV = Pᵀ dO and dK = dSᵀ Q"),
    ],
)
def test_the_layout_names_the_product(layout: str, linear: str, attention: str):
    """As traces with shapes and strides have it, for any generation of kernels."""
    for name in (FP32.format(layout), f"ampere_sgemm_128x64_{layout}", f"nvjet_tst_128x256_64x4_{layout.upper()}N"):
        assert linear in said(name)["products"] and attention in said(name)["products"]


def layout_asked_for(first_is_transposed: bool, second_is_transposed: bool) -> str:
    """How row-major C = A B is asked of a column-major library, as C' = B' A': a row-major matrix is its transpose."""
    return ("t" if second_is_transposed else "n") + ("t" if first_is_transposed else "n")


@pytest.mark.parametrize(
    ("product", "first_is_transposed", "second_is_transposed"),
    [
        ("Y = X Wᵀ", False, True),
        ("dX = dY W", False, False),
        ("dW = dYᵀ X", True, False),
        ("Q Kᵀ", False, True),
        ("P V", False, False),
        ("dP = dO Vᵀ", False, True),
        ("dV = Pᵀ dO", True, False),
        ("dQ = dS K", False, False),
        ("dK = dSᵀ Q", True, False),
    ],
)
def test_each_product_stands_at_the_layout_it_is_asked_for_with(
    product: str, first_is_transposed: bool, second_is_transposed: bool
):
    layout = layout_asked_for(first_is_transposed, second_is_transposed)
    assert [at for at in ("tn", "nn", "nt", "tt") if product in said(f"ampere_sgemm_128x64_{at}")["products"]] == [
        layout
    ]


def test_a_wrapper_shows_what_it_runs_and_tf32_is_said():
    sentences = said("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_16x6_nt_align4>(P)")
    assert sentences["runs"] == "cutlass_80_tensorop_s1688gemm_128x64_16x6_nt_align4"
    assert "rounded to tf32" in sentences["types"] and sentences["unit"].startswith("Tensor Cores")


def test_attention_is_explained():
    sentences = said(
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64, 4, false, false, cutlass::half_t> >(P)"
    )
    assert sentences["family"] == "attention (fused)"
    assert sentences["tile"] == "each thread block works on 128 queries and 64 keys at a time, head dimension up to 64"


def test_of_an_unknown_kernel_nothing_is_made_up():
    assert said("my_kernel<float>(int)") == {"family": "other", "known": "nothing beyond the function's name"}
    assert stepscope("kernel", "my_kernel").returncode == 0


def test_json_is_the_explanation_and_nothing_else():
    result = stepscope("kernel", "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "--json")
    explained = json.loads(result.stdout)
    assert (result.returncode, result.stderr) == (0, "")
    assert explained["family"] == "matrix multiplication"
    assert explained["kernel"]["tile"] == [128, 256, 64] and explained["kernel"]["head_dim"] is None
    assert ["unit", "Tensor Cores"] in explained["lines"]


@pytest.mark.parametrize("name", ["", "  \n"])
def test_an_empty_name_is_one_line(name: str):
    result = stepscope("kernel", name)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("stepscope: the kernel's name is empty") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["\x1b[2J\x1b]0;owned\x07evil", "kernel\r\nover", "k" * 100_000, "\udcff\u202egemm"])
def test_a_hostile_name_moves_no_cursor(name: str):
    result = stepscope("kernel", name)
    assert result.returncode == 0, result.stderr
    assert all(character.isprintable() or character == "\n" for character in result.stdout)
    assert len(result.stdout) < 1000
    assert json.loads(stepscope("kernel", name, "--json").stdout)["family"]
