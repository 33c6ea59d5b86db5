"""benchmarks/flash_experiments.py: what is measured of which shape, what is right, what whole passes are made of."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks.flash_bench import HOPPER_KINDS, SHAPES, Bench, why_not_hopper

from tests.conftest import at_length

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

ROOT = Path(__file__).parents[2]
ALL = list(range(len(SHAPES)))


@pytest.fixture(scope="module")
def experiments() -> Iterator[ModuleType]:
    """A script's neighbours are found beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        from benchmarks import flash_experiments

        yield flash_experiments


def test_every_shape_has_tasks_of_its_dtype_breadth_first_each_with_a_name(experiments: ModuleType):
    tasks = experiments.tasks_for(ALL, experiments.KINDS)
    by_shape: dict[int, list[dict[str, Any]]] = {shape: [t for t in tasks if t["shape"] == shape] for shape in ALL}
    for shape, mine in by_shape.items():
        half = SHAPES[shape][5] != "float32"
        kinds = {task["kind"] for task in mine}
        assert kinds >= {"forward", "keys", "queries", "preprocess"}
        assert (kinds >= set(HOPPER_KINDS), "joint" in kinds) == (half, not half)
        assert {task.get("precision") for task in mine if "tile" in task} <= ({None} if half else {"tf32x3", "bf16x6"})
        names = [experiments.label(task) for task in mine]
        assert len(set(names)) == len(names)
    # The first of every kind and shape, each shape's rivals before them, comes before the second of any.
    seen: dict[tuple[int, str], int] = {}
    ranks = []
    for task in tasks:
        place = task["shape"], task["kind"]
        ranks.append(seen.get(place, 0) if {"tile", "hopper"} & set(task) else -1)
        seen[place] = seen.get(place, 0) + 1
    assert ranks == sorted(ranks)
    without = experiments.tasks_for(ALL, [kind for kind in experiments.KINDS if kind not in HOPPER_KINDS])
    assert [task for task in tasks if "hopper" not in task] == without


def test_names_say_the_kernel_and_its_options(experiments: ModuleType):
    forward = {"kind": "hopper-forward", "hopper": {"turns": True, "late": True}}
    backward = {"kind": "hopper-backward", "hopper": {"v_in_registers": True}}
    assert experiments.label(forward) == "forward hopper 2x64x128 s2 turns late"
    assert experiments.label(backward) == "backward hopper 64x128 v-in-registers"


def whole_passes(experiments: ModuleType, results: list[tuple[dict[str, Any], float | None]]) -> list[dict[str, Any]]:
    """What is asked for after results by hand, in milliseconds."""
    asked: list[dict[str, Any]] = []

    class Noted(experiments.Experiments):
        def run(self, task: dict[str, Any]) -> dict[str, Any]:
            asked.append(task)
            return {}

    run = Noted(60.0)
    run.results = [{"task": task} | ({"error": "WRONG"} if ms is None else {"ms": ms}) for task, ms in results]
    run.totals(ALL)
    return asked


def test_whole_passes_are_of_the_fastest_right_ones_in_one_precision(experiments: ModuleType):
    """fp32: forward 1 in bf16x6 and 2 in tf32x3, but over keys and queries tf32x3 is faster, and joint bf16x6 wrong."""
    shape = 7
    tile, other = [64, 64, 4, 1], [32, 32, 4, 2]

    def task(kind: str, precision: str, tile: list[int], **more: object) -> dict[str, Any]:
        return {"shape": shape, "kind": kind, "tile": tile, "tma": True, "precision": precision, **more}

    asked = whole_passes(
        experiments,
        [
            (task("forward", "bf16x6", tile), 1.0),
            (task("forward", "tf32x3", other), 2.0),
            (task("keys", "bf16x6", tile), 4.0),
            (task("keys", "tf32x3", other, tma=False), 3.0),
            (task("queries", "bf16x6", tile), 4.0),
            (task("queries", "tf32x3", other), 3.0),
            (task("joint", "bf16x6", tile, tile2=tile), None),
            (task("joint", "tf32x3", other, tile2=other), 5.0),
        ],
    )
    found = [(a["backward"]["way"], a["forward"]["precision"], a["backward"]["tile"]) for a in asked]
    assert found == [("joint", "tf32x3", other), ("apart", "bf16x6", tile), ("apart", "tf32x3", other)]
    assert [a["backward"]["tma"] for a in asked] == [True, True, False]


def test_whole_passes_by_the_kernels_in_gluon_and_by_pointers_where_short(experiments: ModuleType):
    """(4, 12, 1024, 64): Triton's fastest load by descriptors, its whole pass by pointers is asked for besides."""
    shape = 3
    assert SHAPES[shape][2] == 1024

    def task(kind: str, tma: bool = True, **more: object) -> dict[str, Any]:
        return {"shape": shape, "kind": kind, "tile": [64, 64, 4, 2], "tma": tma, **more}

    slow, fast = {"consumers": 3}, {"late": True}
    asked = whole_passes(
        experiments,
        [
            ({"shape": shape, "kind": "hopper-forward", "hopper": slow}, 2.0),
            ({"shape": shape, "kind": "hopper-forward", "hopper": fast}, 1.0),
            ({"shape": shape, "kind": "hopper-backward", "hopper": {}}, 1.0),
            *((task(kind, tma), 1.0 if tma else 2.0) for kind in ("forward", "queries") for tma in (True, False)),
            (task("keys", tile_registers=168), 1.0),
            (task("keys", tma=False), 2.0),
        ],
    )
    assert [a["backward"]["way"] for a in asked] == ["hopper", "apart", "apart"]
    assert asked[0]["forward"]["hopper"] == fast and asked[0]["backward"]["hopper"] == {}
    assert [(a["forward"]["tma"], a["backward"]["tma"]) for a in asked[1:]] == [(True, True), (False, False)]
    assert asked[1]["backward"]["tile_registers"] == 168 and "tile_registers" not in asked[2]["backward"]


TASKS: list[dict[str, Any]] = [
    {"kind": "forward", "tile": [32, 32, 4, 1], "tma": True},
    {"kind": "forward", "tile": [32, 32, 4, 1], "tma": False, "precision": "bf16x6"},
    {"kind": "keys", "tile": [32, 32, 4, 1], "tma": False},
    {"kind": "queries", "tile": [32, 32, 4, 1], "tma": True},
    {"kind": "joint", "tile": [16, 32, 4, 1], "tile2": [32, 16, 4, 1], "tma": True, "precision": "bf16x6"},
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task['kind']} {task.get('precision', '')}")
def test_a_kernel_is_held_against_pytorchs_attention(task: dict[str, Any]):
    """On the shape itself; and the same result is wrong where the truth is another."""
    dtype = "float32" if "precision" in task else "bfloat16"
    bench = Bench((1, 2, 64, 32, True, dtype))
    bench.prepare_truth(exact=False)
    assert bench.check(task)[1] < 1
    assert bench.truth is not None
    for name in bench.FILLS[task["kind"]]:
        bench.truth[name] += 0.5
    assert bench.check(task)[1] > 1


@pytest.mark.skipif(why_not_hopper() is None, reason="these are measured on a Hopper GPU")
@pytest.mark.parametrize("kind", [HOPPER_KINDS[0], *at_length(*HOPPER_KINDS[1:])])
def test_a_kernel_in_gluon_is_not_another_s_time(kind: str):
    options = {"late": True} if kind == "hopper-forward" else {"v_in_registers": True}
    with pytest.raises(RuntimeError, match="need a Hopper GPU"):
        Bench((1, 1, 64, 64, True, "bfloat16"), empty=True).runner({"kind": kind, "hopper": options})
    found = subprocess.run(
        [sys.executable, "benchmarks/flash_experiments.py", "--only", "keys", kind],
        cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert found.returncode == 2 and not found.stdout
    assert "need a Hopper GPU" in found.stderr and found.stderr.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.skipif(why_not_hopper() is not None, reason="no Hopper GPU, or an unknown Triton")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_every_listed_kernel_in_gluon_is_right(experiments: ModuleType, head_dim: int, causal: bool):
    bench = Bench((1, 2, 1024, head_dim, causal, "bfloat16"))
    bench.prepare_truth(exact=True)
    for kind in HOPPER_KINDS:
        for options in experiments.HOPPER[kind][head_dim]:
            compiled, worst = bench.check({"kind": kind, "hopper": options})
            assert worst < 1 and compiled.metadata.shared > 0 and compiled.n_regs > 0, options


AHEAD = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget

class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_active_torch_device(self): return torch.device("cpu")

triton.runtime.driver.set_active(Hopper())
from stepscope.kernels.flash import launch as flash_launch
flash_launch.hopper_takes = lambda *tensors, limited: True
sys.path.insert(0, "benchmarks")
import flash_bench
flash_bench.SHAPES[:] = [(1, 2, 4096, 64, True, "bfloat16")]
for task in json.loads(sys.argv[1]):
    flash_bench.compile_ahead(task)
"""


def test_kernels_in_gluon_are_compiled_ahead_by_a_process_that_runs_nothing(experiments: ModuleType, tmp_path: Path):
    """The pool's: told that it has a Hopper, on tensors that lie elsewhere."""
    from stepscope.kernels.flash.launch import _GLUON_KNOWN

    if not pytest.importorskip("triton").__version__.startswith(_GLUON_KNOWN):
        pytest.skip("Gluon of this Triton is not known to the kernels")
    tasks = [{"shape": 0, "kind": kind, "hopper": experiments.HOPPER[kind][64][0]} for kind in HOPPER_KINDS]
    subprocess.run(
        [sys.executable, "-c", AHEAD, json.dumps(tasks)],
        cwd=ROOT, check=True, timeout=200,
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    compiled = {path.name for path in tmp_path.glob("*/*.cubin")}
    assert compiled >= {
        "hopper_forward.cubin", "hopper_gradients.cubin", "flash_row_statistics.cubin", "flash_finish_queries.cubin",
    }  # fmt: skip
