"""The roofline: a small capture worked out by hand, then the model's own FLOPs found again in a trace of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stepscope.core.answer import Answer
from stepscope.core.device_spec import Ceiling, Ceilings, find_device_spec
from stepscope.core.errors import InputError
from stepscope.core.formulas.transformer import forward_flops
from stepscope.core.parts import Attention
from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.roofline import (
    FamilyRoof,
    OperatorRoof,
    Roofline,
    element_bytes,
    family_sentence,
    operand_arithmetic,
    peaks_for,
    product_arithmetic,
    roofline,
    roofline_as_json,
    roofline_panel,
    roofline_tables,
)
from tests.captures import Capture, nsys_tables, write_sqlite
from tests.command import stepscope
from tests.conftest import mini
from tests.shown import shown

BF16_GEMM = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN"
FP32_GEMM = "ampere_sgemm_128x64_tn"
TF32_GEMM = "cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align4"
COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3> >(int)"
)
SECOND_PASS = "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float>(int)"

Square = tuple[list[int], list[int]]
SQUARE: Square = ([1024, 1024], [1024, 1024])


class Steps:
    """A Kineto trace written down in microseconds: operators on one thread, kernels on one stream."""

    def __init__(self, device: str = "NVIDIA H200") -> None:
        self.device = device
        self.events: list[dict[str, Any]] = []
        self._correlation = 0

    def _add(self, category: str, name: str, start: float, end: float, arguments: dict[str, Any]) -> None:
        place = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 11, "args": arguments}
        self.events.append({**place, "ts": start, "dur": end - start})

    def range(self, name: str, start: float, end: float) -> None:
        self._add("user_annotation", name, start, end, {})

    def operator(
        self, name: str, start: float, end: float, shapes: Any, dtypes: Any, *, values: list[str] | None = None
    ) -> None:
        said = {"Concrete Inputs": values} if values is not None else {}
        self._add("cpu_op", f"aten::{name}", start, end, {"Input Dims": shapes, "Input type": dtypes, **said})

    def kernel(self, name: str, launch: float, start: float, end: float, category: str = "kernel") -> None:
        self._correlation += 1
        arguments = {"correlation": self._correlation}
        self._add("cuda_runtime", "cudaLaunchKernel", launch, launch + 1, arguments)
        self._add(category, name, start, end, {**arguments, "device": 0, "stream": 7})

    def roofline(self, tmp_path: Path, **more: Any) -> Roofline:
        path = tmp_path / "trace.json"
        devices = [{"id": 0, "name": self.device}]
        path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": devices, "traceEvents": self.events}))
        found = roofline(attribute(read_trace(path)), **more)
        found.self_check()
        return found


def by_hand() -> Steps:
    """One step: a product of two kernels and a copy inside clone in forward, an addition in backward, strays."""
    steps = Steps()
    steps.range("step", 0, 500)
    steps.range("forward", 0, 200)
    steps.range("backward", 200, 400)
    # A product whose bias is copied by a kernel of its own: 30 us, and 4 us of another family.
    steps.operator("addmm", 0, 20, [[1024], *SQUARE, [], []], ["c10::BFloat16"] * 3 + ["Scalar"] * 2)
    steps.kernel(COPY, 2, 5, 9)
    steps.kernel(BF16_GEMM, 10, 15, 45)
    # The copy is made, and counted, in copy_; the kernel waits for the product, the queue never runs dry.
    steps.operator("clone", 30, 39, [[1024, 1024], []], ["float", "Scalar"])
    steps.operator("copy_", 32, 38, [*SQUARE, []], ["float", "float", "Scalar"])
    steps.kernel(COPY, 34, 45, 49)
    # The host takes 30 us to have the device work for 4.
    steps.operator("add_", 200, 230, [*SQUARE, []], ["float", "float", "Scalar"])
    steps.kernel(ADD, 220, 225, 229)
    # No bound: from the host's memory, and launched in no operator.
    steps.operator("copy_", 250, 260, [*SQUARE, []], ["float", "float", "Scalar"])
    steps.kernel("Memcpy HtoD (Pageable -> Device)", 252, 255, 275, "gpu_memcpy")
    steps.kernel(ADD, 410, 415, 420)
    return steps


def operator(found: Roofline, name: str, phase: str | None = "forward") -> OperatorRoof:
    (only,) = (each for each in found.operators if each.operator == f"aten::{name}" and each.phase == phase)
    return only


def family(found: Roofline, name: str) -> FamilyRoof:
    (only,) = (each for each in found.families if each.family == name)
    return only


def test_a_product_by_hand(tmp_path: Path):
    product = operator(by_hand().roofline(tmp_path), "addmm")
    assert (product.calls, product.kernels, product.device_ns, product.family_ns) == (1, 2, 34_000, 30_000)
    assert (product.family, product.kernel, product.arithmetic) == ("matrix multiplication", BF16_GEMM, "bf16")
    flops, moved = 2 * 1024**3, 3 * 2 * 1024**2 + 2 * 1024
    assert (product.flops, product.bytes_moved, product.host_ns) == (flops, moved, 20_000)
    assert product.intensity == pytest.approx(flops / moved)
    assert product.compute_ns == pytest.approx(flops / 989.4e12 * 1e9)  # 2170 ns
    assert product.memory_ns == pytest.approx(moved / 4.8e12 * 1e9)  # 1311 ns
    assert product.over_bound == pytest.approx(34_000 / 2170.4, rel=1e-3)
    assert product.flops_per_s == pytest.approx(flops / 34e-6)
    assert product.verdict == "compute-bound"


def test_a_copy_is_counted_once_and_where_it_was_launched(tmp_path: Path):
    found = by_hand().roofline(tmp_path)
    assert not [each for each in found.operators if each.operator == "aten::clone"]
    copy = operator(found, "copy_")
    assert (copy.device_ns, copy.bytes_moved, copy.intensity) == (4_000, 8 * 1024**2, 0.0)
    assert copy.over_bound == pytest.approx(4_000 / (8 * 1024**2 / 4.8e12 * 1e9))
    # Its host time is above the device's, but the product kept the device busy meanwhile.
    assert (copy.host_ns, copy.dry_share, copy.verdict) == (6_000, 0.0, "memory-bound")


def test_launch_bound_is_where_the_device_waits_for_the_host(tmp_path: Path):
    add = operator(by_hand().roofline(tmp_path), "add_", "backward")
    assert (add.host_ns, add.device_ns, add.dry_share, add.verdict) == (30_000, 4_000, 1.0, "launch-bound")
    assert add.over_bound == pytest.approx(4_000 / (12 * 1024**2 / 4.8e12 * 1e9))
    queued = Steps()
    for i, start in enumerate((100, 110, 120)):  # the first alone finds the stream dry: the host waits for room
        queued.operator("add_", 30 * i, 30 * i + 25, [*SQUARE, []], ["float", "float", "Scalar"])
        queued.kernel(ADD, 30 * i + 1, start, start + 10)
    add = operator(queued.roofline(tmp_path), "add_", None)
    assert add.dry_share == pytest.approx(1 / 3)
    assert (add.host_ns, add.verdict) == (25_000, "memory-bound")


def test_copies_from_the_host_have_no_work(tmp_path: Path):
    copy = operator(by_hand().roofline(tmp_path), "copy_", "backward")
    assert (copy.work, copy.bound_ns, copy.verdict, copy.device_ns) == (None, None, None, 20_000)


def test_families_by_hand(tmp_path: Path):
    found = by_hand().roofline(tmp_path)
    products, copies, adds = (
        family(found, name) for name in ("matrix multiplication", "copy/cast", "activation/elementwise")
    )
    assert (products.device_ns, products.covered_ns, products.coverage) == (30_000, 30_000, 1.0)
    assert products.over_bound == pytest.approx(30_000 / 2170.4, rel=1e-3)
    # The bias's copy is part of addmm's work: nothing is known of it alone.
    assert (copies.device_ns, copies.covered_ns, copies.verdict_ns) == (8_000, 4_000, 4_000)
    # One addition in backward, one in no operator.
    assert (adds.device_ns, adds.backward_ns, adds.forward_ns, adds.covered_ns) == (9_000, 4_000, 0, 4_000)
    assert (adds.verdict, adds.verdict_share) == ("launch-bound", pytest.approx(4 / 9))
    assert adds.mostly is None and products.mostly == "compute-bound"
    assert [each.backward_over_forward for each in (products, copies, adds)] == [None, None, None]
    assert family(found, "memcpy/memset").verdict is None
    assert (found.busy_ns, found.covered_ns) == (67_000, 34_000 + 4_000 + 4_000)
    assert (found.passes.forward_ns, found.passes.backward_ns) == (38_000, 4_000)
    assert (found.passes.forward_flops, found.passes.flops_ratio) == (2 * 1024**3, 0.0)


def test_operators_of_one_rule_inside_each_other_are_counted_once(tmp_path: Path):
    steps = Steps()
    steps.operator("zero_", 0, 30, [[1024]], ["float"])
    steps.kernel(ADD, 2, 5, 9)
    steps.operator("fill_", 10, 20, [[1024], []], ["float", "Scalar"])
    steps.kernel(ADD, 12, 15, 19)
    found = steps.roofline(tmp_path)
    assert operator(found, "zero_", None).work is None
    assert operator(found, "fill_", None).bytes_moved == 4096


@pytest.mark.parametrize(
    ("kernel", "arithmetic"),
    [
        (FP32_GEMM, "fp32"), (TF32_GEMM, "tf32"), (BF16_GEMM, "bf16"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)", "3xtf32"),
        (SECOND_PASS, None), ("nvjet_sm90_sss_128x256_64x4_2x1_v_bz_coopA_NTN", None), ("a_kernel", None),
    ],
)  # fmt: skip
def test_the_kernels_name_says_what_multiplied(kernel: str, arithmetic: str | None):
    assert product_arithmetic(kernel) == arithmetic


@pytest.mark.parametrize(("kernel", "peak"), [(FP32_GEMM, 66.9e12), (TF32_GEMM, 494.7e12), ("made_by_hand", None)])
def test_fp32_operands_are_measured_against_what_really_multiplied(tmp_path: Path, kernel: str, peak: float | None):
    steps = Steps()
    steps.operator("mm", 0, 20, [*SQUARE], ["float", "float"])
    steps.kernel(kernel, 2, 25, 125)
    # A second pass may take longer than the product; it says nothing of how the product was taken.
    steps.kernel(SECOND_PASS, 4, 125, 325)
    product = operator(steps.roofline(tmp_path), "mm", None)
    expected = 2 * 1024**3 / peak * 1e9 if peak else None
    assert product.compute_ns == (pytest.approx(expected) if expected else None)
    assert product.verdict == ("compute-bound" if peak else None)
    assert product.intensity is not None


def test_a_product_that_multiplied_nothing_has_no_work(tmp_path: Path):
    steps = Steps()
    steps.operator("mm", 0, 20, [[4, 0], [0, 4]], ["float", "float"])
    steps.kernel("Memset (Device)", 2, 25, 26, "gpu_memset")
    assert operator(steps.roofline(tmp_path), "mm", None).work is None


@pytest.mark.parametrize(
    ("kernel", "flops"),
    [
        (FP32_GEMM, 2 * 64 * 64 * 8),
        ("void cusparse::csrmm_alg2_kernel<cusparse::CsrMMPolicy, false, float>(P)", None),
        ("void rocsparse::csrmmnn_row_split_main_kernel<256u, 8u, float>(P)", None),
    ],
)
def test_the_kernel_says_that_a_matrix_was_sparse(tmp_path: Path, kernel: str, flops: int | None):
    """Its shape does not say how many of its places multiply: taken whole, this one would count its zeros."""
    steps = Steps()
    steps.operator("_sparse_addmm", 0, 20, [[64, 8], [64, 64], [64, 8], [], []], ["float"] * 3 + ["Scalar"] * 2)
    steps.operator("addmm", 1, 19, [[64, 8], [64, 64], [64, 8], [], []], ["float"] * 3 + ["Scalar"] * 2)
    steps.kernel(kernel, 4, 25, 125)
    product = operator(steps.roofline(tmp_path), "addmm", None)
    assert product.flops == flops and product.is_open == (flops is None)


def test_an_unknown_device_has_intensities_and_no_bounds(tmp_path: Path):
    steps = by_hand()
    steps.device = "Some Future Device"
    found = steps.roofline(tmp_path)
    product = operator(found, "addmm")
    assert product.intensity is not None and product.bound_ns is None and product.verdict is None
    assert operator(found, "add_", "backward").verdict == "launch-bound"
    assert family(found, "matrix multiplication").over_bound is None
    spec = find_device_spec("NVIDIA H200")
    assert operator(steps.roofline(tmp_path, spec=spec), "addmm").verdict == "compute-bound"


def ceilings(device: str) -> Ceilings:
    matmul = {"bf16": Ceiling(rate=700e12, operation="8192 x 8192 x 8192 bf16", median_s=1e-3, samples=5)}
    copy = Ceiling(rate=4e12, operation="copy of 4096 MiB", median_s=1e-3, samples=5)
    return Ceilings(device_name=device, torch_version="2", measured_at="", matmul=matmul, copy=copy)


def test_measured_ceilings_stand_before_the_datasheet(tmp_path: Path):
    found = by_hand().roofline(tmp_path, ceilings=ceilings("NVIDIA H200"))
    assert operator(found, "addmm").compute_ns == pytest.approx(2 * 1024**3 / 700e12 * 1e9)
    assert operator(found, "copy_").memory_ns == pytest.approx(8 * 1024**2 / 4e12 * 1e9)
    assert found.peaks.flops_per_s["bf16"].source == "measured: 8192 x 8192 x 8192 bf16"
    assert found.peaks.flops_per_s["fp32"].source == "NVIDIA H200 datasheet (SXM)"
    with pytest.raises(InputError, match="measured on NVIDIA L4, but the trace is of NVIDIA H200"):
        by_hand().roofline(tmp_path, ceilings=ceilings("NVIDIA L4"))


def test_three_tf32_products_for_one():
    peaks = peaks_for(find_device_spec("NVIDIA H200"), None)
    assert peaks.flops_per_s["3xtf32"].rate == pytest.approx(494.7e12 / 3)
    assert peaks_for(None, None).flops_per_s == {} and peaks_for(None, None).bytes_per_s is None


def test_what_operands_and_kernels_say_of_their_elements():
    assert operand_arithmetic("float", on_cpu=False) is None and operand_arithmetic("float", on_cpu=True) == "fp32"
    assert operand_arithmetic("c10::Half", on_cpu=False) == "fp16" and operand_arithmetic(None, on_cpu=True) is None
    apply = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    assert element_bytes(f"{apply}Metadata<4>, at::native::FusedAdamMathFunctor<float, 4, double, bool> >()") == 4
    assert element_bytes(f"{apply}Metadata<2>, at::native::Copy<c10::BFloat16, float> >()") is None
    assert element_bytes("void CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 4, 64, 64>(int)") == 2


def test_lists_are_counted_with_the_size_that_the_kernel_names(tmp_path: Path):
    steps = Steps()
    steps.operator("cat", 0, 20, [[[1024, 8], [1024, 8]], []], ["TensorList", "Scalar"])
    steps.kernel("void at::native::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 4>(int)", 2, 5, 9)
    assert operator(steps.roofline(tmp_path), "cat", None).bytes_moved == 2 * 2 * 1024 * 8 * 2


def said(found: Roofline, top: int = 12) -> str:
    """The roofline's tables and sentences as text."""
    return shown(Answer(study="roofline", question="", tables=roofline_tables(found, top)))


