"""Predicted and measured memory of architectures that people train: twelve from transformers' configurations with
random weights, and three of plain PyTorch. Nothing is downloaded.

    python benchmarks/architectures.py results/cpu/architectures.json [--device cuda] [--only llama,unet] [--jobs 4]

Each runs as a user's module does: measured by `run`, traced, its allocations recorded, predicted by `fit`, and looked
at under autocast by `study autocast`. Without transformers those of plain PyTorch alone are run. A document that
exists already keeps the rows of the architectures that are not run again. With `--jobs` several run side by side: their
memory is the same, and their times, which others disturb, are left out.
"""

import argparse
import concurrent.futures
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.allocations.prediction.fit import Unseen, budget_of_memory
from stepscope.core.formulas.spelled import parameters_of
from stepscope.core.workloads import FactoryWorkload, UserModel
from stepscope.questions.fit_apart import fit_apart

_DECODER = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "max_position_embeddings": 512,
}  # fmt: skip
_GROUPED = {**_DECODER, "num_key_value_heads": 2}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_GROUPED, "architectures": ["LlamaForCausalLM"]},
    "qwen2": {"model_type": "qwen2", **_GROUPED, "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", **_GROUPED, "head_dim": 32, "architectures": ["Qwen3ForCausalLM"]},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 4096, "n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 512,
        "architectures": ["GPT2LMHeadModel"],
    },
    "gpt-neox": {"model_type": "gpt_neox", **_DECODER, "architectures": ["GPTNeoXForCausalLM"]},
    "bert": {"model_type": "bert", **_DECODER, "architectures": ["BertForMaskedLM"]},
    "t5": {
        "model_type": "t5", "vocab_size": 4096, "d_model": 256, "d_kv": 32, "d_ff": 768, "num_layers": 3,
        "num_heads": 8, "decoder_start_token_id": 0, "architectures": ["T5ForConditionalGeneration"],
    },
    "vit": {
        "model_type": "vit", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 8, "image_size": 128, "patch_size": 8, "num_labels": 100,
        "architectures": ["ViTForImageClassification"],
    },
    "mixtral": {
        "model_type": "mixtral", **_GROUPED, "intermediate_size": 384, "num_local_experts": 4,
        "num_experts_per_tok": 2, "architectures": ["MixtralForCausalLM"],
    },
    "mamba": {
        "model_type": "mamba", "vocab_size": 4096, "hidden_size": 128, "state_size": 16, "num_hidden_layers": 3,
        "architectures": ["MambaForCausalLM"],
    },
    "whisper": {
        "model_type": "whisper", "vocab_size": 4096, "d_model": 192, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 768, "decoder_ffn_dim": 768,
        "num_mel_bins": 80, "max_source_positions": 300, "max_target_positions": 128, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
        "architectures": ["WhisperForConditionalGeneration"],
    },
    "gemma3": {
        "model_type": "gemma3_text", **_GROUPED, "head_dim": 32, "sliding_window": 64,
        "architectures": ["Gemma3ForCausalLM"],
    },
}  # fmt: skip
SIZES = {"batch_size": 4, "seq_len": 128}
SIZES_OF = {"mamba": {"batch_size": 4, "seq_len": 32}}
"""Mamba's plain path runs token by token: a step of 128 has so many operators that recording it takes 18 GB."""
PLAIN = ("unet", "resnet", "vision-mixture")


class Residual(nn.Module):
    """Two convolutions with batch norm round a shortcut, as in ResNet (He et al. 2015)."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(out) for _ in range(2))
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)), inplace=True)
        return F.relu(self.norms[1](self.second(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network for images."""

    def __init__(self, width: int, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(nn.Sequential(Residual(a, b, 1 if a == b else 2), Residual(b, b)) for a, b in itertools.pairwise(sizes))
        )
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        return self.head(self.stages(x).mean((2, 3)))


