"""One training step of the transformer as a sequence of phases: forward with loss, backward, optimizer.

With accumulation, forward and backward take turns, once for each micro-batch, before the one optimizer phase.

A step is assembled of parts (a model, batches, a loss) and choices (dtype, compilation, accumulation). The textbook's
parts are made here, a user's module's in `training/user_module/`. What is timed is what was chosen, by construction:
the forward phase calls `forward_module`, and that is the compiled module whenever the choices ask for compilation.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stepscope.core.attention_support import triton_fault
from stepscope.core.errors import InputError, StepscopeError, named_line, warn
from stepscope.core.parts import ATTENTIONS, compiles, is_users
from stepscope.core.precisions import PRECISIONS, Dtype
from stepscope.core.range_names import BACKWARD, FORWARD, FORWARD_BACKWARD, GRADIENT_SYNC, OPTIMIZER
from stepscope.core.strategies import computes_in_16_bits
from stepscope.core.workloads import GRAPH_WARMUP, OF_LIBRARIES, OF_ONE_LAUNCH, TextbookWorkload, Workload
from stepscope.recording.device import is_out_of_memory
from stepscope.recording.step import Phase
from stepscope.recording.timer import Peers
from stepscope.training.attention import attention_for, chosen_attention
from stepscope.training.optimizer import NormOf, Updating, clip_gradients, global_norm, updated_by
from stepscope.training.parts import parts_for
from stepscope.training.transformer import BlockRunner, Transformer, keep_all

# A whole step captured into CUDA graphs, one for each phase, and replayed: the host then launches each phase at once.
#
#     three steps run as they are (allocations, tables of optimizers, what compilers make)   eager
#     one step is captured, phase by phase, into one pool of memory                          captured, then replayed
#     every later step replays the phases in their order                                     replayed
#
# The phases stay phases, so a step is timed as any other. Between them nothing runs on the host but the replay itself.
# What a graph reads must stay where it was: the batch is copied into one place, and the optimizer counts its updates on
# the device. PyTorch moves the states of its random generators with each replay.


class StepGraphs:
    """The phases of a step, of which each is run as it is at first, then captured, then replayed."""

    def __init__(self, phases: Sequence[Phase], batch: Any, device: torch.device) -> None:
        """batch: the first one, whose shapes the others have."""
        self._device = device
        self._place = pytree.tree_map_only(Tensor, torch.clone, batch)
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._graphs: list[torch.cuda.CUDAGraph | None] = [None] * len(phases)
        self._runs = [0] * len(phases)
        self.phases = tuple(
            Phase(name=phase.name, run=functools.partial(self._run, i, phase)) for i, phase in enumerate(phases)
        )

    @property
    def captured(self) -> bool:
        """Whether every phase is."""
        return all(graph is not None for graph in self._graphs)

    def take(self, batch: Any) -> Any:
        """Copy a batch to the place that the graphs read, and give that place. Raises InputError for other shapes."""
        for value, place in zip(pytree.tree_leaves(batch), pytree.tree_leaves(self._place), strict=True):
            if isinstance(place, Tensor):
                if value.shape != place.shape:
                    raise InputError(
                        f"--graph step replays one shape, and a batch has {tuple(value.shape)} where the first had "
                        f"{tuple(place.shape)}: leave it out"
                    )
                place.copy_(value, non_blocking=True)
        return self._place

    def _run(self, i: int, phase: Phase) -> None:
        """Replay a phase; run it on the stream that will be captured, or capture it, where that is not done."""
        graph = self._graphs[i]
        if graph is not None:
            graph.replay()
            return
        self._runs[i] += 1
        current = torch.cuda.current_stream(self._device)
        if self._runs[i] < GRAPH_WARMUP:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                phase.run()
            current.wait_stream(self._stream)
            return
        if i == 0:
            # What the eager steps leave in the allocator's cache is not the pool's to take.
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, as a compiler's or a sampler's, may go on with what a capture forbids.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                phase.run()
        except StepscopeError:
            raise
        except Exception as error:  # whatever a step does that a graph cannot hold
            if is_out_of_memory(error):
                raise
            raise InputError(
                f"{phase.name} cannot be captured into a CUDA graph: {named_line(error)}; leave out --graph step"
            ) from error
        self._pool = graph.pool()
        self._graphs[i] = graph
        graph.replay()


DISTINCT_BATCHES = 4
"""Batches of random tokens that the steps rotate through, so that no step repeats the one before."""

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that capture the step into CUDA graphs and replay them."""

