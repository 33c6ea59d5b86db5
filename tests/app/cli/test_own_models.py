"""A user's own model under every verb: swept, tabled, traced, its memory explained, and studied."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.core.errors import InputError
from stepscope.core.range_names import PHASES
from stepscope.engine.workload_options import ManyWorkloads
from tests.command import stepscope

pytestmark = pytest.mark.slow

OWN = """
import torch
import torch.nn.functional as F
from torch import nn

class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.self_attn, self.mlp, self.norm = Attention(width), nn.Linear(width, width), nn.LayerNorm(width)
    def forward(self, x):
        return x + F.gelu(self.mlp(self.norm(x + self.self_attn(x))))

class Inner(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.model, self.head = Inner(width), nn.Linear(width, 50)
    def forward(self, x):
        return self.head(self.model(x))

def make(width=16, kind="plain"):
    assert width > 0, "a width is positive"
    batches = [(torch.randint(50, (2, 8)), torch.randint(50, (2, 8))) for _ in range(2)]
    return Model(width), batches, lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten())
"""

BRIEF = ("--warmup", 1, "--steps", 3, "--no-profile", "--device", "cpu")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


@pytest.mark.long
def test_a_sweep_over_arguments_is_resumed_and_tabled(own: Path):
    sweep = ("sweep", "--module", "own.py:make", "--arg", "width=8,16", *BRIEF)
    done = stepscope(*sweep, "--json", cwd=own)
    assert done.returncode == 0, done.stderr
    workloads = [json.loads(line)["workload"] for line in done.stdout.splitlines()]
    assert [(w["kind"], w["arguments"]["width"], w["model"]["name"]) for w in workloads] == [
        ("own", 8, "Model"), ("own", 16, "Model"),
    ]  # fmt: skip
    assert "make-fp32-train-width8" in done.stderr

    again = stepscope(*sweep, cwd=own)
    assert again.stderr.count("(already measured)") == 2 and len(list(own.glob("runs/2*"))) == 2
    listed = stepscope("ls", cwd=own).stdout
    assert "width8" in listed and "width16" in listed
    assert "made by own.py:make with width=16" in stepscope("show", "last", cwd=own).stdout

    mixed = stepscope("table", "--rows", "dtype", cwd=own)
    assert (mixed.returncode, mixed.stdout) == (2, "")
    assert "they differ in arg.width (8, 16); add arg.width to --rows" in mixed.stderr
    table = ("table", "--rows", "arg.width", "--value", "steps", "--style", "csv")
    rows = stepscope(*table, cwd=own).stdout.splitlines()
    assert [line.split(",")[2:4] for line in rows] == [["arg.width", "steps"], ["8", "3"], ["16", "3"]]
    one = stepscope(*table, "--where", "arg.width=16", cwd=own).stdout.splitlines()
    assert [line.split(",")[2] for line in one[1:]] == ["16"]
    unknown = stepscope("table", "--rows", "arg.depth", cwd=own)
    assert unknown.returncode == 2
    assert unknown.stderr.strip() == "stepscope: no run has the argument 'depth': they have arg.width"

    (own / "own.py").write_text(OWN.replace("F.gelu", "F.relu"))
    changed = stepscope(*sweep, cwd=own)
    assert changed.returncode == 0 and "(already measured)" not in changed.stderr
    assert len(list(own.glob("runs/2*"))) == 4
    mixed = stepscope("table", "--rows", "arg.width", cwd=own)
    assert mixed.returncode == 2 and "they differ in code" in mixed.stderr


def test_a_cell_whose_factory_fails_leaves_nothing_and_the_others_go_on(own: Path):
    done = stepscope("sweep", "--module", "own.py:make", "--arg", "width=0,8", *BRIEF, cwd=own)
    assert done.returncode == 2
    failed = "make-fp32-train-width0, warm-up 1: failed (refused): --module own.py:make fails: AssertionError: a width"
    assert failed in done.stderr and "Traceback" not in done.stderr
    assert "1 of 2 cells measured, 1 failed; runs in runs" in done.stdout
    assert done.stderr.endswith("1 of 2 cells ended without a result: the same command tries it again\n")
    assert [place.name.partition("-")[2] for place in own.glob("runs/2*")] == [
        next(own.glob("runs/*width8*")).name.partition("-")[2]
    ]


def test_a_run_says_where_time_and_memory_went_by_the_modules_own_paths(own: Path):
    run = ("run", "--module", "own.py:make", *BRIEF, "--record", "kineto,memory")
    done = stepscope(*run, "--json", cwd=own)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    forward = {row["module"]: row["layers"] for row in found["trace"]["modules"] if row["phase"] == "forward"}
    assert forward == {
        "": 1, "head": 1, "model.embed": 1, "model.layers.*": 2, "model.layers.*.mlp": 2, "model.layers.*.norm": 2,
        "model.layers.*.self_attn": 2, "model.layers.*.self_attn.out": 2, "model.layers.*.self_attn.qkv": 2,
    }  # fmt: skip
    backward = {row["module"] for row in found["trace"]["modules"] if row["phase"] == "backward"}
    assert backward >= {"head", "model.embed", "model.layers.*.mlp", "model.layers.*.self_attn.qkv"}
    assert found["trace"]["attention"] == []

    trace, memory = (stepscope(verb, "last", cwd=own).stdout for verb in ("trace", "memory"))
    assert "model.layers.*.self_attn.qkv" in trace
    for text in (trace, memory):
        assert "Model: 4,434 parameters (made by own.py:make)" in text
        assert "batch x int64[2, 8]" in text
    assert "model.layers.0 and 1 alike" in memory
    assert "head.weight 50 x 16 float32" in memory
    line = 1 + OWN.splitlines().index("        return x + F.gelu(self.mlp(self.norm(x + self.self_attn(x))))")
    assert f"own.py:{line} forward" in memory  # what GELU keeps, by the line that calls it


def test_a_model_that_memory_does_not_hold_is_a_result(own: Path):
    done = stepscope("run", "--module", "own.py:make", "--arg", "width=40000000000000", "--device", "cpu", cwd=own)
    assert done.returncode == 3 and "make: parameters not counted (made by own.py:make with width" in done.stdout
    assert "out-of-memory (build)" in done.stdout and "--checkpointing every-1" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_speed_and_kernels_of_ones_own(own: Path):
    study = ("study", "speed", "--module", "own.py:make", "--arg", "width=8", "--dtype", "fp32,bf16")
    done = stepscope(*study, "--device", "cpu", "--warmup", 1, "--steps", 3, "--json", cwd=own)
    assert done.returncode == 0, done.stderr
    times = json.loads(done.stdout)["tables"][0]
    assert [row[:2] for row in times["rows"]] == [
        ["Model-b2-s8-forward-backward-width8", "fp32"], ["Model-b2-s8-forward-backward-width8", "bf16"],
    ]  # fmt: skip
    stored = stepscope("study", "speed", "--from", "runs", "--json", cwd=own)
    assert json.loads(stored.stdout)["tables"][0]["rows"] == times["rows"]

    kernels = stepscope("study", "kernels", "--from", "runs", "--only", "b", cwd=own)
    assert kernels.returncode == 0 and "Model-b2-s8-bf16-forward-backward-width8" in kernels.stdout
    attention = stepscope("study", "attention-step", "--from", "runs", cwd=own)
    assert attention.returncode == 2 and "Traceback" not in attention.stderr


@pytest.mark.long
def test_what_compiling_gives_ones_own(own: Path):
    (own / "linear.py").write_text(
        "import torch\n"
        "def make(width=8): return torch.nn.Linear(width, 4), torch.ones(2, width), lambda y: y.square().mean()\n"
    )
    study = ("study", "compile", "--module", "linear.py:make", "--phase", "forward", "--device", "cpu")
    done = stepscope(*study, "--warmup", 1, "--steps", 3, "--json", cwd=own)
    assert done.returncode == 0, done.stderr
    report = next(t for t in json.loads(done.stdout)["tables"] if t["title"] == "What torch.compile did")
    (row,) = report["rows"]
    assert row[:4] == ["Linear-b2-fp32-forward", "default", "compiled", "1 of 1"]


def test_autocast_of_ones_own_by_its_file_and_arguments(own: Path):
    study = ("study", "autocast", "--module", "own.py:make", "--arg", "width=8", "--device", "cpu", "--json")
    done = stepscope(*study, cwd=own)
    assert done.returncode == 0, done.stderr
    shapes = {row[1] for row in json.loads(done.stdout)["tables"][0]["rows"]}
    assert {"parameter 24 x 8", "parameter 50 x 8"} <= shapes


@pytest.mark.long
def test_autocast_of_a_configuration(own: Path):
    pytest.importorskip("transformers", reason="needs transformers: pip install 'stepscope[transformers]'")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    (own / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, **sizes}))
    arguments = ("--arg", "num_hidden_layers=1", "--seq-len", "8")
    done = stepscope("study", "autocast", "--model", "config.json", *arguments, "--device", "cpu", "--json", cwd=own)
    assert done.returncode == 0, done.stderr
    rows = {row[0].strip(): row for row in json.loads(done.stdout)["tables"][0]["rows"]}
    assert rows["q_proj"][1] == "Linear" and rows["q_proj"][-1] == "bf16"


def test_gradients_of_ones_own_by_its_modules(own: Path):
    study = ("study", "underflow", "--module", "own.py:make", "--arg", "width=8", "--device", "cpu", "--json")
    done = stepscope(*study, cwd=own)
    assert done.returncode == 0, done.stderr
    ranges, *_, observed = json.loads(done.stdout)["tables"]
    values = {row[0]: row[2] for row in ranges["rows"] if row[1] == "parameters"}
    assert values == {
        "head": 8 * 50 + 50, "model.embed": 50 * 8, "model.layers.*.mlp": 2 * (8 * 8 + 8),
        "model.layers.*.norm": 2 * (8 + 8), "model.layers.*.self_attn.out": 2 * (8 * 8 + 8),
        "model.layers.*.self_attn.qkv": 2 * (8 * 24 + 24),
    }  # fmt: skip
    outputs = {row[0]: row[2] for row in ranges["rows"] if row[1] == "activations"}
    assert outputs["head"] == 2 * 8 * 50 and outputs["model.layers.*.mlp"] == 2 * (2 * 8 * 8)
    assert observed["title"] == "As observed under autocast to fp16" and observed["rows"]


def test_sizes_belong_to_the_textbook_s_model(own: Path):
    done = stepscope("run", "--module", "own.py:make", "--layers", 2, cwd=own)
    assert done.returncode == 2 and "--layers belongs to the textbook's model" in done.stderr
    with pytest.raises(InputError, match="as in --arg sliding_window=N"):
        ManyWorkloads({"model": ("config.json",), "window": (256,)}).workloads()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("compile", "--module", "own.py:make", "--model", "tiny"), "--module and --model both say which model"),
        (
            ("speed", "--arg", "width=8", "--device", "cpu"),
            "--arg belongs to --module, or --model CONFIG.json: say whose",
        ),
        (("compile", "--prices", "--device", "cpu"), "--prices is for a module of your own: add --module FILE:FACTORY"),
        (
            ("compile", "--prices", "--module", "own.py:make", "--phase", "train"),
            "leave out --from, --phase and --compile",
        ),
        (("speed", "--module", "own.py:make", "--from", "runs"), "--module says nothing with --from: leave it out"),
        (("autocast", "--module", "own.py:make", "--arg", "width=8,9"), "--arg width has 2 values"),
        (("autocast", "--arg", "width=8"), "--arg belongs to --module, or --model CONFIG.json: say whose"),
        (("autocast", "--module", "own.py:make", "--arg", "depth=8"), "depth"),
        (("autocast", "--module", "own.py:make", "--model", "toy"), "--module and --model both say which model"),
        (("autocast", "--model", "config.json"), "--model config.json cannot be read: No such file or directory"),
        (("autocast", "--seq-len", "8"), "--seq-len belongs to --model CONFIG.json here: leave it out, or name one"),
        (
            ("underflow", "--model", "config.json", "--seq-len", "8", "--arg", "seq_len=9"),
            "--seq-len and --arg seq_len say the same: give one of them",
        ),
        (
            ("underflow", "--module", "own.py:make", "--seq-len", "8"),
            "has no parameter 'seq_len'",
        ),
        (("parity", "--module", "own.py:make", "--arg", "width=8,9"), "--arg width has 2 values"),
        (("attention-step", "--module", "own.py:make"), "No such option: --module"),
    ],
)
def test_what_a_study_cannot_ask_of_ones_own_is_one_line(own: Path, asked: tuple[str, ...], said: str):
    (own / "runs").mkdir()
    done = stepscope("study", *asked, cwd=own)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert said in done.stderr


TEXTBOOK = """
import torch
from stepscope.core.model_config import configure
from stepscope.core.workloads import TextbookWorkload
from stepscope.training.training_step import TrainingStep

