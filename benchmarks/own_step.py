"""Whose step of a model that people train is faster: the best stack by hand, or what `tune` reaches?

    python benchmarks/own_step.py OUT.json [--models llama,qwen2] [--sizes 2k,16k] [--seconds 570] [--short] [--tiny]
    python benchmarks/own_step.py OUT.json --show
    python benchmarks/own_step.py OUT.json --plot OUT.svg

Models of transformers with real configurations and random weights: Llama-3.2-1B, Qwen2.5-0.5B, GPT-2 medium, BERT-base,
ViT-base; about 2,048 and 16,384 tokens a step, or 16 and 128 pictures. By hand: bf16 autocast, or bf16 weights beside
fp32 masters; fused AdamW; torch.compile in each mode, of the model and of its blocks; the whole step as one CUDA graph;
Liger where it is installed. The best of these is tried with each backend of SDPA and with FlexAttention. Ours: what the
rounds of `tune` reach for such a model. Both begin from the same parameters and train on the same batches.

Each way is a process of its own. Many get ready side by side; when some are, the others are stopped, and those take
turns, alone on the GPU. A first round picks the fastest of each side, and only these get five processes a side. OUT
keeps what was measured as it comes, and the same command goes on there. A way that fails keeps its reason. `--short`
begins with the few ways of each side that were the fastest or are reasoned to be (`SHORT`), one of each for all models.

The floor of a cell: the model's products (6 FLOPs a weight and token, and attention's, causal counted half) at the
rate of a large product measured here, and 26 bytes a parameter for AdamW (read gradient, weight, the rest of its
master and both moments; write all but the gradient) at the rate of a copy measured here. Both are shown one after the
other (`floor`), and the larger alone (`least`).
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATH = Path(__file__).resolve()
LOSSES, PROCESSES, BATCHES, LEARNING_RATE = 30, 5, 4, 1e-4
SIDES = ("hand", "ours")

# The models, and their batches.

_LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_cache": False,
}
_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_cache": False,
}
_GPT2 = {"n_embd": 1024, "n_layer": 24, "n_head": 16, "use_cache": False}
_VIT = {"num_labels": 1000, "problem_type": "single_label_classification"}  # unsaid, the second step compiles anew
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, int]]]] = {
    # name: the class of transformers, what its configuration has beside the defaults, by size samples and their length
    "llama-3.2-1b": ("LlamaForCausalLM", _LLAMA, {"2k": (2, 1024), "16k": (8, 2048)}),
    "qwen2.5-0.5b": ("Qwen2ForCausalLM", _QWEN, {"2k": (2, 1024), "16k": (8, 2048)}),
    "gpt2-medium": ("GPT2LMHeadModel", _GPT2, {"2k": (2, 1024), "16k": (16, 1024)}),
    "bert-base": ("BertForMaskedLM", {}, {"2k": (4, 512), "16k": (32, 512)}),
    "vit-base": ("ViTForImageClassification", _VIT, {"2k": (16, 197), "16k": (128, 197)}),
}
_TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "image_size": 32,
    "num_labels": 8,
}
_GUESSED_GIB = {
    "llama-3.2-1b": (28, 58),
    "qwen2.5-0.5b": (14, 43),
    "gpt2-medium": (10, 29),
    "bert-base": (5, 12),
    "vit-base": (5, 12),
}
"""GiB of a step that no process has measured yet."""
_LARGE_GIB = 60


def make(name: str, size: str, device: str = "cuda", attention: str = "sdpa", tiny: str = "") -> Any:
    """A model and its batches, as a factory of `stepscope run` gives them."""
    kind, configuration, sizes = MODELS[name]
    made = getattr(importlib.import_module("transformers"), kind)
    if tiny:
        usual = vars(made.config_class())
        configuration = {
            **configuration,
            **{key: value for key, value in _TINY.items() if key in usual or key in configuration},
        }
    config = made.config_class(**configuration)
    config._attn_implementation = attention
    with torch.device(device):
        model = made(config).train()
    if "LMHead" in kind:
        model.loss_type = "ForCausalLM"  # what transformers takes it for, with a warning that breaks a compiled graph
    samples, length = sizes[size] if not tiny else (2, 32)
    return model, [_batch(made.__name__, config, samples, length, seed) for seed in range(BATCHES)]


def _batch(kind: str, config: Any, samples: int, length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if kind.startswith("ViT"):
        pictures = torch.randn(samples, 3, config.image_size, config.image_size, generator=generator)
        return {
            "pixel_values": pictures,
            "labels": torch.randint(config.num_labels, (samples,), generator=generator),
        }
    tokens = torch.randint(config.vocab_size, (samples, length), generator=generator)
    if kind.startswith("Bert"):  # 15 % of the tokens are asked for (Devlin et al. 2018)
        asked = torch.rand(samples, length, generator=generator) < 0.15
        return {"input_ids": tokens, "labels": torch.where(asked, tokens, -100)}
    return {"input_ids": tokens, "labels": tokens.clone()}


# The ways of a step.

Way = dict[str, Any]

_WHOLE: Way = {"precision": "masters", "graph": True}
HAND: dict[str, Way] = {
    "autocast, eager": {"precision": "autocast"},
    "autocast, default": {"precision": "autocast", "compile": "default"},
    "masters, default, graph": {"precision": "masters", "compile": "default", "graph": True},
    "masters, reduce-overhead": {"precision": "masters", "compile": "reduce-overhead"},
    "autocast, reduce-overhead": {"precision": "autocast", "compile": "reduce-overhead"},
    "masters, default": {"precision": "masters", "compile": "default"},
    "autocast, default, graph": {"precision": "autocast", "compile": "default", "graph": True},
    "masters, blocks, graph": {"precision": "masters", "compile": "blocks", "graph": True},
    "autocast, blocks": {"precision": "autocast", "compile": "blocks"},
    "masters, eager, graph": {"precision": "masters", "graph": True},
    "masters, liger, default": {"precision": "masters", "compile": "default", "liger": True},
    "masters, liger without its loss, graph": {"precision": "masters", "graph": True, "liger": True},
    "masters, liger without its loss, default, graph": {**_WHOLE, "compile": "default", "liger": True},
    "masters, max-autotune-no-cudagraphs, graph": {**_WHOLE, "compile": "max-autotune-no-cudagraphs"},
    "autocast, max-autotune": {"precision": "autocast", "compile": "max-autotune"},
}
UNMASKED = "unmasked"
"""SDPA without a mask, behind transformers' interface of attention. transformers makes a mask of its own wherever it is
compiled or captured, since the positions could be those of packed documents; with it SDPA takes slower kernels."""
ATTENTIONS = ("flash", "cudnn", "efficient", "flex", "masked")
"""What the fastest way by hand is tried with, too: one kernel of SDPA's, FlexAttention, and transformers' own call of
SDPA. The usual is SDPA's own choice without a mask."""

