"""How long does a prediction of memory take? `stepscope fit`, and others' tools for the same models, side by side.

    python benchmarks/fit.py [--runs 3] [--without MemTracker] [--json FILE]
    python benchmarks/fit.py --show FILE...            # a table of results kept with --json

Each is a process of its own, and all take turns. What counts is processor time, the least of the runs. Beside them is
a process that imports PyTorch and the model's class, which all of them must. Without transformers only the textbook's
model is predicted; accelerate's estimate and PyTorch's MemTracker run where they are installed. They answer less:
accelerate adds up parameters, gradients and optimizer state, and MemTracker counts one step.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from stepscope.core.units import MIB
from stepscope.recording.environment import read_environment, resolve_device
from stored import Sample, measure_or_show

MODELS = {
    "24 layers, 0.37 B": {},
    "22 layers, 1.1 B": {"layers": 22, "width": 2048, "ff": 5632, "heads": 32, "kv": 4},
    "80 layers, 70 B": {"layers": 80, "width": 8192, "ff": 28672, "heads": 64, "kv": 8, "vocabulary": 128256},
}
"""Llamas, by the arguments of the factory."""

FACTORY = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def make(layers=24, width=1024, ff=2816, heads=16, kv=16, vocabulary=32000, batch_size=4, seq_len=512):
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=width, intermediate_size=ff, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=vocabulary, max_position_embeddings=8192,
    ))
    ids = torch.randint(0, vocabulary, (batch_size, seq_len))
    return model, {"input_ids": ids, "labels": ids}
"""
IMPORTS = "import torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
ACCELERATE = """
import json, sys
from accelerate import init_empty_weights
from accelerate.utils import calculate_maximum_sizes
from llama import make
with init_empty_weights():
    model, _ = make(**json.loads(sys.argv[1]))
total, _ = calculate_maximum_sizes(model)
print(4 * total)  # parameters, gradients and Adam's two moments, as `accelerate estimate-memory` says of training
"""
TRACKER = """
import json, sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from llama import make
with FakeTensorMode():
    model, batch = make(**json.loads(sys.argv[1]))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()  # it counts a module's calls of one step
    peaks = tracker.get_tracker_snapshot("peak")
print(max(snapshot["Total"] for snapshot in peaks.values()))
"""


class Row(msgspec.Struct, kw_only=True):
    """One tool and one model."""

    tool: str
    model: str
    runs: list[Sample]
    failure: str | None = None
    """Why it gave no answer."""

    @property
    def least_s(self) -> float:
        """The least processor time."""
        return min(sample.cpu_s for sample in self.runs)


class Result(msgspec.Struct, kw_only=True):
    """The benchmark's result."""

    environment: str
    versions: dict[str, str]
    rows: list[Row]


def _subjects(folder: Path) -> list[tuple[str, str, list[str]]]:
    """The tool, the model and the command of each row."""
    fit = [sys.executable, "-m", "stepscope", "fit", "--runs", str(folder)]
    textbook = [("stepscope fit --memory 24GiB", "the textbook's xl", [*fit, "--model", "xl", "--memory", "24GiB"])]
    if importlib.util.find_spec("transformers") is None:
        return textbook
    rows = [("imports alone", "", [sys.executable, "-c", IMPORTS])]
    for model, arguments in MODELS.items():
        given = [word for name, value in arguments.items() for word in ("--arg", f"{name}={value}")]
        own = [*fit, "--module", f"{folder / 'llama.py'}:make", *given]
        rows.append(("stepscope fit", model, own))
        if not arguments:
            rows.append(("stepscope fit --memory 24GiB", model, [*own, "--memory", "24GiB"]))
        others = [("MemTracker", TRACKER)]
        if importlib.util.find_spec("accelerate") is not None:
            others.insert(0, ("accelerate's estimate", ACCELERATE))
        rows += [(tool, model, [sys.executable, "-c", code, json.dumps(arguments)]) for tool, code in others]
    return rows + textbook


def _run(command: list[str], folder: Path) -> tuple[Sample, str | None]:
    """One process: what it took, and why it failed. It finds modules compiled, as users' processes do."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    output, errors = folder / "output", folder / "errors"
    timer = [sys.executable, "-I", "-S", str(Path(__file__).with_name("timed_process.py"))]
    command = [*timer, "", str(output), str(errors), *command]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=environment)
    told = json.loads(done.stdout)
    lines = errors.read_text().strip().splitlines()
    failure = (lines or [f"code {told['exit_code']}"])[-1] if told["exit_code"] else None
    return msgspec.convert(told["sample"], type=Sample), failure


def measure(arguments: argparse.Namespace) -> Result:
    """Each round runs every command once; one that failed is not run again."""
    versions = {}
    for name in ("torch", "transformers", "accelerate"):
        if importlib.util.find_spec(name) is not None:
            versions[name] = importlib.metadata.version(name)
    rows: dict[tuple[str, str], Row] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "llama.py").write_text(FACTORY)
        for _ in range(arguments.runs):
            for tool, model, command in _subjects(folder):
                if tool == arguments.without:
                    continue
                row = rows.setdefault((tool, model), Row(tool=tool, model=model, runs=[]))
                if row.failure is None:
                    sample, row.failure = _run(command, folder)
                    row.runs.append(sample)
    environment = read_environment(resolve_device("cpu"))
    return Result(environment=environment.described, versions=versions, rows=list(rows.values()))


def render_markdown(result: Result) -> str:
    """The result as a Markdown table."""
    imports = next((row.least_s for row in result.rows if row.tool == "imports alone"), None)
    lines = ["| tool | Llama of | processor | beyond imports | memory | runs |", "|" + "---|" * 6]
    for row in result.rows:
        beyond = "" if imports is None or "textbook" in row.model else f"{row.least_s - imports:+.2f} s"
        peak = min(sample.peak_bytes for sample in row.runs) / MIB
        figures = f"{row.least_s:.2f} s | {beyond} | {peak:.0f} MiB | {len(row.runs)}"
        lines.append(f"| {row.tool} | {row.model} | {row.failure or figures} |")
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items() if name != "torch")
    return f"Processor seconds, the least of the runs. {result.environment}, {versions}\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Print the result; with --json also keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--without", metavar="TOOL", help="leave out a tool: MemTracker takes minutes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    measure_or_show(parser.parse_args(), Result, measure=measure, render_markdown=render_markdown)


if __name__ == "__main__":
    main()
