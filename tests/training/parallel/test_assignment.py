"""The tests that Stanford's CS336 gives out for its second assignment, on the lessons as modules.

They lie in a repository of their own, stanford-cs336/assignment2-systems (26.1.1 has eight of parallel training):

    git clone https://github.com/stanford-cs336/assignment2-systems && pip install einx einops jaxtyping
    STEPSCOPE_CS336_TESTS=assignment2-systems pytest tests/training/parallel/test_assignment.py
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stepscope

CHECKOUT = os.environ.get("STEPSCOPE_CS336_TESTS", "")

ADAPTERS = """
from cs336_basics.model import Embedding, Linear

from stepscope.parallel import FullyShardedDataParallel, OverlappedDataParallel, ShardedOptimizer


def get_ddp(module):
    return OverlappedDataParallel(module)


def get_fsdp(module, compute_dtype=None):
    others = [one for one in module.modules() if not isinstance(one, (Linear, Embedding))]
    return FullyShardedDataParallel(module, compute_dtype, replicated=others, sums="batch")


def after_backward(module, optimizer):
    module.finish_gradient_synchronization()


ddp_on_after_backward = fsdp_on_after_backward = after_backward


def fsdp_gather_full_params(module):
    return module.full_parameters()


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    return ShardedOptimizer(params, optimizer_cls, **kwargs)
"""
"""What takes the place of the functions that a student writes."""


@pytest.mark.skipif(not CHECKOUT, reason="STEPSCOPE_CS336_TESTS names no checkout of the assignment's repository")
@pytest.mark.timeout(900)
def test_the_assignment_s_own_tests_pass(tmp_path: Path):
    checkout = Path(CHECKOUT).resolve()
    shutil.copytree(checkout / "tests", tmp_path / "tests")
    (tmp_path / "tests/adapters.py").write_text(ADAPTERS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    places = (checkout / "cs336-basics", Path(stepscope.__file__).parents[1], os.environ.get("PYTHONPATH", ""))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_ddp.py", "tests/test_fsdp.py",
         "tests/test_sharded_optimizer.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    passed = re.search(r"^=* ?(\d+) passed", ended.stdout, re.MULTILINE)
    assert ended.returncode == 0 and passed and int(passed[1]) >= 8, ended.stdout[-4000:] + ended.stderr[-2000:]
