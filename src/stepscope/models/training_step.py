"""One training step of the transformer as a sequence of phases: forward with loss, backward, optimizer.

With accumulation, forward and backward take turns, once for each micro-batch, before the one optimizer phase.

The step is assembled from the Workload's choices; what is timed is what was chosen, by construction: the forward
phase calls `forward_module`, and that is the compiled module whenever the workload asks for compilation.
"""

import contextlib
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.core.attentions import ATTENTIONS
from stepscope.core.errors import InputError
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER
from stepscope.core.workload import Dtype, Workload
from stepscope.measure.step import Phase
from stepscope.models.attention import attention_for, chosen_attention
from stepscope.models.checkpointing import block_runner
from stepscope.models.optimizer import AdamWBf16State
from stepscope.models.transformer import Transformer

DISTINCT_BATCHES = 4
"""Batches of random tokens that the steps rotate through, so that no step repeats the one before."""

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that capture the step into CUDA graphs and replay them."""

_AUTOCAST_DTYPE: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ForwardLoss(nn.Module):
    """The model and its mean cross-entropy on the next token: all that `forward` means in a training step."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        logits_BSV = self.model(tokens_BS)
        return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())


class TrainingStep:
    """A workload made ready to run on a device: model, data, optimizer, and the phases of one step."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        check_supported(workload, device)
        self.workload, self.device = workload, device
        torch.manual_seed(workload.seed)
        self.model = build_model(workload, device)
        self.compiled = workload.compile != "eager"
        self.compiles_parts = (
            not self.compiled and ATTENTIONS[chosen_attention(workload, device.type)].compiler == "inductor"
        )
        self.cuda_graphs = device.type == "cuda" and workload.compile in CUDA_GRAPH_MODES
        self.inference = workload.phase == "forward"
        module = self.model if self.inference else ForwardLoss(self.model)
        self.forward_module: nn.Module = _compiled(module, workload.compile) if self.compiled else module
        self.optimizer = _build_optimizer(self.model, workload)
        self.scaler = torch.amp.GradScaler(device.type, enabled=workload.dtype == "fp16")
        self.batches: Sequence[tuple[Tensor, Tensor]] = _random_batches(workload, device)
        self.loss: Tensor | None = None
        """The mean loss of the last micro-batch that ran forward."""
        self._next_batch = 0
        self._take(self.batches[0])
        forward = self._infer if self.inference else self._forward
        self.phases: tuple[Phase, ...] = ()
        for micro in range(workload.accumulation):
            self.phases += (Phase(name=FORWARD, run=functools.partial(forward, micro)),)
            if not self.inference:
                self.phases += (Phase(name=BACKWARD, run=self._backward),)
        if workload.phase == "train":
            self.phases += (Phase(name=OPTIMIZER, run=self._optimize),)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The model's blocks, in order."""
        return tuple(self.model.blocks)

    def prepare(self) -> None:
        """Take the next batch, untimed; without an optimizer phase, also release the gradients."""
        self._take(self.batches[self._next_batch])
        self._next_batch = (self._next_batch + 1) % len(self.batches)
        if self.workload.phase == "forward-backward":
            self.model.zero_grad(set_to_none=True)
        if self.compiled:
            torch.compiler.cudagraph_mark_step_begin()

    def _take(self, batch: tuple[Tensor, Tensor]) -> None:
        """Make this the batch of the next step, split into micro-batches by views: nothing is copied."""
        self.tokens, targets_BS = batch
        parts = self.workload.accumulation
        self._micro_batches = list(zip(self.tokens.chunk(parts), targets_BS.chunk(parts), strict=True))

    def _autocast(self) -> AbstractContextManager[object]:
        """A new autocast context, one for each forward: autocast keeps its cast weights until the context ends."""
        dtype = _AUTOCAST_DTYPE.get(self.workload.dtype)
        return torch.autocast(self.device.type, dtype=dtype) if dtype else contextlib.nullcontext()

    def _infer(self, micro: int) -> None:
        tokens_BS, _ = self._micro_batches[micro]
        with torch.no_grad(), self._autocast():
            self.forward_module(tokens_BS)

    def _forward(self, micro: int) -> None:
        tokens_BS, targets_BS = self._micro_batches[micro]
        with self._autocast():
            self.loss = self.forward_module(tokens_BS, targets_BS)

    def _backward(self) -> None:
        assert self.loss is not None
        # Each micro-batch has the same number of tokens: the mean over the batch is the mean of their means.
        share = self.loss / self.workload.accumulation if self.workload.accumulation > 1 else self.loss
        self.scaler.scale(share).backward()
        self.loss = self.loss.detach()

    def _optimize(self) -> None:
        assert self.optimizer is not None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def check_supported(workload: Workload, device: torch.device) -> None:
    """Raise InputError for a workload that this device or build cannot run as asked."""
    chosen_attention(workload, device.type)
    if workload.dtype == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise InputError(f"dtype tf32 needs an NVIDIA GPU from Ampere on, not {device.type}: choose fp32 or bf16")
    if workload.optimizer == "adamw-fused" and device.type not in ("cuda", "cpu"):
        raise InputError(f"optimizer adamw-fused does not run on {device.type}: choose adamw-foreach")


def build_model(workload: Workload, device: torch.device | str) -> Transformer:
    """The workload's model on `device`, initialised (on "meta": shapes only)."""
    model = Transformer(
        workload.model,
        max_seq_len=workload.seq_len,
        attention=attention_for(workload, "cpu" if str(device) == "meta" else torch.device(device).type),
        run_blocks=block_runner(workload),
        device=device,
    )
    if str(device) != "meta":
        model.initialise()
    return model.to(torch.bfloat16) if workload.dtype == "bf16-pure" else model


def _compiled(module: nn.Module, mode: str) -> nn.Module:
    # fullgraph stays off: a graph break must be found and reported, not hidden by a refusal to run.
    compiled = torch.compile(module, mode=None if mode == "default" else mode)
    assert isinstance(compiled, nn.Module)
    return compiled


def _build_optimizer(model: Transformer, workload: Workload) -> torch.optim.Optimizer | None:
    if workload.phase != "train":
        return None
    if workload.optimizer == "adamw-bf16-state":
        return AdamWBf16State(model.parameters(), lr=1e-4)
    return torch.optim.AdamW(
        model.parameters(),
        lr=1e-4,
        foreach=workload.optimizer == "adamw-foreach",
        fused=workload.optimizer == "adamw-fused",
    )


def _random_batches(workload: Workload, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Uniformly random tokens and targets (B, S): content does not change the arithmetic, repetition would."""
    generator = torch.Generator().manual_seed(workload.seed)
    shape = (DISTINCT_BATCHES, 2, workload.batch_size, workload.seq_len)
    tokens = torch.randint(workload.model.vocabulary, shape, generator=generator)
    return [(batch[0].to(device), batch[1].to(device)) for batch in tokens]
