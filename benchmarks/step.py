"""How fast is the whole step, and what did each part of it give? One way after another, each in a process of its own.

    python benchmarks/step.py [--models small large 2.7B] [--only fused hugging-face] [--budget 900] [--out FILE]
    python benchmarks/step.py --busy 16 ...         # beside 16 processes that keep the host's cores busy
    python benchmarks/step.py --show FILE...        # a table of what was kept

The step is forward, backward and AdamW at batch 4 and sequence 512, with fp32 master weights. Ways are named in WAYS:
today's best options, each later idea on top of those before it, and rivals. A way that fails says so in its line, and
spoils none of the next: memory, captured graphs and compiled code end with its process. Each line of FILE is written
when its process has ended. When the budget of seconds is over, the rest is not measured and said to be so. With --busy
the host is slowed on purpose: a way that waits for it shows so.

A line has the medians with their 95 % intervals, of the step, of the host and of each phase; a step's share of several
that nobody waits for in between, as in a training loop; the most that tensors took and that PyTorch's allocator held of
the device; and the losses of the first steps. Seeds and batches are the same, so the losses of all ways but the rivals'
must agree as far as their precision lets them.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IN_A_ROW, ROWS = 20, 5
SIZES = ("small", "large", "2.7B")
BATCH, SEQUENCE, LOSSES = 4, 512, 8
_MASTERS = {"dtype": "bf16-master", "optimizer": "adamw-one-launch", "attention": "auto"}
_TODAY = {"dtype": "bf16", "optimizer": "adamw-fused", "attention": "auto"}
_FUSED = dict.fromkeys(("norm", "rope", "mlp", "loss"), "fused")
_JOINT = {"projections": "joint"}
_EIGHT = {"optimizer": "adamw-8bit"}
RIVAL = "hugging-face"
WAYS: dict[str, dict[str, str]] = {
    "today": {**_TODAY, "compile": "default"},
    "today-cuda-graphs": {**_TODAY, "compile": "reduce-overhead"},
    "masters": {**_MASTERS, "compile": "default"},
    "blocks": {**_MASTERS, "compile": "blocks"},
    "graph": {**_MASTERS, "compile": "blocks", "graph": "step"},
    "fused": {**_MASTERS, **_FUSED, "compile": "blocks", "graph": "step"},
    "fused-loss": {**_MASTERS, "loss": "fused", "compile": "blocks", "graph": "step"},
    "under-backward": {**_MASTERS, "optimizer": "adamw-under-backward", "compile": "blocks", "graph": "step"},
    "all": {**_MASTERS, **_FUSED, "optimizer": "adamw-under-backward", "compile": "blocks", "graph": "step"},
    "joint": {**_MASTERS, **_FUSED, **_JOINT, "compile": "blocks", "graph": "step"},
    "joint-8bit": {**_MASTERS, **_FUSED, **_JOINT, **_EIGHT, "compile": "blocks", "graph": "step"},
    "joint-default": {**_MASTERS, **_JOINT, "compile": "default", "graph": "step"},
    "joint-fused-default": {**_MASTERS, **_FUSED, **_JOINT, "compile": "default", "graph": "step"},
    "graph-default": {**_MASTERS, "compile": "default", "graph": "step"},
    "eager": {**_TODAY},
    "eager-fused": {**_TODAY, **_FUSED},
    "eager-fused-graph": {**_MASTERS, **_FUSED, "graph": "step"},
    "fp8": {**_MASTERS, "dtype": "fp8", "compile": "blocks", "graph": "step"},
    "fp8-row": {**_MASTERS, "dtype": "fp8-row", "compile": "blocks", "graph": "step"},
    "eager-liger": {**_TODAY, **dict.fromkeys(_FUSED, "liger")},
    "eager-quack": {**_TODAY, **dict.fromkeys(("norm", "rope", "loss"), "quack")},
    RIVAL: {**_TODAY, "compile": "default"},
    f"{RIVAL}-cuda-graphs": {**_TODAY, "compile": "reduce-overhead"},
}
"""By name, the choices of a step's workload. Those of Hugging Face take its Llama with SDPA in place of our model."""