def test_sentences_and_tables_have_the_figures(tmp_path: Path):
    found = by_hand().roofline(tmp_path)
    sentence = family_sentence(family(found, "matrix multiplication"), found.steps)
    assert sentence == (
        "Matrix multiplication kernels take 0.030 ms a step at 341 FLOP/B: compute-bound, "
        "13.82 times their bound of 0.002 ms."
    )
    assert family_sentence(family(found, "memcpy/memset"), 1) == (
        "Memcpy/memset kernels take 0.020 ms a step; their work is not known."
    )
    for known, whose in ((3, "the work of nearly all of them"), (0, "their work")):
        hardly = replace(
            family(found, "memcpy/memset"), device_ns=1000, covered_ns=known, bounded_ns=known, flops=0,
            bytes_moved=known, bound_ns=0.1, verdict="launch-bound", verdict_ns=4,
        )  # fmt: skip
        assert family_sentence(hardly, 1) == f"Memcpy/memset kernels take 0.001 ms a step; {whose} is not known."
    known = replace(hardly, covered_ns=5, bounded_ns=5, bytes_moved=5, verdict="memory-bound", verdict_ns=5)
    assert "(work known for 0.5 % of it): memory-bound in 0.5 % of it" in family_sentence(known, 1)
    text = said(found, top=2)
    assert "addmm bf16 1024 1024x1024 1024x1024" in text and "2 more take" in text
    assert "bf16 989.4 TFLOP/s (NVIDIA H200 datasheet (SXM))" in text
    assert "Backward takes 0.11 times forward" in text


