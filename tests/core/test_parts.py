"""The names of parts, as a command and as a call say them."""

import re

import pytest

from stepscope.core.errors import InputError
from stepscope.core.formulas.spelled import run_call, run_command
from stepscope.core.parts import LOSS_LEAST_ROWS, PARTS, calls_in_forward, loss_chunk_rows, named_kernels, norm_programs
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.workload_options import ManyWorkloads, OneWorkload
from tests.conftest import workload


def test_one_name_is_that_of_all_parts_and_a_part_that_is_said_keeps_its_own():
    assert named_kernels("fused") == dict.fromkeys(PARTS, "fused")
    assert named_kernels("quack") == dict.fromkeys(("norm", "rope", "loss"), "quack")  # it has no mlp
    assert named_kernels({"loss": "liger"}) == {"loss": "liger"}
    said = OneWorkload({"model": "tiny", "kernels": "fused", "rope": "reference"}).workload()
    assert said.parts == {"norm": "fused", "rope": "reference", "mlp": "fused", "loss": "fused"}
    for wrong, line in (({"normal": "fused"}, "kernels has the part 'normal'"), ("fast", "unknown kernels 'fast'"),
                        ({"norm": "fast"}, "unknown norm 'fast'")):  # fmt: skip
        with pytest.raises(InputError, match=re.escape(line)):
            named_kernels(wrong)


def test_a_sweep_over_kernels_has_a_cell_for_each():
    found = ManyWorkloads({"model": ("tiny",), "kernels": ("reference", "fused"), "mlp": ("reference",)}).workloads()
    assert [tuple(each.parts.values()) for each in found if isinstance(each, TextbookWorkload)] == [
        ("reference", "reference", "reference", "reference"), ("fused", "fused", "reference", "fused"),
    ]  # fmt: skip


def test_a_workload_is_spelled_with_its_parts():
    every, one = workload(**dict.fromkeys(PARTS, "fused")), workload(loss="fused")
    assert str(run_command(every)).endswith("--kernels fused") and str(run_command(one)).endswith("--loss fused")
    assert str(run_call(every)).endswith("kernels='fused')")
    assert str(run_call(one)).endswith("kernels={'loss': 'fused'})")


def test_keys_name_parts_and_those_of_the_textbook_stay_as_they_were():
    assert "fused-norm" in workload(norm="fused").key and "norm" not in workload().key


def test_the_kernels_of_a_part_show_its_own_name_and_no_others():
    quacks = "kernel_cutlass_kernel_quack{}_object_at__tensorptrbf16"
    names = {
        "norm": ("rms_norm_forward", "_rms_norm_forward_kernel", quacks.format("rmsnormRMSNorm")),
        "rope": ("rotate_halves", "_triton_rope", quacks.format("rotaryRotaryKernel")),
        "mlp": ("silu_product_backward", "_swiglu_backward_kernel"),
        "loss": ("stepscope::linear_cross_entropy_forward", "liger_cross_entropy_kernel",
                 quacks.format("cross_entropyCrossEntropy")),
    }  # fmt: skip
    for part, of_each in names.items():
        for kernel, owner in zip(of_each, ("fused", "liger", "quack"), strict=False):
            found = [
                (where, name)
                for where, ways in PARTS.items()
                for name, way in ways.items()
                if way.signs and re.search(way.signs, kernel)
            ]
            assert found == [(part, owner)]


def test_sizes_of_launches():
    assert [calls_in_forward(part, 3) for part in PARTS] == [7, 3, 3, 1]
    assert loss_chunk_rows(2048, 10_000, 2, 1280) == 2048 and loss_chunk_rows(8192, 10_000, 2, 1280) == 3328
    assert loss_chunk_rows(32768, 151_936, 4, 896) == loss_chunk_rows(32768, 151_936, 2, 64) == LOSS_LEAST_ROWS
    assert [loss_chunk_rows(32768, 151_936, 2, width) for width in (896, 1600, 2048, 4096)] == [4096, 6400, 8192, 2048]
    assert loss_chunk_rows(5, 2**40, 2, 8) == 5 and loss_chunk_rows(0, 10, 2, 8) == 1
    assert norm_programs(3, "cuda") == 3 and norm_programs(10**6, "cuda") == 512 and norm_programs(0, "cpu") == 1