_FIGURES = ("step", "host", "forward", "backward", "optimizer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or show what was kept; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(SIZES), help="presets, as stepscope models lists them")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), help="these ways, in this order")
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds for everything")
    parser.add_argument("--each", type=float, default=300.0, help="seconds that one process may take")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of measuring in a process")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--sequence", type=int, default=SEQUENCE)
    parser.add_argument("--busy", type=int, default=0, help="neighbours that keep a core of the host busy meanwhile")
    parser.add_argument("--out", type=Path, help="add a line to this file as each process ends")
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="show files kept before")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.show:
        sys.stdout.write(rendered([json.loads(line) for path in asked.show for line in path.read_text().splitlines()]))
        return 0
    if asked.one:
        sys.stdout.write("\n" + json.dumps(measured(asked.one[0], asked.one[1], asked)) + "\n")
        return 0
    found: list[dict[str, Any]] = []
    ends = time.monotonic() + asked.budget
    with _neighbours(asked.busy):
        for model in asked.models:
            for way in asked.only or WAYS:
                left = ends - time.monotonic()
                line = _in_a_process(model, way, asked, min(left, asked.each)) if left > 0 else dict(_NOT_RUN)
                line = {"model": model, "way": way, "busy": asked.busy, **line}
                found.append(line)
                sys.stderr.write(f"{model} {_named(line)}: {line.get('fault') or _milliseconds(line, 'step')}\n")
                if asked.out:
                    with asked.out.open("a") as kept:
                        kept.write(json.dumps(line) + "\n")
    sys.stdout.write(rendered(found))
    return 0


_NOT_RUN = {"fault": "not measured: the seconds were over"}


@contextmanager
def _neighbours(count: int) -> Generator[None]:
    """Processes that compute without end, as another's job on the same host does."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _in_a_process(model: str, way: str, asked: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The line of one way, measured in a fresh process, which ends with all that it started."""
    options = ["--batch", str(asked.batch), "--sequence", str(asked.sequence), "--seconds", str(asked.seconds),
               "--device", asked.device]  # fmt: skip
    command = [sys.executable, __file__, "--one", model, way, *options]
    begun = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, said = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                return {"fault": f"took more than {seconds:.0f} s"}
            raise
    line: dict[str, Any] = {}
    try:
        line |= json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        last = said.strip().splitlines()[-1:] or [f"its process ended with {process.returncode}"]
        line["fault"] = last[0][:300]
    return line | {"took_s": round(time.monotonic() - begun, 1)}