def test_the_panel_sets_the_families_below_the_roofs(tmp_path: Path):
    """bf16 on an H200: 989.4 TFLOP/s and 4.8 TB/s meet at 206 FLOP/B."""
    panel = roofline_panel(by_hand().roofline(tmp_path))
    assert panel is not None and panel.x_log and panel.y_log
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in panel.points:
        lines.setdefault(point.line, []).append((point.x, point.y))
    roof = lines["roof, bf16"]
    assert [y for _, y in roof] == pytest.approx([min(989.4e12, x * 4.8e12) for x, _ in roof])
    assert sorted(roof) == roof and 989.4e12 / 4.8e12 in [x for x, _ in roof]
    ((x, y),) = lines["matrix multiplication"]
    assert x == pytest.approx(341, abs=1) and y < 989.4e12


@pytest.mark.parametrize(
    ("end", "words"),
    [(45, ""), (16, "bound by FLOPs: causal attention"), (47, "bound by bytes: operands stayed")],
)
def test_what_is_quicker_than_its_bound_is_told_by_what_bounds_it(tmp_path: Path, end: int, words: str):
    """The product's bound is 2.2 us, the copy's 1.7 us."""
    steps = Steps()
    steps.operator("mm", 0, 20, [*SQUARE], ["c10::BFloat16"] * 2)
    steps.kernel(BF16_GEMM, 10, 15, 16 if end == 16 else 45)
    steps.operator("copy_", 32, 38, [*SQUARE, []], ["float", "float", "Scalar"])
    steps.kernel(COPY, 34, 46, 47 if end == 47 else 60)
    text = said(steps.roofline(tmp_path))
    assert ("In less time than their bound" in text) == bool(words) and words in text


def test_json_is_per_step(tmp_path: Path):
    steps = by_hand()
    steps.range("step", 510, 600)
    plain = roofline_as_json(steps.roofline(tmp_path))
    assert json.loads(json.dumps(plain)) == plain
    assert (plain["steps"], plain["busy_ns"]) == (2, 33_500)
    (product,) = (each for each in plain["operators"] if each["operator"] == "aten::addmm")
    assert (product["calls"], product["device_ns"], product["host_ns"]) == (0.5, 17_000, 20_000)
    assert product["convention"] == "causal half, recompute counted"


def test_a_trace_without_shapes_has_families_alone(tmp_path: Path):
    steps = by_hand()
    steps.events = [event for event in steps.events if event["cat"] != "cpu_op"]
    found = steps.roofline(tmp_path)
    assert found.operators == () and found.covered_ns == 0
    assert all(each.verdict is None and each.intensity is None for each in found.families)
    assert "No work is known: the trace holds no operators" in said(found) and roofline_panel(found) is None


@pytest.mark.parametrize(
    ("dropped", "reason"),
    [
        (("Input Dims", "Input type"), "the operators in this trace have no shapes"),
        (("correlation", "External id"), "of no kernel is it known which operator launched it"),
        (("name",), "the operators that launched kernels have no shapes, or no rule counts them"),
    ],
)
def test_the_reason_that_no_work_is_known_is_the_one(tmp_path: Path, dropped: tuple[str, ...], reason: str):
    steps = by_hand()
    for event in steps.events:
        if dropped == ("name",) and event["cat"] == "cpu_op":
            event["name"] = "mine::fused"
        event["args"] = {name: value for name, value in event["args"].items() if name not in dropped}
    found = steps.roofline(tmp_path)
    assert found.covered_ns == 0 and f"No work is known: {reason}" in said(found)