AUTOCAST_DTYPE: dict[Dtype, torch.dtype] = {
    name: torch.bfloat16 if precision.tensors == "bf16" else torch.float16
    for name, precision in PRECISIONS.items()
    if precision.autocast
}


class ForwardLoss(nn.Module):
    """The model and its mean cross-entropy on the next token: all that `forward` means in a training step."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        if self.model.fused_loss is not None:
            return self.model(tokens_BS, targets_BS)
        logits_BSV = self.model(tokens_BS)
        return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())


Batch = tuple[Any, ...]
"""The batch of one step: the arguments of a step's forward, tensors nested however."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """What a step is assembled of, on its device and in its dtype."""

    model: nn.Module
    """The model itself, for its parameters and buffers."""
    forward: nn.Module
    """What the forward phase calls with a batch: the model and its loss; in inference the model alone."""
    forward_inputs: int | None = None
    """How many of a batch's items `forward` takes; None for all."""
    batches: Sequence[Batch]
    named_tensors: Callable[[Batch], list[tuple[str, Tensor]]]
    """The tensors of a batch with their names. The first is what the model reads."""
    split: Callable[[Batch, int], Sequence[Batch]]
    """A batch as so many micro-batches."""
    blocks: Sequence[nn.Module] = ()
    compiles_parts: bool = False
    optimizer: torch.optim.Optimizer | None = None
    """An optimizer that came with the model, and is taken instead of the one chosen."""
    masters: Mapping[Tensor, Tensor] = field(default_factory=dict[Tensor, Tensor])
    """The first values in fp32 of weights that were made bf16 (training/optimizer.py)."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The parts of a step that other processes take part in, as this one runs it."""

    parts: StepParts
    finish: Callable[[], None] | None
    """What it does between the last backward and the optimizer's step; None where that is nothing."""
    local: Callable[[], AbstractContextManager[object]]
    """A context for the backward of all but the last micro-batch."""
    run: Callable[[Batch], Tensor | None] | None = None
    """Runs forward and backward of the whole batch, which take turns; None where they are phases of their own."""
    norm_of: NormOf = global_norm
    """Finds the gradients' norm over all processes."""


Share = Callable[[StepParts, Workload], Shared]
"""Makes of a whole step's parts those of this process."""


class Ranks(Peers):
    """One rank among those that share a step, of which rank 0 writes the run. Outside a job it waits for nobody."""

    rank, ranks, local_rank = 0, 1, 0
    backend = ""
    threads: int | None = None
    """The CPU threads of each rank, where the ranks compute on CPUs."""
    start_s: float | None = None
    """From the start of the ranks' processes until all had met; None where somebody else started them."""
    started_here = True

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks, on every rank."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        return value

    def part(self) -> None:
        """Leave the job."""


