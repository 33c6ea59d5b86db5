"""The launcher in C++ against Triton's own: the same kernels get the same parameters, byte by byte.

Under a CUDA driver that computes nothing (fake_driver/), in a process of its own, since a process has one driver. What
the kernels compute with the launcher is a matter of tests/gpu.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

import triton

from tests.kernels.fake_driver.fake import built

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("c++") or not shutil.which("ninja"), reason="no C++ compiler or no ninja here"),
    pytest.mark.skipif(not triton.__version__.startswith(("3.6.", "3.7.")), reason="another Triton"),
]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `fake_driver.calls` found, all of it in one process: building and compiling take most of its time."""
    folder = tmp_path_factory.mktemp("driver")
    built(folder)
    environment = {
        **os.environ, "STEPSCOPE_NATIVE": "1", "STEPSCOPE_CACHE": str(folder / "cache"),
        "TRITON_LIBCUDA_PATH": str(folder), "TRITON_CACHE_DIR": str(folder / "triton"), "TRITON_INTERPRET": "0",
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.fake_driver.calls", str(folder)], env=environment, cwd=ROOT,
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "building the launcher in C++, once" in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "way",
    [
        "hopper", "hopper, grouped and strided", "hopper, side by side", "pointers, side by side", "pointers",
        "descriptors", "joint", "joint, by shares", "pointers, by shares, side by side",
    ],
)  # fmt: skip
def test_kernels_get_what_triton_gives_them(found: dict[str, Any], way: str):
    """All but addresses; those of tensors that a caller sees are the caller's, others are the same in each launch."""
    launches = found["same"][way]
    assert launches["count"] >= 3 and launches["native"], "forward and backward ran in C++"
    assert launches["different"] == []
    assert launches["of the caller"] and launches["consistent"] and launches["aligned"]


@pytest.mark.parametrize(
    "part",
    [
        "norm", "norm with its sum", "norm of two dtypes", "layer norm", "layer norm without a bias", "mlp",
        "mlp of halves", "gelu", "gelu by tanh", "rope",
    ],
)  # fmt: skip
def test_kernels_of_parts_get_what_triton_gives_them(found: dict[str, Any], part: str):
    """Also where gradients are parts of one tensor, and where a buffer is nobody's result."""
    launches = found["parts"][part]
    assert launches["count"] >= 2 and launches["native"] and launches["of the caller"]
    assert launches["different"] == []


def test_an_output_that_nobody_uses_has_a_gradient_of_zeros(found: dict[str, Any]):
    """As in Python, and so the launches hold."""
    norms, ropes = ([True, launches, True] for launches in (3, 2))
    assert found["unused"] == {
        "norm with its sum 0": norms, "norm with its sum 1": norms, "rope 0": ropes, "rope 1": ropes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("what", "native"),
    [
        ("a plain call", True),
        ("a gradient that lies in another way", False),
        ("a saved tensor that came back in another way", False),
        ("sums in a fixed order", False),
        ("a profiler", False),
        ("a mode", False),
        ("an address that is not aligned", False),
        ("another scale", False),
        ("what was forgotten", False),
    ],
)
def test_what_the_recorded_launches_do_not_hold_for_goes_through_python(found: dict[str, Any], what: str, native: bool):
    assert found["backward in C++"][what] is native


def test_what_autograd_promises_holds(found: dict[str, Any]):
    promises = found["promises"]
    assert "a second time" in promises["twice"]
    assert "modified by an inplace operation" in promises["changed"]
    assert "no second derivative" in promises["second derivative"]
    assert "cannot launch a kernel, error 2" in promises["failed"]
    assert promises["inference without Python"] and promises["after inference"] == [True, True]
    assert promises["no gradient"] and promises["frozen"] == [True, False, True]
    assert promises["threads"] == 200
    assert promises["kept"] == [[f"saved[{i}]" for i in range(5)], True] and promises["operator"]
    assert promises["streams"] == [9] * 4, "backward runs on the stream of its forward"


def test_calls_of_more_kinds_than_are_kept_are_learnt_anew(found: dict[str, Any]):
    """And a graph from before has its backward."""
    many = found["many"]
    assert many["backward launches"] >= 2
    assert [many[each] for each in ("before", "forgotten", "again")] == [True] * 3


@pytest.mark.parametrize(
    "lesson",
    [
        "one tensor twice", "one gradient twice", "after an expanded gradient", "after a strided gradient",
        "after a failure", "after an address that is not aligned",
        "forward mode", "a node", "compiled autograd, mlp", "compiled autograd, norm",
        "compiled autograd, rope", "compiled autograd, flash",
    ],
)  # fmt: skip
def test_a_call_unlike_the_others_teaches_nothing_wrong(found: dict[str, Any], lesson: str):
    assert found["lessons"][lesson]


def test_without_a_compiler_python_launches_and_says_why(found: dict[str, Any]):
    said = found["failing"]
    assert said.startswith("stepscope: kernels are launched from Python: the launcher in C++ cannot be built (")
    assert said.endswith("(/no/compiler is not found): install g++ and ninja")