@pytest.mark.parametrize(("attention", "convention"), [("reference", "full"), ("sdpa", "half")])
def test_a_trace_of_the_model_has_the_models_flops(tmp_path: Path, attention: Attention, convention: Any):
    """Attention written out computes the full square; fused, PyTorch's kernel for the CPU is counted half."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from stepscope.training.training_step import TrainingStep

    step = TrainingStep(mini(phase="forward-backward", attention=attention, seq_len=24), torch.device("cpu"))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(2):
            step.prepare()
            with record_function("step"):
                for phase in step.phases:
                    with record_function(phase.name):
                        phase.run()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    found = roofline(attribute(read_trace(path)))
    found.self_check()
    assert found.steps == 2
    forward = forward_flops(step.workload, convention)
    assert found.passes.forward_flops == 2 * forward
    # Fused attention takes five products in backward where forward has two: one is recomputation.
    counted_half = forward_flops(step.workload, "full") - forward_flops(step.workload, "half")
    extra = counted_half // 2 if attention == "sdpa" else 0
    assert found.passes.backward_flops == 2 * (2 * forward + extra)
    assert not any(each.verdict for each in found.operators)


def test_products_of_which_emit_nvtx_told_the_sizes(tmp_path: Path):
    """It tells no dtypes: the kernel's name says how large an element is. What is no product has no work."""
    capture = Capture()
    capture.range("forward", 0, 1000)
    capture.range("aten::addmm, seq = 4, op_id = 7, sizes = [[5], [2, 3], [3, 5], [], []]", 20, 200)
    capture.range("aten::add, op_id = 8, sizes = [[2, 5], [2, 5], []]", 300, 400)
    capture.kernel(100, 20)
    capture.kernel(350, 10, name=ADD)
    table = read_trace(write_sqlite(nsys_tables(capture), tmp_path / "t.sqlite"))
    product, add = roofline(attribute(table)).operators
    assert (product.operator, product.shapes) == ("aten::addmm", "[[5], [2, 3], [3, 5], [], []]")
    assert product.flops == 2 * 2 * 3 * 5
    assert product.bytes_moved == 4 * (2 * 3 + 3 * 5 + 5 + 2 * 5)
    assert add.work is None


FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4> >(pytorch_flash::Flash_fwd_params)"
)


def attention(*flags: str | None, keys: int = 256) -> Steps:
    """A call of fused attention for each flag; None leaves the values out of the record."""
    steps = Steps()
    shapes = [[1, 256, 4, 64], [1, keys, 4, 64], [1, keys, 4, 64], *[[]] * 8]
    dtypes = ["c10::BFloat16"] * 3 + ["", ""] + ["Scalar"] * 6
    for number, flag in enumerate(flags):
        start = 100 * number
        values = None if flag is None else ["", "", "", "", "", "256", str(keys), "0.", flag, "False", "0.125"]
        steps.operator("_flash_attention_forward", start, start + 20, shapes, dtypes, values=values)
        steps.kernel(FLASH, start + 5, start + 30, start + 60)
    return steps


WHOLE = 4 * 4 * 256 * 256 * 64


def test_attention_counts_as_its_record_says(tmp_path: Path):
    """One capture may hold both: an encoder's and a decoder's."""
    found = attention("True", "False", "False").roofline(tmp_path)
    counted = {each.sight: (each.calls, each.flops) for each in found.operators}
    assert counted == {"causal": (1, WHOLE // 2), "not causal": (2, 2 * WHOLE)}
    assert "256x4x64 not causal" in said(found) and "assumed" not in said(found)
    plain = roofline_as_json(found)["operators"]
    assert {(each["attention"], each["flops"], each["work_open"]) for each in plain} == {
        ("causal", WHOLE // 2, False), ("not causal", 2 * WHOLE, False)
    }  # fmt: skip


def test_what_is_assumed_of_attention_is_said(tmp_path: Path):
    found = attention(None, None).roofline(tmp_path)
    assert [(each.sight, each.flops) for each in found.operators] == [("assumed causal", 2 * (WHOLE // 2))]
    assert "Attention is assumed causal in 2 calls a step, whose record does not say it" in said(found)
    assert "256x4x64 assumed causal" in said(found)
    longer = attention(None, keys=512).roofline(tmp_path)
    assert "Attention is assumed not causal in 1 calls a step" in said(longer)
    assert "assumed" not in said(attention(None).roofline(tmp_path, causal="full")), "counted whole in any case"


def test_products_whose_record_leaves_them_open_are_said(tmp_path: Path):
    """One bad record costs its own figure: the others' work stays known, and the share is shown."""
    steps = by_hand()
    steps.operator("mm", 430, 450, [[1024], "x"], ["float", 7])
    steps.kernel(FP32_GEMM, 435, 440, 447)
    found = steps.roofline(tmp_path)
    assert operator(found, "mm", None).is_open and not operator(found, "addmm").is_open
    assert operator(found, "addmm").flops == 2 * 1024**3
    text = " ".join(said(found).split())
    assert "The record leaves open the sizes of 1 products a step: their FLOPs are missing (mm;" in text


def test_shapes_of_which_nothing_is_counted_are_not_said_to_be_missing(tmp_path: Path):
    steps = Steps()
    steps.operator("mm", 0, 20, [[1024], "x"], ["float", 7])
    steps.kernel(FP32_GEMM, 5, 25, 45)
    text = " ".join(said(steps.roofline(tmp_path)).split())
    assert "No work is known: the operators that launched kernels have no shapes, or no rule counts them." in text
    assert "The record leaves open the sizes of 1 products a step" in text


def test_a_part_of_a_trace_keeps_what_its_operators_were_told(tmp_path: Path):
    """`--cut` writes the values, without which attention would be taken for causal."""
    attention("False").roofline(tmp_path)
    out = tmp_path / "cut.json"
    result = stepscope("trace", tmp_path / "trace.json", "--cut", out)
    assert result.returncode == 0, result.stderr
    (only,) = roofline(attribute(read_trace(out))).operators
    assert (only.sight, only.flops) == ("not causal", WHOLE)