class AssembledStep:
    """A step made of parts and choices: the model, compiled or not, the optimizer, and the phases of one step."""

    def __init__(self, parts: StepParts, choices: Workload, device: torch.device, share: Share | None = None) -> None:
        """share: spreads the parts over several processes, of which this is one."""
        shared = share(parts, choices) if share is not None else None
        if shared is not None:
            parts = shared.parts
        self._local = shared.local if shared is not None else contextlib.nullcontext
        self.workload, self.device = choices, device
        self._named_tensors, self._split, self._forward_inputs = parts.named_tensors, parts.split, parts.forward_inputs
        self.model, self.blocks = parts.model, parts.blocks
        self.compiled = choices.compile != "eager"
        self.compiles_parts = not self.compiled and parts.compiles_parts
        self.cuda_graphs = choices.graph == "step" or (device.type == "cuda" and choices.compile in CUDA_GRAPH_MODES)
        self.inference = choices.phase == "forward"
        self.forward_module: nn.Module = _compiled(parts, choices.compile) if self.compiled else parts.forward
        self.optimizer = None
        if choices.phase == "train":
            trained = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
            chosen = parts.optimizer or optimizer_for(trained, choices, parts.masters, max_norm=choices.clip)
            self.optimizer = chosen
        self._max_norm = choices.clip if self.optimizer is not None else None
        self._norm_of = shared.norm_of if shared is not None else global_norm
        # An optimizer that begins under backward leaves the gradients of early micro-batches alone.
        self._local = getattr(self.optimizer, "waiting", self._local)
        finish = shared.finish if shared is not None else None
        self._finish = finish if finish is not None and choices.graph == "step" else lambda: None
        self.scaler = torch.amp.GradScaler(device.type, enabled=choices.dtype == "fp16")
        self.batches: Sequence[Batch] = parts.batches
        self.loss: Tensor | None = None
        """The mean loss of the last micro-batch that ran forward."""
        self._losses: dict[int, Tensor] | None = None
        """By micro-batch, its loss in the last step; None where nobody asked for it, since they take memory."""
        self._gradient_norm: Tensor | None = None
        self._next_batch = 0
        self._graphs: StepGraphs | None = None
        self._take(self.batches[0])
        forward = self._infer if self.inference else self._forward
        self.phases: tuple[Phase, ...] = ()
        if shared is not None and shared.run is not None:
            self.phases = (Phase(name=FORWARD_BACKWARD, run=functools.partial(self._by_schedule, shared.run)),)
        for micro in range(choices.accumulation if not self.phases else 0):
            self.phases += (Phase(name=FORWARD, run=functools.partial(forward, micro)),)
            if not self.inference:
                last = micro == choices.accumulation - 1
                self.phases += (Phase(name=BACKWARD, run=functools.partial(self._backward_of, last=last)),)
        if finish is not None and choices.graph == "none":
            self.phases += (Phase(name=GRADIENT_SYNC, run=finish),)
        if choices.phase == "train":
            self.phases += (Phase(name=OPTIMIZER, run=self._optimize),)
        if choices.graph == "step":
            self._graphs = StepGraphs(self.phases, self.batches[0], device)
            self.phases = self._graphs.phases
            self._take(self.batches[0])

    def named_tensors(self, batch: Batch) -> list[tuple[str, Tensor]]:
        """The tensors of a batch with their names. The first is what the model reads."""
        return self._named_tensors(batch)

    def prepare(self) -> None:
        """Take the next batch, untimed; without an optimizer phase, also release the gradients."""
        self._take(self.batches[self._next_batch])
        self._next_batch = (self._next_batch + 1) % len(self.batches)
        if self.workload.phase == "forward-backward" and not (self._graphs is not None and self._graphs.captured):
            self.model.zero_grad(set_to_none=True)
        if self.compiled:
            torch.compiler.cudagraph_mark_step_begin()

    def _take(self, batch: Batch) -> None:
        """Make this the batch of the next step, split into micro-batches by views: nothing is copied, but where graphs
        are replayed, which read the batch at one place."""
        self.batch = batch = self._graphs.take(batch) if self._graphs is not None else batch
        micro_batches = self._split(batch, self.workload.accumulation)
        self._micro_batches = [micro_batch[: self._forward_inputs] for micro_batch in micro_batches]

    def _autocast(self) -> AbstractContextManager[object]:
        """A new autocast context, one for each forward: autocast keeps its cast weights until the context ends."""
        return autocast_of(self.workload, self.device.type)

    def _by_schedule(self, run: Callable[[Batch], Tensor | None]) -> None:
        self.loss = run(self.batch)

    def _infer(self, micro: int) -> None:
        with torch.no_grad(), self._autocast():
            self.forward_module(*self._micro_batches[micro])

    def _forward(self, micro: int) -> None:
        with self._autocast():
            self.loss = self.forward_module(*self._micro_batches[micro])
        if self._losses is not None and self.loss is not None:
            self._losses[micro] = self.loss.detach()

    def _backward(self) -> None:
        assert self.loss is not None
        # Each micro-batch has the same number of samples: the mean over the batch is the mean of their means.
        share = self.loss / self.workload.accumulation if self.workload.accumulation > 1 else self.loss
        self.scaler.scale(share).backward()
        self.loss = self.loss.detach()
        if self._graphs is not None:
            # A graph ends with all that it began, so updates under backward end with it.
            getattr(self.optimizer, "join", lambda: None)()

    def _backward_of(self, *, last: bool) -> None:
        """The backward of a micro-batch. What ranks share waits for the last."""
        with contextlib.nullcontext() if last else self._local():
            self._backward()
        if last:
            # A graph waits for what it began, so what ranks do after backward ends with it.
            self._finish()

    def _optimize(self) -> None:
        assert self.optimizer is not None
        if self._max_norm is not None and self._clipping_optimizer is None:
            self.scaler.unscale_(self.optimizer)
            self._gradient_norm = clip_gradients(updated_by(self.optimizer), self._max_norm, self._norm_of)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def keep_losses(self) -> None:
        """Keep the loss of each micro-batch from the next step on, for `mean_loss`."""
        self._losses = {}

    @property
    def mean_loss(self) -> Tensor | None:
        """The mean loss of the last step's batch before its update, in fp32 on the device; None where no loss is
        known. With several micro-batches it takes `keep_losses`."""
        kept = self._losses or ({0: self.loss.detach()} if self.loss is not None else {})
        return torch.stack([loss.float() for loss in kept.values()]).mean() if kept else None

    @property
    def _clipping_optimizer(self) -> Updating | None:
        """The optimizer where it clips gradients itself."""
        return self.optimizer if isinstance(self.optimizer, Updating) and self.optimizer.max_norm is not None else None

    @property
    def gradient_norm(self) -> Tensor | None:
        """The global norm of the last gradients before they were clipped, on the device; None where nothing clips."""
        optimizer = self._clipping_optimizer
        return optimizer.gradient_norm if optimizer is not None else self._gradient_norm