def measured(model: str, way: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The figures of one way, in this process."""
    # A process that measures, and no other, imports PyTorch.
    import torch  # noqa: PLC0415

    from stepscope.core.errors import InputError  # noqa: PLC0415
    from stepscope.core.model_config import configure  # noqa: PLC0415
    from stepscope.core.run import Settings  # noqa: PLC0415
    from stepscope.core.workloads import TextbookWorkload  # noqa: PLC0415
    from stepscope.recording.device import timing_device  # noqa: PLC0415
    from stepscope.recording.environment import resolve_device  # noqa: PLC0415
    from stepscope.recording.timer import measure_one  # noqa: PLC0415
    from stepscope.training.training_step import TrainingStep  # noqa: PLC0415

    try:
        device = resolve_device(asked.device)
        chosen: dict[str, Any] = WAYS[way]
        workload = TextbookWorkload(model=configure(model), batch_size=asked.batch, seq_len=asked.sequence, **chosen)
        torch.set_float32_matmul_precision("highest")
        step = _hugging_face(workload, device) if way.startswith(RIVAL) else TrainingStep(workload, device)
        losses: list[float] = []
        for _ in range(LOSSES):
            step.prepare()
            for phase in step.phases:
                phase.run()
            losses.append(float(step.loss) if step.loss is not None else math.nan)
            if len(losses) == 1 and device.type == "cuda":  # a compiler may have tried kernels out in the first step
                torch.cuda.reset_peak_memory_stats(device)
        # Replays allocate nothing: what the tensors of a graph take is counted while it is captured, and never again.
        alive = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        settings = Settings(warmup_floor=6, steps_floor=20, seconds=asked.seconds, profile=False)
        samples = measure_one(step, device=timing_device(device), settings=settings)
        in_a_row = _in_a_row(step, timing_device(device))
    except InputError as error:
        return {"fault": str(error)}
    except ImportError as error:
        return {"fault": f"not installed: {error}"}
    except RuntimeError as error:  # of the device, as a failed capture or no more memory: another way may work
        return {"fault": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
    figures: dict[str, Any] = {name: _figure(samples[name]) for name in _FIGURES if name in samples}
    on_gpu = device.type == "cuda"
    return {
        "choices": chosen, "batch": asked.batch, "sequence": asked.sequence, "steps": samples["step"].count,
        "seconds": figures | {"in a row": in_a_row}, "losses": losses,
        "alive_bytes": alive, "reserved_bytes": torch.cuda.memory_reserved(device) if on_gpu else None,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu", "torch": torch.__version__,
        "cores": os.cpu_count(), "load": os.getloadavg()[0],
    }  # fmt: skip


def _in_a_row(step: Any, device: Any) -> dict[str, float | None]:
    """The seconds of a step among IN_A_ROW that nobody waits for in between. A host whose cores are shared notices the
    end of a step late; who waits for each step has that time in every step, and a training loop does not."""
    from stepscope.recording.step import Phase, drive  # noqa: PLC0415
    from stepscope.recording.timer import timed_steps  # noqa: PLC0415

    class Row:
        """Several steps as one."""

        phases = (Phase(name="steps", run=lambda: [drive(step) for _ in range(IN_A_ROW)]),)

        def prepare(self) -> None:
            """Each step prepares itself."""

    samples = timed_steps(Row(), device, ROWS)["step"]
    return {name: value and value / IN_A_ROW for name, value in _figure(samples).items()}


def _figure(samples: Any) -> dict[str, float | None]:
    interval = samples.interval()
    return {
        "median": samples.median_s, "least": samples.smallest_s, "p95": samples.percentile_s("p95"),
        "low": interval.low if interval else None, "high": interval.high if interval else None,
    }  # fmt: skip


def _hugging_face(workload: Any, device: Any) -> Any:
    """The step of a Llama of the same sizes by Hugging Face, with SDPA, on the same kind of batches."""
    import torch  # noqa: PLC0415
    import torch.nn.functional as F  # noqa: PLC0415
    from transformers.models.llama.configuration_llama import LlamaConfig  # noqa: PLC0415
    from transformers.models.llama.modeling_llama import LlamaForCausalLM  # noqa: PLC0415

    from stepscope.training.training_step import AssembledStep, StepParts  # noqa: PLC0415

    sizes = workload.model
    config = LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.d_model, intermediate_size=sizes.d_ff,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.key_heads,
        max_position_embeddings=workload.seq_len, attention_bias=False, tie_word_embeddings=sizes.tied,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(workload.seed)
    with device:
        llama = LlamaForCausalLM(config)

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama

        def forward(self, tokens: Any, targets: Any) -> Any:
            logits = self.model(input_ids=tokens, use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    shape = (workload.batch_size, workload.seq_len)
    batches = [
        tuple(torch.randint(sizes.vocabulary, shape, device=device) for _ in ("tokens", "targets")) for _ in range(4)
    ]
    parts = StepParts(
        model=llama, forward=Loss(), batches=batches, split=lambda batch, _: [batch],
        named_tensors=lambda batch: list(zip(("tokens", "targets"), batch, strict=True)),
    )  # fmt: skip
    return AssembledStep(parts, workload, device)


def rendered(lines: Sequence[Mapping[str, Any]]) -> str:
    """A table of what was measured, in Markdown; a way that was measured again has its last line."""
    latest = {(line["model"], _named(line)): line for line in lines}
    text: list[str] = []
    for model in dict.fromkeys(model for model, _ in latest):
        of_model = {way: line for (each, way), line in latest.items() if each == model}
        where = next((line for line in of_model.values() if "device" in line), None)
        text += [f"## {model}" + (f", {where['device']}, torch {where['torch']}" if where else ""), ""]
        text += ["| way | step, ms | 95 % | in a row | host | forward | backward | optimizer | tensors, GiB "
                 "| reserved, GiB | of today's |",
                 "|---|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
        today = _median(of_model.get("today", {}), "step")
        for way, line in of_model.items():
            if "fault" in line:
                text.append(f"| {way} | {line['fault']} | | | | | | | | | |")
                continue
            step = line["seconds"]["step"]
            interval = f"{step['low'] * 1e3:.2f} to {step['high'] * 1e3:.2f}" if step["low"] is not None else ""
            median = _median(line, "step")
            share = f"{median / today:.3f}" if median and today else ""
            text.append(
                f"| {way} | {_milliseconds(line, 'step')} | {interval} | "
                + " | ".join(_milliseconds(line, name) for name in ("in a row", *_FIGURES[1:]))
                + f" | {_gibibytes(_alive(line))} | {_gibibytes(line['reserved_bytes'])} | {share} |"
            )
        text.append("")
    return "\n".join(text) + "\n"


def _alive(line: Mapping[str, Any]) -> int | None:
    """The most bytes that tensors took in a step; None where a line was kept before the tensors of graphs counted."""
    in_graphs = "graph" in line["choices"] or line["choices"].get("compile") == "reduce-overhead"
    return line.get("alive_bytes", None if in_graphs else line.get("peak_bytes"))


def _gibibytes(count: int | None) -> str:
    return f"{count / 2**30:.2f}" if count else ""


def _named(line: Mapping[str, Any]) -> str:
    """The way's name, with the neighbours that kept the host busy."""
    return line["way"] + (f", host with {line['busy']} busy neighbours" if line.get("busy") else "")


def _median(line: Mapping[str, Any], name: str) -> float | None:
    return line.get("seconds", {}).get(name, {}).get("median")


def _milliseconds(line: Mapping[str, Any], name: str) -> str:
    median = _median(line, name)
    return f"{median * 1e3:.2f}" if median is not None else ""


if __name__ == "__main__":
    sys.exit(main())
