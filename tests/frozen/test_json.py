"""The keys of --json of studies, and of verbs given more than tests/app/cli/test_output_options.py gives them."""

from pathlib import Path

import pytest

from stepscope.app.cli.app import app
from tests.command import stepscope
from tests.frozen.json_keys import check_keys, documents, key_paths, keys_of_any_answer
from tests.frozen.test_frozen import commands

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STORED = {
    "study kernels, a grid": "--from results/h200/kernels",
    "study compile": "--from results/h200/compile",
    "study compile, prices": "--from results/cpu/compile/prices.json",
    "study parity": "--from results/cpu/parity/tiny.json",
    "study shadow": "--from results/cpu/shadow/tiny.json",
    "study speed": "--from results/h200/precision-speed",
    "study quality": "--from results/cpu/precision/quality-steps.json",
    "study attention": "--from results/h200/attention/seeds.json",
    "study attention-step": "--from results/h200/attention-steps",
    "study attention-gate, of a GPU": "--from results/h200/attention/gate.json",
    "study collectives": "--from results/cpu/collectives/gloo-2.json",
    "study parallel": "--from results/cpu/study-parallel",
    "trace, of PyTorch": "tests/data/kineto_train.json.gz",
    "trace, of Nsight Systems": "tests/data/nsys_train.sqlite.gz",
    "trace, two captures": "tests/data/kineto_train.json.gz --against tests/data/kineto_inference_bf16.json.gz",
    "fit, tensors": "--model xl --seq-len 1024 --tensors",
    "fit, what would fit": "--model xl --seq-len 1024 --memory 20GB",
    "fit, against runs": "--against results/h200/first",
    "history, changes": "results/cpu/history",
    "bench": "--from results/h100/bench/preset.json",
    "tune, a search": "--from results/h200/tune/large.json",
    "show, of a GPU": "xl-b4-s512-fp32 --runs results/h200/limit-80GiB",
    "show, ranks": "tiny-b8-s64-fp32-train-zero1-x2 --runs results/cpu/study-parallel",
    "show, of a script": "Classifier --runs results/h200/loops",
}
"""What is read, by verb and what is special about it. The answers to studies that take long were stored."""

STEP = "--device cpu --model tiny --seq-len 16 --batch-size 1"
MEASURED = {
    "study formats": "",
    "study accumulation": "",
    "study normalisation": "--device cpu",
    "study softmax": "--device cpu",
    "study underflow": STEP,
    "study scaling": "--device cpu --steps 8",
    "study swallowed": "--device cpu --steps 5",
    "study autocast": "--device cpu --model tiny",
}
"""Studies that are asked here, and answer soon."""

LEFT_OUT = ("study warmup", "study allocator")
"""Studies that measure runs, in processes of their own: the one writes runs as `sweep` does, the other needs a GPU."""


@pytest.mark.parametrize("name", STORED)
def test_keys_of_what_is_read(name: str):
    check_keys(name.replace(",", ""), key_paths(*documents(json_of(name.partition(",")[0], STORED[name]))))


@pytest.mark.parametrize("name", MEASURED)
def test_keys_of_answers(name: str):
    check_keys(name, keys_of_any_answer(key_paths(*documents(json_of(name, MEASURED[name])))))


def test_every_study_has_its_keys():
    studies = {" ".join(path) for path in commands(app) if len(path) > 1}
    assert studies <= {name.partition(",")[0] for name in (*STORED, *MEASURED, *LEFT_OUT)}


def json_of(verb: str, options: str) -> str:
    """What the verb writes with --json."""
    done = stepscope(*verb.split(), *options.split(), "--json", cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout
