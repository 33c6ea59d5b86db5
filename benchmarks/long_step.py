"""How fast is a step of a long context by the usual libraries? Hugging Face's Llama, Liger's kernels, PyTorch's FSDP2.

    torchrun --standalone --nproc-per-node 2 benchmarks/long_step.py --steps 4 --warmup 2 --out FILE
    python benchmarks/long_step.py --show FILE... RUN...    # a table of what was kept, beside stepscope's runs

A rival of our own step on several ranks, with the sizes of the preset 8B unless options say otherwise. Weights are
random and nothing is downloaded. The model is made on the meta device; each decoder layer, checkpointed, is a unit of
`fully_shard`, and the root is the last. Masters, gradients and AdamW's moments are fp32 shards; products are bf16.
Attention is SDPA by cuDNN, or by the next backend that takes the shape, and FILE says which and why.

`--ours CHECKPOINTING` measures stepscope's step in the rival's place: from the same weights, over the same batches, by
the same update, so that the losses of both stand beside one another.

A step is timed as those of stepscope are: after a barrier that is not timed, with the device synchronised before and
after, from the earliest start to the latest end over the ranks, which must share a host and so a clock. Model FLOPs
are those of `stepscope.core.formulas`: causal attention is half of the square, and nothing that runs again counts.

FILE is written whole after each step, so that a time limit loses no step. What fails is in it as "fault".
"""

import argparse
import json
import os
import statistics
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stepscope.core.environment import place_in_job
from stepscope.core.errors import InputError
from stepscope.core.evidence import steps_together
from stepscope.core.formulas.transformer import parameter_count, step_flops
from stepscope.core.model_config import ModelConfig, configure
from stepscope.core.parts import PARTS
from stepscope.core.run import Run
from stepscope.core.run_directory import find_run_files, load_run, write_atomically
from stepscope.core.workloads import TextbookWorkload, by_sizes

KIND = "long-step"
LEARNING_RATE, SPREAD, SEED = 1e-4, 0.02, 1234
_TORCH_NAMES = {"bf16": "bfloat16", "fp32": "float32"}
"""By --dtype, PyTorch's name for what products are computed in."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as one of the ranks, or show what was kept; returns the exit code."""
    base = configure("8B")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=4, help="steps that are measured")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--layers", type=int, default=base.layers)
    parser.add_argument("--d-model", type=int, default=base.d_model)
    parser.add_argument("--d-ff", type=int, default=base.d_ff)
    parser.add_argument("--heads", type=int, default=base.heads)
    parser.add_argument("--vocabulary", type=int, default=base.vocabulary)
    parser.add_argument("--seq-len", type=int, default=32_768)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences of all ranks together")
    parser.add_argument("--dtype", choices=list(_TORCH_NAMES), default="bf16", help="of products; masters are fp32")
    parser.add_argument("--attention", choices=("cudnn", "flash", "default"), help="SDPA's backend")
    parser.add_argument("--no-liger", action="store_true", help="the model as Hugging Face has it")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--ours", metavar="CHECKPOINTING", help="stepscope's step with this --checkpointing")
    parser.add_argument("--losses", type=int, default=20, help="losses that are kept, from the first step on")
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="show files or runs kept before")
    asked = parser.parse_args(arguments)
    if asked.show:
        sys.stdout.write(rendered([row for path in asked.show for row in rows_of(path)]))
        return 0
    if asked.out is None or "RANK" not in os.environ:
        parser.error("a measurement needs --out FILE, and torchrun to start its ranks")
    if asked.steps < 1 or asked.warmup < 0:
        parser.error("--steps must be at least 1, --warmup at least 0")
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        parser.error("the ranks must share a host: hosts have clocks of their own")
    try:
        _measure(asked)
    except Exception as error:
        traceback.print_exc()
        _note_fault(asked.out, error)
        return 1
    return 0


def workload_of(asked: argparse.Namespace) -> TextbookWorkload:
    """What is measured, in stepscope's words, for its count of FLOPs."""
    model = configure(
        "8B", layers=asked.layers, d_model=asked.d_model, d_ff=asked.d_ff, heads=asked.heads,
        vocabulary=asked.vocabulary,
    )  # fmt: skip
    return TextbookWorkload(
        model=model, batch_size=asked.batch_size, seq_len=asked.seq_len, dtype=asked.dtype, optimizer="adamw-fused"
    )