class UNet(nn.Module):
    """An encoder and a decoder of convolutions with shortcuts between them (Ronneberger et al. 2015)."""

    def __init__(self, width: int, depth: int = 3) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.begin = self._pair(3, width)
        self.down = nn.ModuleList(self._pair(a, b) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(sizes))
        self.join = nn.ModuleList(self._pair(2 * a, a) for a in sizes[:-1])
        self.end = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _pair(channels: int, out: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU(),
            nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.begin(x)]
        for down in self.down:
            kept.append(down(F.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat([up(x), kept.pop()], 1))
        return self.end(x)


class Routed(nn.Module):
    """A mixture of experts that gathers each expert's rows, so that shapes depend on data."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, (expert(x[rows]) * weight[rows, None]).to(out.dtype))
        return out


def resnet(batch_size: int = 8, width: int = 32, size: int = 96) -> tuple[nn.Module, tuple[Tensor, Tensor], Any]:
    """A small ResNet-18 with a batch of images and classes."""
    images = torch.randn(batch_size, 3, size, size)
    return ResNet(width), (images, torch.randint(100, (batch_size,))), F.cross_entropy


def unet(batch_size: int = 4, width: int = 16, size: int = 96) -> tuple[nn.Module, tuple[Tensor, Tensor], Any]:
    """A small U-Net with a batch of noisy images and clean ones."""
    images, clean = torch.randn(batch_size, 3, size, size), torch.randn(batch_size, 3, size, size)
    return UNet(width), (images, clean), F.mse_loss


def vision_mixture(batch_size: int = 512, width: int = 128) -> tuple[nn.Module, tuple[Tensor, Tensor], Any]:
    """Three layers of routed experts on rows of features."""
    model = nn.Sequential(nn.Linear(width, width), *(Routed(width) for _ in range(3)), nn.Linear(width, 10))
    return model, (torch.randn(batch_size, width), torch.randint(10, (batch_size,))), F.cross_entropy


def _measured(architecture: dict[str, Any], device: str, runs: Path) -> dict[str, Any]:
    """What `run` says of it: its status, its peak by phase, and what was traced and recorded of it."""
    said = [sys.executable, "-m", "stepscope", "run", *architecture["options"], "--device", device, "--json"]
    limits = ["--steps", "3", "--warmup", "2", "--no-profile", "--record", "memory,kineto", "--runs", str(runs)]
    done = subprocess.run([*said, *limits], capture_output=True, text=True, check=False)
    if not done.stdout:
        return {"failure": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}
    run = json.loads(done.stdout)
    recorded, trace, counted = run.get("memory") or {}, run.get("trace") or {}, run["evidence"].get("memory") or {}
    return {
        "status": run["status"],
        "step_s": statistics.median(run["samples"]["step"]["values_s"]) if run["samples"].get("step") else None,
        "findings": sorted({finding["kind"] for finding in run["findings"]}),
        "traced_modules": len(trace["modules"]) if "modules" in trace else None,
        # On a GPU the allocator's own count, and on a CPU that of the recorded step.
        "measured_peak": max((counted.get(key) or 0 for key in PEAKS), default=0) or recorded.get("peak_bytes"),
        "phases": recorded.get("measured") or counted,
        "environment": run.get("environment"),
    }


def _under_autocast(options: list[str], device: str) -> dict[str, Any]:
    """How many modules ran under autocast to bf16, how many gave bf16, and how many parameters were cast."""
    said = [sys.executable, "-m", "stepscope", "study", "autocast", *options, "--device", device, "--json"]
    done = subprocess.run(said, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failure": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}
    tables = {table["title"]: table for table in json.loads(done.stdout)["tables"]}
    modules = [dict(zip(tables["Modules"]["columns"], row, strict=True)) for row in tables["Modules"]["rows"]]
    ran = [module for module in modules if module["calls"]]
    first = dict(zip(tables["Casts"]["columns"], tables["Casts"]["rows"][0], strict=True))
    return {
        "modules": len(ran),
        "gave_bf16": sum("bf16" in (module["output"] or "") for module in ran),
        "parameters_cast": first["parameters cast"],
        "bytes_of_copies": first["bytes of their copies"],
    }


def _compared(name: str, folder: Path, device: str) -> dict[str, Any]:
    """One architecture: what was measured, beside what was predicted."""
    if name in CONFIGURATIONS:
        if importlib.util.find_spec("transformers") is None:
            return {"name": name, "skipped": "transformers is not installed"}
        file = folder / f"{name}.json"
        file.write_text(json.dumps(CONFIGURATIONS[name]))
        factory, arguments = str(file), SIZES_OF.get(name, SIZES)
        options = ["--model", factory, *(word for key, n in arguments.items() for word in ("--arg", f"{key}={n}"))]
    else:
        factory, arguments = f"{Path(__file__).resolve()}:{name.replace('-', '_')}", {}
        options = ["--module", factory]
    kind = "cuda" if device.startswith("cuda") else "cpu"
    workload = FactoryWorkload(factory=factory, arguments=arguments, model=UserModel(name=""))
    measured = _measured({"options": options}, device, folder / "runs")
    environment = measured.pop("environment", None)
    peak = measured.get("measured_peak")
    budgets = [budget_of_memory(int(peak * share)) for share in VERDICTS] if peak else []
    fits = fit_apart(workload, budgets, kind, search=False)
    predicted, unseen = fits[0].estimate, fits[0].estimate.unseen or Unseen()
    return {
        "name": name,
        "predicted_peak": predicted.peak_bytes,
        **measured,
        "error": predicted.peak_bytes / peak - 1 if peak else None,
        "is_bound": fits[0].is_bound,
        "unseen": [*unseen.custom, *unseen.at_most],
        "predicted_phases": {key: getattr(predicted.memory, key) for key in PHASES},
        "verdicts": {str(share): fit.fits for share, fit in zip(VERDICTS, fits, strict=False) if budgets},
        "parameters": parameters_of(fits[0].workload),
        "autocast": _under_autocast(options, device),
        "environment": environment,
    }


VERDICTS = (0.95, 1.5)
"""Shares of the measured peak that are asked of as budgets: the first must not be said to fit."""

PEAKS = ("forward_peak", "backward_peak", "optimizer_peak")
PHASES = ("after_parameters", "forward_peak", "saved_for_backward", "backward_peak", "optimizer_peak")


def main() -> None:
    """Run each architecture, and write one document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default=",".join([*CONFIGURATIONS, *PLAIN]))
    parser.add_argument("--jobs", type=int, default=1, help="how many run side by side")
    parser.add_argument("--show", action="store_true", help="print the table of a document written before")
    asked = parser.parse_args()
    if asked.show:
        print("\n".join(_table(json.loads(asked.out.read_text()))))
        return
    rows: dict[str, dict[str, Any]] = {}
    if asked.out.exists():
        stored = json.loads(asked.out.read_text())
        rows = {row["name"]: {**row, "environment": stored["environment"]} for row in stored["architectures"]}
    apart = concurrent.futures.ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn"))
    with tempfile.TemporaryDirectory() as folder, apart as workers:
        begun = {workers.submit(_compared, name, Path(folder), asked.device): name for name in asked.only.split(",")}
        for done in concurrent.futures.as_completed(begun):
            name = begun[done]
            rows[name] = done.result() | ({"step_s": None} if asked.jobs > 1 else {})
            _write(asked.out, list(rows.values()))  # whatever ends the next one, this one is kept
            print(f"{name}: {rows[name].get('predicted_peak')} predicted, {rows[name].get('measured_peak')} measured")