_MASTERS = {"dtype": "bf16-master", "optimizer": "adamw-one-launch", "graph": "step"}
_ON_CPU: dict[str, Way] = {"bf16, eager": {"dtype": "bf16"}, "bf16, sdpa": {"dtype": "bf16", "attention": "sdpa"}}
_WORDS: dict[str, Way] = {
    "joint": {"projections": "joint"},
    "fused": {"norm": "fused", "mlp": "fused", "loss": "fused"},
    "fused loss": {"loss": "fused"},
    "fused mlp": {"mlp": "fused"},
    "norm": {"norm": "fused"},
    "rope": {"rope": "fused"},
    "default": {"compile": "default"},
    "blocks": {"compile": "blocks"},
    "flash": {"attention": "flash"},
    "sdpa": {"attention": "sdpa"},
    "under backward": {"optimizer": "adamw-under-backward"},
    "graph": {},
}
OURS: dict[str, Way] = {
    name: functools.reduce(lambda way, word: {**way, **_WORDS[word]}, name.split(", "), _MASTERS)
    for name in (
        "flash, joint, fused, graph",
        "flash, joint, fused loss, default, graph",
        "sdpa, joint, fused loss, default, graph",
        "flash, fused loss, default, graph",
        "flash, fused mlp, fused loss, default, graph",
        "flash, joint, default, graph",
        "flash, joint, fused mlp, default, graph",
        "flash, joint, fused, default, graph",
        "flash, joint, fused mlp, fused loss, default, graph",
        "sdpa, joint, fused mlp, fused loss, default, graph",
        "flash, joint, fused mlp, rope, fused loss, default, graph",
        "flash, joint, norm, fused mlp, rope, fused loss, default, graph",
        "flash, joint, norm, fused mlp, fused loss, default, graph",
        "flash, joint, norm, fused mlp, default, graph",
        "flash, norm, fused mlp, fused loss, default, graph",
        "flash, norm, fused mlp, fused loss, blocks, graph",
        "flash, joint, norm, fused mlp, rope, fused loss, blocks, graph",
        "flash, joint, fused, rope, graph",
        "flash, default, graph",
        "sdpa, joint, default, graph",
        "sdpa, default, graph",
        "sdpa, fused loss, default, graph",
        "flash, joint, blocks, graph",
        "default, graph",
        "flash, joint, fused loss, blocks, graph, under backward",
        "sdpa, fused loss, blocks, graph, under backward",
        "sdpa, joint, blocks, graph, under backward",
    )
}
"""Steps that `tune` comes to: what is usually faster, taken together, and what its later rounds change. Updates under
backward go with compiled blocks: backward of a model that is compiled as a whole gives all gradients at its end."""