def _measure(asked: argparse.Namespace) -> None:
    """Take part in all steps; the first rank writes what was measured."""
    # A process that measures, and no other, imports PyTorch.
    import torch  # noqa: PLC0415

    from stepscope.training.making import join  # noqa: PLC0415

    rank, count, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if rank == 0:
        asked.out.unlink(missing_ok=True)  # no fault of an earlier measurement may stand for one of this
    workload = workload_of(asked)
    if asked.batch_size % count:
        raise InputError(f"{count} ranks cannot share {asked.batch_size} sequences evenly")
    on_gpu = torch.cuda.is_available() if asked.device == "auto" else asked.device == "cuda"
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    ranks = join(place_in_job(os.environ), device)

    side = _ours(asked, workload, device, ranks) if asked.ours else _rival(asked, workload, device)
    _fill(side.parameters, device)
    generator = torch.Generator().manual_seed(SEED + 1 + rank)
    names = ranks.gathered(torch.cuda.get_device_name(device) if on_gpu else "cpu")
    result: dict[str, Any] = {
        "kind": KIND, "status": "unfinished", "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": {
            **workload.model.sizes, "batch_size": asked.batch_size, "seq_len": asked.seq_len, "dtype": asked.dtype,
            "steps": asked.steps, "warmup": asked.warmup, **side.settings,
            "optimizer": "AdamW, fused, fp32 masters and moments", "backend": ranks.backend,
            "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        },
        "ranks": count, "devices": names, "versions": _versions(), "parameters": parameter_count(workload.model),
        "model_flops": step_flops(workload), "tokens": workload.tokens,
    }  # fmt: skip
    if rank == 0:
        _write(asked.out, result)
    spans: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    losses: list[float] = []
    for step in range(asked.warmup + asked.steps):
        if step == asked.warmup and on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        shape = (asked.batch_size // count, asked.seq_len)
        tokens, labels = (
            torch.randint(workload.model.vocabulary, shape, generator=generator).to(device) for _ in range(2)
        )
        begin, end, loss = _step(side.take(tokens, labels), ranks, device)
        peak = (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)) if on_gpu else None
        of_ranks = ranks.gathered((begin, end, loss, peak))
        for own, (begin, end, *_) in zip(spans, of_ranks, strict=True):
            own.append((begin, end))
        losses.append(statistics.fmean(each[2] for each in of_ranks))
        seconds = steps_together(spans, one_clock=True)
        result |= _figures(seconds[: asked.warmup], seconds[asked.warmup :], result["model_flops"] / count)
        result |= {
            "losses": losses[: asked.losses],
            "peak_bytes": [each[3][0] for each in of_ranks] if on_gpu else None,
            "reserved_bytes": [each[3][1] for each in of_ranks] if on_gpu else None,
            "status": "done" if step + 1 == asked.warmup + asked.steps else "unfinished",
        }
        if rank == 0:
            _write(asked.out, result)
            sys.stderr.write(f"step {step + 1}: {seconds[-1]:.3f} s, loss {losses[-1]:.4f}\n")
    ranks.barrier()
    ranks.part()


def _figures(warmup: Sequence[float], samples: Sequence[float], flops_a_rank: float) -> dict[str, Any]:
    """The statistics of the steps until now; those that are measured give the median, and warm-ups none."""
    median = statistics.median(samples) if samples else None
    return {
        "warmup_s": list(warmup), "samples_s": list(samples), "median_s": median,
        "tflops_a_gpu": flops_a_rank / median / 1e12 if median else None,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Side:
    """A step that is measured."""

    parameters: Mapping[str, Any]
    """This rank's shards, by the names that Hugging Face's Llama has for them."""
    take: Callable[[Any, Any], Callable[[], Any]]
    """Takes tokens and labels, (B, S) each, and gives a function that runs forward, backward and update on them and
    returns the loss."""
    settings: Mapping[str, Any]


def _rival(asked: argparse.Namespace, workload: TextbookWorkload, device: Any) -> _Side:
    import torch  # noqa: PLC0415

    backend, refused = _choose_attention(asked, workload, device)
    attention = _attention(backend)
    model = _model(workload, asked, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def take(tokens: Any, labels: Any) -> Callable[[], Any]:
        def update() -> Any:
            # Backward computes each layer's attention again, so that the choice of its kernel must still hold then.
            with attention():
                loss = _loss(model, tokens, labels)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        return update

    return _Side(
        parameters={name.replace("_checkpoint_wrapped_module.", ""): each for name, each in model.named_parameters()},
        take=take,
        settings={
            "liger": not asked.no_liger, "attention": backend, "attention_refused": refused,
            "sharding": "fully_shard of each layer and the root", "checkpointing": "every layer",
        },
    )  # fmt: skip


def _ours(asked: argparse.Namespace, workload: TextbookWorkload, device: Any, ranks: Any) -> _Side:
    """stepscope's step of the same sizes, with the parts of its own that this device has."""
    from stepscope.engine.stages import make_step  # noqa: PLC0415
    from stepscope.training.training_step import TrainingStep  # noqa: PLC0415

    on_gpu = device.type == "cuda"
    chosen = msgspec.structs.replace(
        workload, attention="flash" if on_gpu else "sdpa", checkpointing=asked.ours, ranks=ranks.ranks,
        parallel="fsdp2:compute=bf16" if asked.dtype == "bf16" else "fsdp2",
        **dict.fromkeys(PARTS, "fused" if on_gpu else "reference"),
    )  # fmt: skip
    step, _ = make_step(chosen, device, None, ranks)
    assert isinstance(step, TrainingStep)

    def take(tokens: Any, labels: Any) -> Callable[[], Any]:
        step.batches = [(tokens, labels)]
        step.prepare()

        def update() -> Any:
            for phase in step.phases:
                phase.run()
            return step.loss

        return update

    return _Side(
        parameters={_name_of_rival(name): each for name, each in step.model.named_parameters()}, take=take,
        settings={
            "stepscope": " ".join(chosen.words("batch_size", "seq_len")), "attention": chosen.attention,
            "sharding": chosen.parallel, "checkpointing": chosen.checkpointing,
        },
    )  # fmt: skip


_NAMES_OF_RIVAL = {
    "embedding.": "model.embed_tokens.", "blocks.": "model.layers.", "norm.": "model.norm.", "head.": "lm_head.",
    ".attention_norm.": ".input_layernorm.", ".feed_forward_norm.": ".post_attention_layernorm.",
    ".attention.query.": ".self_attn.q_proj.", ".attention.key.": ".self_attn.k_proj.",
    ".attention.value.": ".self_attn.v_proj.", ".attention.output.": ".self_attn.o_proj.",
    ".feed_forward.gate.": ".mlp.gate_proj.", ".feed_forward.up.": ".mlp.up_proj.",
    ".feed_forward.down.": ".mlp.down_proj.",
}  # fmt: skip
"""By how the textbook's model names a parameter, or a part of a block's, what Hugging Face's Llama has for it."""


def _name_of_rival(name: str) -> str:
    for ours, theirs in _NAMES_OF_RIVAL.items():
        if name.startswith(ours) or (ours.startswith(".") and ours in name):
            name = name.replace(ours, theirs, 1)
    return name


def _fill(parameters: Mapping[str, Any], device: Any) -> None:
    """Give each shard values that its name and its rank decide, whatever model it is of."""
    import torch  # noqa: PLC0415
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    with torch.no_grad():
        for name, parameter in parameters.items():
            assert isinstance(parameter, DTensor)
            shard = parameter.to_local()
            if parameter.ndim == 1:
                shard.fill_(1.0)
            else:
                seed = SEED + 1000 * int(os.environ["RANK"]) + zlib.crc32(name.encode())
                shard.normal_(0.0, SPREAD, generator=torch.Generator(device=device).manual_seed(seed))


def _step(update: Callable[[], Any], ranks: Any, device: Any) -> tuple[int, int, float]:
    """One whole step: when it began and ended by this host's clock, and this rank's loss."""
    import torch  # noqa: PLC0415

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    synchronize()
    ranks.barrier()
    begin = time.perf_counter_ns()
    loss = update()
    synchronize()
    end = time.perf_counter_ns()
    return begin, end, float(loss.detach())


def _loss(model: Any, tokens: Any, labels: Any) -> Any:
    # Without a cache and a mask, SDPA is told is_causal, and no mask of S x S is made.
    # Labels are those of each position, as they stand: both sides have as many.
    return model(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss


def _attention(backend: str) -> Callable[[], AbstractContextManager[Any]]:
    """A context in which SDPA has this backend alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415

    chosen = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}.get(backend)
    return nullcontext if chosen is None else lambda: sdpa_kernel(chosen)


def _choose_attention(asked: argparse.Namespace, workload: TextbookWorkload, device: Any) -> tuple[str, dict[str, str]]:
    """SDPA's backend as asked for; else the first that takes attention of this shape, and why those before did not."""
    import torch.distributed as dist  # noqa: PLC0415

    if asked.attention or device.type != "cuda":
        return asked.attention or "default", {}
    refused: dict[str, str] = {}
    for backend in ("cudnn", "flash"):
        reasons: list[Any] = [None] * dist.get_world_size()
        batch = asked.batch_size // len(reasons)
        dist.all_gather_object(reasons, _why_not(_attention(backend), workload, batch, device))
        reason = next((each for each in reasons if each), None)
        if reason is None:
            return backend, refused
        refused[backend] = reason
    return "default", refused


def _why_not(
    attention: Callable[[], AbstractContextManager[Any]], workload: TextbookWorkload, batch: int, device: Any
) -> str | None:
    """Why SDPA cannot compute attention of this shape, forward and backward, in this context; None if it can."""
    import torch  # noqa: PLC0415
    import torch.nn.functional as F  # noqa: PLC0415

    model = workload.model
    shape = (batch, workload.seq_len, model.heads, model.head_dim)
    kind = getattr(torch, _TORCH_NAMES[workload.dtype])
    # Heads stand behind tokens in memory, as projections leave them.
    query, key, value = (
        torch.randn(shape, device=device, dtype=kind).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    try:
        with attention():
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).contiguous()
            output.backward(torch.ones_like(output))
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    return None


def _model(workload: TextbookWorkload, asked: argparse.Namespace, device: Any) -> Any:
    """Hugging Face's Llama of these sizes, checkpointed, sharded over all ranks, with random weights."""
    import torch  # noqa: PLC0415
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415
    from transformers.models.llama import modeling_llama  # noqa: PLC0415
    from transformers.models.llama.configuration_llama import LlamaConfig  # noqa: PLC0415

    if not asked.no_liger:
        # Before the model is made, since it replaces the classes of which that is made.
        from liger_kernel.transformers import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
            apply_liger_kernel_to_llama,
        )

        apply_liger_kernel_to_llama(
            rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=True
        )
    config = _llama_config(LlamaConfig, workload.model, workload.seq_len)
    with torch.device("meta"):
        model = modeling_llama.LlamaForCausalLM(config)
    model.train()
    if sum(parameter.numel() for parameter in model.parameters()) != parameter_count(workload.model):
        raise InputError("this Llama has not the parameters of stepscope's model of the same sizes")
    # Said, since PyTorch would take the GPU that a machine has, where the ranks are on its CPU.
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, _TORCH_NAMES[asked.dtype]), reduce_dtype=torch.float32
        ),
    }
    layers = model.model.layers
    for number, layer in enumerate(layers):
        # Not by Hugging Face's own option, which in some versions has FSDP's hooks inside what runs again. Nothing in
        # the layer draws at random, so no state of a generator has to be kept.
        layers[number] = checkpoint_wrapper(layer, preserve_rng_state=False)
        fully_shard(layers[number], **options)
    # Liger reads the head's weight without calling the head, so the head must be of the root, which is gathered then.
    fully_shard(model, **options, reshard_after_forward=False)
    model.to_empty(device=device)
    with torch.no_grad():
        # The meta device gives buffers no values, and no checkpoint holds them: they are computed here.
        rotary = model.model.rotary_emb
        computed = dict(modeling_llama.LlamaRotaryEmbedding(config).named_buffers())
        held = dict(rotary.named_buffers())
        if held.keys() != computed.keys() or len(held) != len(list(model.buffers())):
            raise InputError("this Llama has buffers that nothing here fills")
        for name, buffer in held.items():
            buffer.copy_(computed[name])
    return model