def autocast_of(choices: Workload, device_type: str) -> AbstractContextManager[object]:
    """A context of one forward in the dtype that was chosen."""
    dtype = AUTOCAST_DTYPE.get(choices.dtype)
    return torch.autocast(device_type, dtype=dtype) if dtype else contextlib.nullcontext()


class TrainingStep(AssembledStep):
    """A workload made ready to run on a device: the textbook's model on random tokens."""

    workload: TextbookWorkload
    model: Transformer

    def __init__(self, workload: TextbookWorkload, device: torch.device, share: Share | None = None) -> None:
        check_supported(workload, device)
        super().__init__(textbook_parts(workload, device), workload, device, share)

    @property
    def tokens(self) -> Tensor:
        """The token ids that the next forward takes."""
        return self.batch[0]


def textbook_parts(
    workload: TextbookWorkload,
    device: torch.device,
    start: Mapping[str, Tensor] | None = None,
    batches: Sequence[Batch] | None = None,
) -> StepParts:
    """The textbook's model, initialised by the workload's seed, and its batches of random tokens.

    start: the values that its parameters begin from instead, in fp32. batches: others, on the device.
    """
    torch.manual_seed(workload.seed)
    model, inference = build_model(workload, device), workload.phase == "forward"
    if start is not None:
        model.load_state_dict(dict(start))
    masters = in_16_bits(model, workload, tuple(model.blocks))
    if workload.projections == "joint":
        from stepscope.kernels.parts.projections import lie_together  # noqa: PLC0415  (only where they are joint)

        for weights in model.projections():
            lie_together(weights)
    if batches is None:
        # Uniformly random tokens and targets (B, S): content does not change the arithmetic, repetition would.
        generator = torch.Generator().manual_seed(workload.seed)
        shape = (DISTINCT_BATCHES, 2, workload.batch_size, workload.seq_len)
        tokens = torch.randint(workload.model.vocabulary, shape, generator=generator)
        batches = [(batch[0].to(device), batch[1].to(device)) for batch in tokens]
    return StepParts(
        model=model,
        masters=masters,
        forward=model if inference else ForwardLoss(model),
        forward_inputs=1 if inference else 2,
        batches=batches,
        named_tensors=lambda batch: list(zip(("tokens", "targets"), batch, strict=True)),
        split=_chunks,
        blocks=tuple(model.blocks),
        compiles_parts=compiles(workload.parts)
        or ATTENTIONS[chosen_attention(workload, device.type)].compiler == "inductor",
    )