_BY_HAND = ("masters, default, graph", "autocast, default, graph")
_DECODER = (
    "flash, joint, norm, fused mlp, rope, fused loss, default, graph",
    "flash, joint, norm, fused mlp, rope, fused loss, blocks, graph",
    "flash, joint, fused mlp, rope, fused loss, default, graph",
)
SHORT: dict[str, dict[str, tuple[str, ...]]] = {
    "llama-3.2-1b": {"hand": _BY_HAND, "ours": _DECODER},
    "qwen2.5-0.5b": {"hand": _BY_HAND, "ours": _DECODER},
    # Query, key and value are one product by themselves.
    "gpt2-medium": {
        "hand": _BY_HAND,
        "ours": (
            "flash, norm, fused mlp, fused loss, default, graph",
            "flash, fused mlp, fused loss, default, graph",
            "flash, norm, fused mlp, fused loss, blocks, graph",
        ),
    },
    "bert-base": {
        "hand": _BY_HAND,
        "ours": (
            "flash, joint, norm, fused mlp, fused loss, default, graph",
            "flash, joint, fused mlp, fused loss, default, graph",
        ),
    },
    "vit-base": {
        "hand": _BY_HAND,
        "ours": ("flash, joint, norm, fused mlp, default, graph", "flash, joint, fused mlp, default, graph"),
    },
}
"""By model and side, the ways of a short race, the most hopeful first."""


@dataclass(frozen=True)
class Job:
    """A way of one cell that is to be measured in a process of its own."""

    model: str
    size: str
    side: str
    way: str
    choices: Way
    device: str
    tiny: bool
    group: str = ""
    """Jobs of one group take turns with one another: the finals of a cell. Empty: with whoever is ready."""
    gib: float = 0.0

    @property
    def cell(self) -> str:
        return f"{self.model} {self.size}"


# One way, in a process that was forked with its imports done.


def by_hand(job: Job) -> Callable[[], Any]:
    """The step by hand: what runs one and gives its loss."""
    way, device = job.choices, job.device
    attention = way.get("attention", UNMASKED)
    _choose_backend(attention)
    if way.get("liger"):
        _use_liger(job.model, with_loss=not way.get("graph"))
    importlib.import_module("transformers").AttentionInterface.register(UNMASKED, _unmasked)
    torch.manual_seed(0)
    named = {"flex": "flex_attention", "masked": "sdpa"}.get(attention, UNMASKED)
    model, batches = make(job.model, job.size, device, named, "yes" if job.tiny else "")
    batches = [{name: value.to(device) for name, value in batch.items()} for batch in batches]
    masters = way["precision"] == "masters"
    parameters = list(model.parameters())
    held = [parameter.detach().clone().float() for parameter in parameters] if masters else parameters
    model = model.to(torch.bfloat16) if masters else model
    if masters and "pixel_values" in batches[0]:
        batches = [{**batch, "pixel_values": batch["pixel_values"].bfloat16()} for batch in batches]
    graph = bool(way.get("graph"))
    optimizer = torch.optim.AdamW(held, lr=LEARNING_RATE, fused=True, capturable=graph and device == "cuda")
    forward = _compiled_by_hand(model, way.get("compile", "eager"))

    def step(batch: Mapping[str, Tensor]) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=not masters):
            loss = forward(**batch).loss
        loss.backward()
        if masters:
            _to_masters(parameters, held)
        optimizer.step()
        if masters:
            torch._foreach_copy_([p.detach() for p in parameters], held)  # pyright: ignore[reportPrivateImportUsage]
        model.zero_grad(set_to_none=True)
        return loss.detach()

    if graph:
        return _captured(step, batches)
    turn, replays = iter(_endlessly(batches)), way.get("compile") in ("reduce-overhead", "max-autotune")

    def run() -> Tensor:
        if replays:
            torch.compiler.cudagraph_mark_step_begin()
        return step(next(turn))

    return run