def _llama_config(kind: Any, sizes: ModelConfig, seq_len: int) -> Any:
    from stepscope.training.transformer import NORM_EPSILON  # noqa: PLC0415

    config = kind(
        vocab_size=sizes.vocabulary, hidden_size=sizes.d_model, intermediate_size=sizes.d_ff,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.key_heads,
        head_dim=sizes.head_dim, rms_norm_eps=NORM_EPSILON, max_position_embeddings=seq_len,
        attention_bias=False, mlp_bias=False, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return config


def _versions() -> dict[str, str | None]:
    """What is installed, and None of what is not."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    import torch  # noqa: PLC0415

    found: dict[str, str | None] = {
        "python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if torch.cuda.is_available() else None,
    }  # fmt: skip
    for name in ("triton", "transformers", "liger-kernel"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _write(out: Path, result: Mapping[str, Any]) -> None:
    write_atomically(json.dumps(result, indent=1).encode() + b"\n", out)


def _note_fault(out: Path, error: Exception) -> None:
    """Add the fault to what the file holds; the first stays, since those of other ranks may follow from it."""
    try:
        result = json.loads(out.read_text())
    except (OSError, ValueError):
        result = {"kind": KIND}
    if "fault" not in result:
        said = (str(error).strip() or "nothing said").splitlines()[0][:500]
        fault = f"rank {os.environ['RANK']}: {type(error).__name__}: {said}"
        _write(out, result | {"status": "failed", "fault": fault})


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a table that a file of this benchmark has, or a run of stepscope, or a directory of runs."""
    if path.is_file():
        document = json.loads(path.read_text())
        if document.get("kind") == KIND:
            return [_row_of_rival(path, document)]
    return [_row_of_run(load_run(file)) for file in find_run_files(path)]


def _row_of_rival(path: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    settings = document.get("settings", {})
    return {
        "step": _described(settings) or path.name,
        "devices": document.get("devices", []),
        "shape": f"{settings['batch_size']} x {settings['seq_len']}" if settings else "",
        "samples_s": document.get("samples_s", []),
        "tflops": document.get("tflops_a_gpu"),
        "peaks": document.get("peak_bytes") or [],
        "fault": document.get("fault") or ("no step was measured" if not document.get("samples_s") else None),
    }


def _described(settings: Mapping[str, Any]) -> str:
    if "stepscope" in settings:
        return f"stepscope, {settings['stepscope']}"
    kernels = "Liger" if settings.get("liger") else "no Liger"
    return f"Hugging Face Llama, {kernels}, SDPA {settings['attention']}, FSDP2" if settings else ""


def _row_of_run(run: Run) -> dict[str, Any]:
    workload, step = run.workload, run.samples.get("step")
    flops = by_sizes(workload, step_flops)
    median = step.median_s if step else None
    of_ranks = run.shared.ranks if run.shared else ()
    memories = [figures.memory for figures in of_ranks] if of_ranks else [run.evidence.memory]
    ranks = workload.ranks
    devices = [figures.device_name for figures in of_ranks]
    return {
        "step": "stepscope, " + " ".join(workload.words("batch_size", "seq_len")),
        "devices": devices or ([run.environment.device_name] if run.environment else []),
        "shape": f"{workload.batch_size} x {workload.seq_len}" if flops else "",
        "samples_s": list(step.values_s) if step else [],
        "tflops": flops / ranks / median / 1e12 if flops and median else None,
        "peaks": [memory.allocated_peak for memory in memories if memory and memory.allocated_peak],
        "fault": run.failure.message if run.failure else (None if median else f"its run is {run.status}"),
    }


def rendered(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of what was measured, in Markdown."""
    text = ["| step | devices | batch x sequence | steps | median, s | least to most, s | model TFLOP/s a GPU | "
            "peak a rank, GiB |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        kinds = list(dict.fromkeys(row["devices"]))
        devices = ", ".join(f"{row['devices'].count(kind)} x {kind}" for kind in kinds)
        samples = row["samples_s"]
        figures = ["", "", "", "", ""]
        if samples:
            figures = [
                str(len(samples)), f"{statistics.median(samples):.3f}", f"{min(samples):.3f} to {max(samples):.3f}",
                f"{row['tflops']:.1f}" if row["tflops"] else "",
                ", ".join(f"{peak / 2**30:.2f}" for peak in row["peaks"]),
            ]  # fmt: skip
        name = row["step"] + (f" ({row['fault']})" if row["fault"] else "")
        text.append(f"| {name} | {devices} | {row['shape']} | " + " | ".join(figures) + " |")
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    code = main()
    if code:
        # Other ranks may wait in a collective for this one, and so would the end of its process group.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