def in_16_bits(model: nn.Module, choices: Workload, blocks: Sequence[nn.Module]) -> dict[Tensor, Tensor]:
    """Make the weights bf16 where the precision has masters, and give their first values in fp32; of ranks that gather
    bf16 copies of fp32 shards, the shards are the masters. Where the precision scales operands of 8 bits, the linear
    layers of the blocks take such, or of the whole model where no blocks are known."""
    precision = PRECISIONS[choices.dtype]
    if precision.scaled:
        from stepscope.training.scaled_products import scale_products  # noqa: PLC0415  (only where they are scaled)

        scale_products(blocks or (model,), precision.scaled, choices.dtype)
    if not precision.masters or computes_in_16_bits(choices.parallel):
        return {}
    from stepscope.training.half_optimizers import halve  # noqa: PLC0415  (only where weights are halved)

    return halve(model)


def _chunks(batch: Batch, parts: int) -> list[Batch]:
    """Equal parts of a batch: the mean of their losses is that of the whole, which unequal ones' is not."""
    size = len(batch[0])
    if size % parts:
        raise InputError(f"a batch of {size} cannot be split into {parts} equal parts")
    return list(zip(*(tensor.chunk(parts) for tensor in batch), strict=True))


def check_supported(workload: Workload, device: torch.device) -> None:
    """Raise InputError for a workload that this device or build cannot run as asked. A user's module is checked when it
    is made."""
    if workload.sizes is None:
        return
    chosen_attention(workload, device.type)
    parts_for(workload, device.type)
    check_choices(workload, device)
    if any(map(is_users, (workload.attention, *workload.parts.values()))):
        from stepscope.training.parts.gate import require_users  # noqa: PLC0415  (only where there are such)

        for sentence in require_users(workload, device):
            _say_once(sentence)


_say_once = functools.cache(warn)


def check_choices(choices: Workload, device: torch.device) -> None:
    """Raise InputError for a precision or an optimizer that this device cannot run, whatever the model."""
    if choices.dtype == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise InputError(f"dtype tf32 needs an NVIDIA GPU from Ampere on, not {device.type}: choose fp32 or bf16")
    least = {"tensor": (8, 9), "row": (9, 0)}.get(PRECISIONS[choices.dtype].scaled)
    if least is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) < least:
        needs = "an NVIDIA GPU from Ada on" if least == (8, 9) else "an NVIDIA GPU from Hopper on"
        raise InputError(f"dtype {choices.dtype} needs {needs}: choose bf16-master")
    if choices.optimizer == "adamw-fused" and device.type not in ("cuda", "cpu"):
        raise InputError(f"optimizer adamw-fused does not run on {device.type}: choose adamw-foreach")
    if choices.phase == "train" and choices.optimizer in OF_ONE_LAUNCH:
        fault = triton_fault(device.type)
        if fault is not None:
            raise InputError(f"optimizer {choices.optimizer} {fault}: choose adamw-fused")
    if choices.graph == "step" and device.type != "cuda":
        raise InputError(f"--graph step captures CUDA graphs, which {device.type} has not: leave it out")


def build_model(workload: TextbookWorkload, device: torch.device | str) -> Transformer:
    """The workload's model on `device`, initialised (on "meta": shapes only)."""
    device_type = "cpu" if str(device) == "meta" else torch.device(device).type
    model = Transformer(
        workload.model,
        max_seq_len=workload.seq_len,
        attention=attention_for(workload, device_type),
        run_blocks=block_runner(workload),
        device=device,
        parts=parts_for(workload, device_type),
    )
    if str(device) != "meta":
        model.initialise()
    return model.to(torch.bfloat16) if workload.dtype == "bf16-pure" else model


def block_runner(workload: TextbookWorkload) -> BlockRunner:
    """The runner that the workload's `checkpointing` names."""
    if workload.checkpointing == "none":
        return keep_all
    from stepscope.training.checkpointing import runner_of  # noqa: PLC0415  (it imports each attention that it keeps)

    return runner_of(workload.spans)