def _table(document: dict[str, Any]) -> list[str]:
    """The document as lines of text."""
    lines = [f"{'architecture':16}{'predicted B':>14}{'measured B':>14}{'error':>10}{'traced':>9}{'gave bf16':>12}"]
    for row in document["architectures"]:
        if row.get("error") is None:
            lines.append(f"{row['name']:16}{row.get('skipped') or row.get('failure')}")
            continue
        bound = "  a bound: shapes depend on data" if row["is_bound"] else ""
        figures = f"{row['predicted_peak']:>14,}{row['measured_peak']:>14,}{100 * row['error']:>+8.2f} %"
        figures += f"{row['traced_modules']:>9}" if row.get("traced_modules") else ""
        if "modules" in (autocast := row.get("autocast") or {}):
            figures += f"{autocast['gave_bf16']:>6} of {autocast['modules']:>2}"
        lines.append(f"{row['name']:16}{figures}{bound}")
    median, worst = 100 * document["median_error"], 100 * document["worst_error"]
    lines.append(f"{document['judged']} judged: the median error is {median:.2f} %, the worst {worst:.2f} %.")
    environment = document["environment"] or {}
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    return [*lines, f"{environment.get('device_name')}, {versions}"]


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write the document of what has been compared so far."""
    environments = [environment for row in rows if (environment := row.get("environment"))]
    shown = [{key: value for key, value in row.items() if key != "environment"} for row in rows]
    errors = [abs(row["error"]) for row in rows if row.get("error") is not None and not row["is_bound"]]
    bounds = [row["error"] for row in rows if row.get("error") is not None and row["is_bound"]]
    document = {
        "architectures": shown,
        "judged": len(errors),
        "median_error": statistics.median(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "bounds_held": all(error >= 0 for error in bounds),
        "environment": environments[0] if environments else None,
        "versions": {name: _version(name) for name in ("stepscope", "torch", "transformers")},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