def make():
    workload = TextbookWorkload(model=configure("tiny", layers=2, vocabulary=500), batch_size=2, seq_len=16)
    step = TrainingStep(workload, torch.device("cpu"))
    return step.forward_module, list(step.batches)
"""
"""The textbook's model with its loss, ForwardLoss, as a user would give it."""


OF_TIMES = {
    "host-busy", "profiler-overhead", "wide-spread", "not-steady", "correlated-samples", "warm-up-unsettled",
    "launch-bound", "beyond-the-ceiling", "impossible-rate",
}  # fmt: skip
"""Kinds of finding that other times of the same step may give."""


@pytest.mark.long
def test_the_textbooks_model_as_ones_own_gives_the_same_answers(own: Path):
    (own / "textbook.py").write_text(TEXTBOOK)
    sizes = ("--model", "tiny", "--layers", 2, "--vocabulary", 500, "--batch-size", 2, "--seq-len", 16)
    by_name, by_factory = (_answers(*said, cwd=own) for said in (sizes, ("--module", "textbook.py:make")))
    assert by_factory == by_name
    assert by_name["operators"]["forward"] > 100 and by_name["peak_bytes"] > 2**20


def _answers(*model: object, cwd: Path) -> dict[str, Any]:
    """What a run of this model says of its work and its memory; not of its times."""
    run = ("run", *model, "--warmup", 1, "--steps", 3, "--device", "cpu", "--record", "kineto,memory", "--json")
    done = stepscope(*run, cwd=cwd)
    assert done.returncode in (0, 1), done.stderr
    said = json.loads(done.stdout)
    in_phases = {
        name: [row for row in said["trace"][name] if row["phase"] in PHASES] for name in ("phases", "families")
    }
    return {
        "operators": {row["phase"]: row["kernels"] for row in in_phases["phases"]},
        "families": {(row["phase"], row["family"]): row["calls"] for row in in_phases["families"]},
        "peak_bytes": said["memory"]["peak_bytes"],
        "saved_for_backward": said["evidence"]["memory"]["saved_for_backward"],
        "findings": {finding["kind"] for finding in said["findings"]} - OF_TIMES,
    }