def _compiled(parts: StepParts, mode: str) -> nn.Module:
    """What the forward phase calls, compiled; each block by itself in mode `blocks`."""
    from stepscope.kernels.operators import use_graph_passes  # noqa: PLC0415  (only where something is compiled)

    # fullgraph stays off: a graph break must be found and reported, not hidden by a refusal to run.
    keep_compiled_functions()
    use_graph_passes()
    if mode == "blocks":
        if not parts.blocks:
            raise InputError("compile mode blocks needs a model whose blocks are known: choose default")
        for block in parts.blocks:
            block.compile()
        return parts.forward
    compiled = torch.compile(parts.forward, mode=None if mode == "default" else mode)
    assert isinstance(compiled, nn.Module)
    return compiled


@functools.cache
def keep_compiled_functions() -> None:
    """Let torch's cache on disk keep compiled graphs that hold an autograd.Function, as our kernels do.

    PyTorch leaves them out unless it is asked, so that each process traces backward and partitions the graph again: a
    Qwen-like model of half a billion parameters took 28 to 39 s where its kernels were on disk already, after 43. The
    key holds what both directions of a Function were traced to, and here also the kernels' sources, since how the
    outputs of an operator look is no part of what was traced.
    """
    from torch._functorch import config as of_autograd  # noqa: PLC0415  (which torch.compile loads)
    from torch.compiler import config as of_compiler  # noqa: PLC0415

    from stepscope.kernels import operators  # noqa: PLC0415

    name = "autograd_cache_allow_custom_autograd_functions"
    if hasattr(of_autograd, name):
        setattr(of_autograd, name, True)
        digest = hashlib.sha256()
        for file in sorted(Path(operators.__file__).parent.rglob("*.py")):
            digest.update(file.read_bytes())
        of_compiler.cache_key_tag += f"stepscope-{digest.hexdigest()[:16]}"


LEARNING_RATE = 1e-4


def of_library(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer of OF_LIBRARIES, imported. Raises InputError where that cannot be."""
    library, _, kind = name.partition(".")
    try:
        return getattr(importlib.import_module(f"{library}.optim"), kind)
    except (ImportError, AttributeError) as error:
        missing = importlib.util.find_spec(library) is None
        why = "which is not installed" if missing else f"which has none here ({named_line(error, 120)})"
        raise InputError(f"optimizer {name} is of {library}, {why}: pip install -U {library}") from error


def optimizer_for(
    trained: Sequence[nn.Parameter],
    choices: Workload,
    masters: Mapping[Tensor, Tensor] | None = None,
    *,
    max_norm: float | None = None,
) -> torch.optim.Optimizer:
    """The optimizer that was chosen, of these parameters. masters: the first values in fp32 of those in bf16. max_norm:
    the bound on the gradients' norm, for an optimizer that clips by itself: it must have all gradients."""
    if choices.optimizer == "adamw-bf16-state":
        from stepscope.training.half_optimizers import AdamWBf16State  # noqa: PLC0415  (where it was chosen)

        return AdamWBf16State(trained, lr=LEARNING_RATE)
    if choices.optimizer in OF_LIBRARIES:
        return of_library(choices.optimizer)(trained, lr=LEARNING_RATE)
    if choices.optimizer in OF_ONE_LAUNCH:
        from stepscope.training import one_launch  # noqa: PLC0415  (Triton: where it is there)

        return one_launch.BY_NAME[choices.optimizer](trained, lr=LEARNING_RATE, masters=masters, max_norm=max_norm)
    adamw = functools.partial(
        torch.optim.AdamW,
        lr=LEARNING_RATE,
        foreach=choices.optimizer == "adamw-foreach",
        fused=choices.optimizer == "adamw-fused",
        # Without it PyTorch counts updates on the host, which no replay would do again.
        capturable=choices.graph == "step",
    )
    if not masters:
        return adamw(trained)
    from stepscope.training.half_optimizers import OnMasters  # noqa: PLC0415  (where weights are halved)

    return OnMasters(trained, adamw, masters, max_norm)