def _unmasked(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _mask: object,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, for batches without padding."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    shared = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling, is_causal=causal, enable_gqa=shared)
    return out.transpose(1, 2).contiguous(), None


def _to_masters(parameters: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    """Cast each gradient to fp32, into the same place in each step."""
    places: list[Tensor] = []
    gradients: list[Tensor] = []
    for parameter, master in zip(parameters, held, strict=True):
        if parameter.grad is not None:
            if master.grad is None:
                master.grad = torch.empty_like(master)
            places.append(master.grad)
            gradients.append(parameter.grad)
    torch._foreach_copy_(places, gradients)  # pyright: ignore[reportPrivateImportUsage]


def _choose_backend(attention: str) -> None:
    """Let SDPA take this backend alone; its usual choice where none is named."""
    names = {"flash": "flash", "cudnn": "cudnn", "efficient": "mem_efficient"}
    if attention not in names:
        return
    for name in ("flash", "mem_efficient", "cudnn", "math"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(name == names[attention])


def _use_liger(model: str, *, with_loss: bool) -> None:
    """Liger's kernels. Its loss asks the device how many labels count (`.item()`), which no CUDA graph can hold."""
    liger: Any = importlib.import_module("liger_kernel.transformers")
    family = {"llama": "llama", "qwen2": "qwen2"}.get(model.partition("-")[0].partition(".")[0])
    if family is None:
        raise ValueError("Liger has no kernels for this model")
    getattr(liger, f"apply_liger_kernel_to_{family}")(fused_linear_cross_entropy=with_loss)


def _compiled_by_hand(model: nn.Module, mode: str) -> Callable[..., Any]:
    if mode == "eager":
        return model
    if mode == "blocks":
        lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
        for block in max(lists, key=len):
            block.compile()
        return model
    return torch.compile(model, mode=None if mode == "default" else mode)


def _endlessly(batches: Sequence[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def _captured(step: Callable[[Any], Tensor], batches: Sequence[Mapping[str, Tensor]]) -> Callable[[], Tensor]:
    """The step as one CUDA graph, after three as they are."""
    place = {name: value.clone() for name, value in batches[0].items()}
    turn, stream = iter(_endlessly(batches)), torch.cuda.Stream()
    graph, state, runs = torch.cuda.CUDAGraph(), dict[str, Tensor](), iter(range(10**9))

    def run() -> Tensor:
        for name, value in next(turn).items():
            place[name].copy_(value, non_blocking=True)
        number = next(runs)
        if number < 3:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss = step(place)
            torch.cuda.current_stream().wait_stream(stream)
            return loss
        if number == 3:
            torch.cuda.empty_cache()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                state["loss"] = step(place)
        graph.replay()
        return state["loss"]

    return run


def by_stepscope(job: Job) -> Callable[[], Any]:
    """The step as `stepscope run` makes it of the same model."""
    from stepscope.core.workloads import FactoryWorkload, UserModel  # noqa: PLC0415  (beside PyTorch alone)
    from stepscope.recording.step import drive  # noqa: PLC0415
    from stepscope.training.making import make_step  # noqa: PLC0415

    arguments = {"name": job.model, "size": job.size, "device": job.device, "tiny": "yes" if job.tiny else ""}
    workload = FactoryWorkload(
        factory=f"{PATH}:make",
        arguments=arguments,
        model=UserModel(name=""),
        **{"optimizer": "adamw-fused", **job.choices},
    )
    torch.set_float32_matmul_precision("highest")
    step, _ = make_step(workload, torch.device(job.device))

    def run() -> Any:
        step.prepare()
        drive(step)
        return step.loss

    return run


def _work(job: Job, pipe: Connection) -> None:
    """Get ready, say so, and run as many steps as are asked for, until none are."""
    os.setsid()
    warnings.simplefilter("ignore")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        began = time.monotonic()
        run = by_hand(job) if job.side == "hand" else by_stepscope(job)
        losses = [float(run())]
        first_s = time.monotonic() - began
        if job.device == "cuda":  # a compiler may have tried kernels out in the first step
            torch.cuda.reset_peak_memory_stats()
        losses += [float(run()) for _ in range(LOSSES - 1)]
        pipe.send({"losses": losses, "ready_s": time.monotonic() - began, "first_s": first_s, **_memory(job.device)})
        while asked := pipe.recv():
            pipe.send(_timed(run, asked, job.device))
    except torch.OutOfMemoryError:
        pipe.send({"fault": "out of memory"})
    except Exception as error:  # whatever a library raises: its row says so, and the others go on
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        pipe.send({"fault": f"{type(error).__name__}: {lines[0][:300]}"})
    finally:
        pipe.close()
        os._exit(0)


def _memory(device: str) -> dict[str, int]:
    if device != "cuda":
        return {}
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}


def _timed(run: Callable[[], Any], seconds: float, device: str) -> list[float]:
    """Seconds from step to step, of steps in a row that nobody waits for in between; the first two are left out."""
    if device != "cuda":
        marks = [time.perf_counter()]
        while len(marks) < 6 or marks[-1] - marks[0] < seconds:
            run()
            marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks[2:])]
    began = time.perf_counter()
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    count = max(5, min(200, math.ceil(seconds / ((time.perf_counter() - began) / 2))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)][2:]


# Many processes: they get ready side by side, and take turns alone.


@dataclass
class _Child:
    job: Job
    process: Any
    pipe: Connection
    began: float
    told: dict[str, Any] = field(default_factory=dict[str, Any])
    ready_at: float | None = None
    times: list[float] = field(default_factory=list[float])

    def end(self) -> None:
        for kill in (lambda: os.killpg(self.process.pid, signal.SIGKILL), self.process.kill):
            try:
                kill()
            except (ProcessLookupError, PermissionError):
                continue
        self.process.join()
        self.pipe.close()


@dataclass
class Room:
    """The processes that are alive, within the memory and the cores of this machine."""

    keep: Callable[[Job, dict[str, Any]], None]
    """Is given each job with what it measured, or its fault."""
    ends: float
    gib: float
    most: int
    each_s: float
    rounds: int = 3
    turn_s: float = 0.25
    alive: list[_Child] = field(default_factory=list[_Child])

    def run(self, jobs: Sequence[Job]) -> None:
        """Measure these, as far as the time goes."""
        waiting = list(jobs)
        try:
            while waiting or self.alive:
                if time.monotonic() > self.ends:
                    return
                self._begin(waiting)
                self._hear(waiting)
                self._turns(waiting)
        finally:
            for child in self.alive:
                child.end()
            self.alive.clear()

    def _begin(self, waiting: list[Job]) -> None:
        """Start those for which there is room, in their order; a group starts whole."""
        while waiting:
            together = [job for job in waiting if job.group and job.group == waiting[0].group] or waiting[:1]
            taken = sum(child.job.gib for child in self.alive)
            needed = sum(job.gib for job in together)
            if self.alive and (taken + needed > self.gib or len(self.alive) + len(together) > self.most):
                return
            context: Any = multiprocessing.get_context("fork")
            for job in together:
                waiting.remove(job)
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(job, theirs))
                process.start()
                theirs.close()
                self.alive.append(_Child(job, process, ours, time.monotonic()))

    def _hear(self, waiting: list[Job]) -> None:
        """Take what those say that get ready; those that failed or took too long have ended."""
        getting = [child for child in self.alive if child.ready_at is None]
        for child in getting:
            fault = ""
            try:
                if child.pipe.poll(0.05 / len(getting)):
                    child.told = child.pipe.recv()
                    child.ready_at = time.monotonic()
                    fault = child.told.get("fault", "")
                elif time.monotonic() - child.began > self.each_s:
                    fault = f"not ready after {self.each_s:.0f} s"
            except EOFError:
                fault = "its process ended without a word"
            if fault:
                self._failed(child, fault, waiting)

    def _failed(self, child: _Child, fault: str, waiting: list[Job]) -> None:
        alone = len(self.alive) == 1 or child.job.gib >= self.gib
        child.end()
        self.alive.remove(child)
        if fault == "out of memory" and not alone and not child.job.group:
            waiting.append(dataclasses.replace(child.job, gib=self.gib))  # once more, without neighbours
        else:
            self.keep(child.job, {"fault": fault})

    def _turns(self, waiting: Sequence[Job]) -> None:
        """Let those that are ready take turns, once they are enough or have waited, while the others stand still."""
        ready = [child for child in self.alive if child.ready_at is not None and self._is_whole(child, waiting)]
        getting = [child for child in self.alive if child.ready_at is None]
        waited = max((time.monotonic() - (child.ready_at or 0.0) for child in ready), default=0.0)
        if not ready or (getting and len(ready) < self.most / 2 and waited < 20):
            return
        stopped_at = time.monotonic()
        for child in getting:
            _signal(child, signal.SIGSTOP)
        time.sleep(0.5)  # what they launched comes to its end
        for _ in range(self.rounds * (2 if ready[0].job.group else 1)):
            for child in ready:
                child.pipe.send(self.turn_s)
                if child.pipe.poll(60):
                    child.times += child.pipe.recv()
        for child in getting:
            _signal(child, signal.SIGCONT)
            child.began += time.monotonic() - stopped_at
        for child in ready:
            child.end()
            self.alive.remove(child)
            self.keep(child.job, {**child.told, "step_s": statistics.median(child.times), "steps": len(child.times)})

    def _is_whole(self, child: _Child, waiting: Sequence[Job]) -> bool:
        """Whether all that take turns with it are ready."""
        group = child.job.group
        return not group or all(each.ready_at is not None for each in self.alive if each.job.group == group)


def _signal(child: _Child, number: int) -> None:
    try:
        os.killpg(child.process.pid, number)
    except (ProcessLookupError, PermissionError):  # it ends, or its group is not made yet
        return


# The machine's two rates, and each cell's floor.


def ceilings(device: str) -> dict[str, float]:
    """FLOP/s of a large product in bf16, and bytes/s of a copy, read and written."""
    size = 8192 if device == "cuda" else 512
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(2**30 if device == "cuda" else 2**22, device=device)
    place = torch.empty_like(source)
    product_s, copy_s = (
        statistics.median(_timed(run, 1.0, device))
        for run in (lambda: torch.matmul(one, other), lambda: place.copy_(source))
    )
    return {"flops_per_s": 2 * size**3 / product_s, "bytes_per_s": 2 * source.nbytes / copy_s}


def work_of(name: str, size: str, *, tiny: bool) -> dict[str, float]:
    """FLOPs of the products of a step, of its attention, and bytes of its AdamW."""
    model, batches = make(name, size, "meta", tiny="yes" if tiny else "")
    config, batch = model.config, batches[0]
    samples, length = batch["input_ids"].shape if "input_ids" in batch else (len(batch["labels"]), 197)
    products = (each for each in model.modules() if isinstance(each, nn.Linear) or type(each).__name__ == "Conv1D")
    weights = sum(each.weight.numel() for each in products)
    causal = 0.5 if "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__ else 1.0
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = heads * config.num_attention_heads
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "tokens": samples * length,
        "product_flops": 6.0 * weights * samples * length,
        "attention_flops": 12.0 * causal * config.num_hidden_layers * samples * length**2 * width,
        "optimizer_bytes": 26.0 * sum(each.numel() for each in model.parameters()),
    }


def floor_of(work: Mapping[str, float], rates: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of products and optimizer one after the other, and of the longer of them."""
    products = (work["product_flops"] + work["attention_flops"]) / rates["flops_per_s"]
    optimizer = work["optimizer_bytes"] / rates["bytes_per_s"]
    return products + optimizer, max(products, optimizer)


# The race: first rounds, finalists, finals.


def first_jobs(
    cell: Mapping[str, Any], plain: Job, only: Sequence[str], *, short: bool = False, later: bool = False
) -> list[Job]:
    """The ways of a cell that the first round has not measured yet; of a short race one of each side by turns. later:
    whether its size comes after the first one, for which one way by hand and two of ours do."""
    lacks_liger = not importlib.util.find_spec("liger_kernel")
    sides: list[list[Job]] = []
    for side, ways in zip(SIDES, (HAND, OURS if plain.device == "cuda" else _ON_CPU), strict=True):
        names = [way for way in SHORT[plain.model][side] if way in ways] if short else [*ways]
        names = names[: 1 + (side == "ours")] if later else names
        jobs = [dataclasses.replace(plain, side=side, way=way, choices=ways[way]) for way in names]
        jobs = [job for job in jobs if not (job.choices.get("liger") and lacks_liger)]
        sides.append([job for job in jobs if job.way not in cell["first"][side] and (not only or job.way in only)])
    if not short:
        return [job for jobs in sides for job in jobs]
    return [job for pair in itertools.zip_longest(*sides) for job in pair if job is not None]


def attention_jobs(cell: Mapping[str, Any], plain: Job) -> list[Job]:
    """The fastest way by hand with each other attention, as far as it was not measured."""
    best = fastest(cell, "hand")
    if best is None or plain.device != "cuda":
        return []
    way = best.partition(" + ")[0]
    names = {f"{way} + {attention}": {**HAND[way], "attention": attention} for attention in ATTENTIONS}
    return [
        dataclasses.replace(plain, side="hand", way=name, choices=choices)
        for name, choices in names.items()
        if name not in cell["first"]["hand"]
    ]


def final_jobs(cell: Mapping[str, Any], plain: Job, gib: float) -> list[Job]:
    """The fastest of each side, in as many processes as are missing; pairs that the memory holds take turns."""
    best = {side: fastest(cell, side) for side in SIDES}
    if None in best.values():
        return []
    needs = {side: cell["first"][side][way].get("reserved_bytes", 0) / 2**30 + 2 for side, way in best.items()}
    pairs = max(1, int(gib / sum(needs.values())))
    jobs: list[Job] = []
    for number in range(len(finals_of(cell)), PROCESSES):
        for side, way in best.items():
            choices = cell["first"][side][way]["choices"]
            group = f"{plain.cell} {number // pairs}"
            jobs.append(
                dataclasses.replace(plain, side=side, way=str(way), choices=choices, group=group, gib=needs[side])
            )
    return jobs


def fastest(cell: Mapping[str, Any], side: str) -> str | None:
    """The way of a side with the shortest step in the first round."""
    times = {way: row["step_s"] for way, row in cell["first"][side].items() if "step_s" in row}
    return min(times, key=lambda way: times[way]) if times else None


def finals_of(cell: Mapping[str, Any]) -> list[tuple[float, float]]:
    """The pairs of processes of the finalists that ran on both sides: seconds of a step."""
    rows: list[list[float]] = []
    for side in SIDES:
        best = fastest(cell, side)
        rows.append([row["step_s"] for row in cell["finals"].get(side, ()) if row["way"] == best and "step_s" in row])
    return list(zip(*rows, strict=False))


def race(asked: argparse.Namespace) -> None:
    """Go on with the race that OUT keeps, as far as the seconds go."""
    document = json.loads(asked.out.read_text()) if asked.out.exists() else {"cells": {}}
    ends = time.monotonic() + asked.seconds

    def keep() -> None:
        partial = asked.out.with_suffix(".part")
        partial.write_text(json.dumps(document, indent=1) + "\n")
        partial.replace(asked.out)

    def note(job: Job, told: dict[str, Any]) -> None:
        cell = document["cells"][job.cell]
        row = {"choices": job.choices, **told}
        if job.group:
            cell["finals"].setdefault(job.side, []).append({"way": job.way, **row})
        else:
            cell["first"][job.side][job.way] = row
        said = told.get("fault") or f"{told['step_s'] * 1e3:.2f} ms, ready after {told['ready_s']:.0f} s"
        print(f"{job.cell}, {job.side}: {job.way}: {said}", flush=True)
        keep()

    _imports(asked.models.split(","))
    print(f"imported after {time.monotonic() - ends + asked.seconds:.0f} s", flush=True)
    if "ceilings" not in document:
        document["ceilings"] = _elsewhere(ceilings, asked.device)
        document |= {"versions": _versions(), "device": _elsewhere(_device_name, asked.device)}
    cells = [(model, size) for size in asked.sizes.split(",") for model in asked.models.split(",")]
    plain: dict[str, Job] = {}
    for model, size in cells:
        gib = _GUESSED_GIB[model][0 if size == "2k" else 1] if asked.device == "cuda" else 0.0
        job = Job(model, size, "", "", {}, asked.device, asked.tiny, gib=gib)
        plain[job.cell] = job
        cell = document["cells"].setdefault(job.cell, {"first": {side: {} for side in SIDES}, "finals": {}})
        cell["work"] = work_of(model, size, tiny=asked.tiny)
    room = functools.partial(Room, note, ends, asked.gib, asked.jobs, asked.each)
    sizes = [[job for job in plain.values() if job.size == size] for size in asked.sizes.split(",")]
    of_size = [[(document["cells"][job.cell], job) for job in jobs] for jobs in sizes]
    if asked.short:  # the compilers of all sizes side by side; what fills the memory waits behind what does not
        first = [
            [first_jobs(cell, each, asked.only, short=True, later=number > 0) for cell, each in cells]
            for number, cells in enumerate(of_size)
        ]
        room().run([job for cells in first for job in sorted(_by_turns(cells), key=lambda job: job.gib > _LARGE_GIB)])
        of_size = [[pair for cells in of_size for pair in cells]]
    for cells in of_size:
        if not asked.short:
            room().run([job for cell, each in cells for job in first_jobs(cell, each, asked.only)])
        if not asked.only and not asked.short:
            room().run([job for cell, each in cells for job in attention_jobs(cell, each)])
        if not asked.first:
            room().run(_by_turns([final_jobs(cell, each, asked.gib) for cell, each in cells]))
    print("\n".join(table(document)))


def _by_turns(cells: Sequence[Sequence[Job]]) -> list[Job]:
    """Jobs of several cells, a pair of each by turns, or a whole group of the finals: when the time ends early, each
    cell has some."""
    pairs: list[list[list[Job]]] = []
    for jobs in cells:
        groups: dict[str, list[Job]] = {}
        for number, job in enumerate(jobs):
            groups.setdefault(job.group or str(number // 2), []).append(job)
        pairs.append(list(groups.values()))
    return [job for turn in itertools.zip_longest(*pairs, fillvalue=[]) for pair in turn for job in pair]


def _imports(models: Sequence[str]) -> None:
    """What the forked processes need, and what touches no GPU."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asked through CUDA, forked children could not use the GPU
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes fill the cores by themselves
    for model in models:
        getattr(importlib.import_module("transformers"), MODELS[model][0])
    for name in (
        "torch._dynamo",
        "torch._inductor.codecache",
        "stepscope.training.making",
        "stepscope.training.user_module.loading",
    ):
        importlib.import_module(name)
    if torch.cuda.is_initialized():
        raise SystemExit("an import opened the GPU, so no process can be forked")


def _elsewhere(ask: Callable[[str], Any], device: str) -> Any:
    """What a function says in a process of its own: this one must not touch the GPU."""
    context: Any = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(ask(device)))
    process.start()
    theirs.close()
    said = ours.recv()
    process.join()
    return said


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _versions() -> dict[str, str]:
    found: dict[str, str] = {"torch": torch.__version__}
    for name in ("transformers", "triton", "liger-kernel"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# What was measured, as text.


def table(document: Mapping[str, Any]) -> list[str]:
    """The race as lines of Markdown."""
    rates = document["ceilings"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        f"{document['device']}, {versions}; products {rates['flops_per_s'] / 1e12:.0f} TFLOP/s, copies "
        f"{rates['bytes_per_s'] / 1e12:.2f} TB/s",
        "",
        "| step | floor, least, ms | by hand, ms | ours, ms | times as fast | of the gap left | GiB by hand, ours "
        "| losses apart | by hand | ours |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    ratios: dict[str, list[float]] = {}
    for name, cell in document["cells"].items():
        line, ratio = _row(name, cell, rates)
        lines.append(line)
        if ratio:
            ratios.setdefault(name.split()[-1], []).append(ratio)
    for size, of_size in ratios.items():
        mean = math.exp(statistics.fmean(map(math.log, of_size)))
        lines.append(
            f"\n{size}: {mean:.3f} times as fast in the geometric mean of {len(of_size)}, "
            f"from {min(of_size):.3f} to {max(of_size):.3f}."
        )
    for name, cell in document["cells"].items():
        for side in SIDES:
            rows = sorted(cell["first"][side].items(), key=lambda each: each[1].get("step_s", math.inf))
            lines += ["", f"{name}, {side}:"]
            lines += [
                f"- {way}: " + (f"{row['step_s'] * 1e3:.2f} ms" if "step_s" in row else row["fault"])
                for way, row in rows
            ]
    return lines


def picture(document: Mapping[str, Any]) -> str:
    """Both sides' steps of each cell that has both, as multiples of its floor, as SVG."""
    from stepscope.core.answer import Answer, Frame, Panel, Point  # noqa: PLC0415  (beside PyTorch alone)
    from stepscope.rendering.picture import draw_svg  # noqa: PLC0415

    points: list[Point] = []
    for name, cell in document["cells"].items():
        best = {side: fastest(cell, side) for side in SIDES}
        if None in best.values():
            continue
        floor, _ = floor_of(cell["work"], document["ceilings"])
        times = [statistics.median(side) for side in zip(*finals_of(cell), strict=True)]
        times = times or [cell["first"][side][best[side]]["step_s"] for side in SIDES]
        points += [
            Point(line=line, name=name, y=time / floor)
            for line, time in zip(("by hand", "stepscope"), times, strict=True)
        ]
    note = "Floor: products at a large one's rate and AdamW's bytes, one after the other."
    panel = Panel(x_title="", y_title="step / floor", points=tuple(points), kind="bars", frame=Frame(note=note))
    return draw_svg(
        Answer(
            study="own step",
            question="Whose step of a model that people train is faster?",
            device=document["device"],
            versions=document["versions"],
            panels=(panel,),
        )
    )


def _row(name: str, cell: Mapping[str, Any], rates: Mapping[str, float]) -> tuple[str, float | None]:
    from stepscope.core.units import counted  # noqa: PLC0415  (beside PyTorch alone)

    floor, least = floor_of(cell["work"], rates)
    best = {side: fastest(cell, side) for side in SIDES}
    finals = finals_of(cell)
    first = {side: cell["first"][side][way]["step_s"] for side, way in best.items() if way}
    times = [statistics.median(side) for side in zip(*finals, strict=True)] or [first.get(side) for side in SIDES]
    said = [f"{value * 1e3:.2f}" if value else "" for value in times]
    heads = f"| {name} | {floor * 1e3:.2f}, {least * 1e3:.2f} | {said[0]} | {said[1]} "
    if None in times:
        return f"{heads}| | | | | {best['hand']} | {best['ours']} |", None
    hand, ours = cell["first"]["hand"][best["hand"]], cell["first"]["ours"][best["ours"]]
    ratio = times[0] / times[1]
    gap = (times[1] - floor) / (times[0] - floor)
    apart = statistics.fmean(abs(one / other - 1) for one, other in zip(hand["losses"], ours["losses"], strict=True))
    memory = ", ".join(f"{_peak_of(cell, side, str(best[side])) / 2**30:.2f}" for side in SIDES)
    processes = f"{counted(len(finals), 'process')} a side" if finals else "first round"
    return (
        f"{heads}| {ratio:.3f} ({processes}) | {100 * gap:.0f} % | {memory} | {100 * apart:.2f} % | {best['hand']} "
        f"| {best['ours']} |",
        ratio,
    )


def _peak_of(cell: Mapping[str, Any], side: str, way: str) -> int:
    """The most memory of a way in bytes: of the processes of the finals, if there are any."""
    rows = [row for row in cell["finals"].get(side, ()) if row["way"] == way and "peak_bytes" in row]
    return max(row.get("peak_bytes", 0) for row in rows or [cell["first"][side][way]])


def main() -> None:
    """Race, or show what was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the document that is written, or gone on with")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--sizes", default="2k,16k")
    parser.add_argument(
        "--only", nargs="+", default=[], help="these ways alone, by their names, and no other attention by hand"
    )
    parser.add_argument(
        "--seconds", type=float, default=570.0, help="after these it stops, and goes on when called again"
    )
    parser.add_argument("--short", action="store_true", help="few ways a side in the first round, then the finals")
    parser.add_argument("--each", type=float, default=200.0, help="seconds in which a way must be ready")
    parser.add_argument("--jobs", type=int, default=14, help="how many processes get ready side by side")
    parser.add_argument("--gib", type=float, default=126.0, help="the memory that they share")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small models of the same classes")
    parser.add_argument("--first", action="store_true", help="the first round alone")
    parser.add_argument("--show", action="store_true", help="print what was kept")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw what was kept")
    asked = parser.parse_args()
    if asked.plot:
        asked.plot.write_text(picture(json.loads(asked.out.read_text())))
        return
    if asked.show:
        print("\n".join(table(json.loads(asked.out.read_text()))))
        return
    race(asked)


if __name__ == "__main__":
    main()
