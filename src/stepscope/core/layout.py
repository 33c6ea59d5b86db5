"""A Layout: how a step is spread over ranks, and the kinds of sharding of what a rank keeps."""

import re
from dataclasses import dataclass
from typing import Literal

import msgspec

from stepscope.core.errors import InputError, choose
from stepscope.core.precisions import PRECISIONS
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.workloads import TextbookWorkload

Gathers = Literal["never", "once", "each pass"]
"""When ranks gather the parameters that they need whole: not at all, once a step, or in each forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A kind of data parallelism, by what each rank keeps only a share of."""

    name: str
    words: str
    source: str
    moments: bool = False
    """Whether the optimizer's moments are shared out."""
    parameters: bool = False
    """Whether the parameters that the optimizer updates are."""
    gradients: bool = False
    """Whether gradients are: each micro-batch's are reduced and scattered at once."""
    gathers: Gathers = "never"
    in_compute_dtype: bool = False
    """Whether parameters are gathered in the dtype of products; else as they are stored, and autocast casts them."""
    copied: int = 0
    """How often a rank reads or writes each gradient besides, to send it and to have it back."""
    buckets: bool = False
    """Whether each gradient is copied into a bucket that is sent, and back, and the buckets stay beside gradients."""
    after: bool = False
    """Whether gradients are sent when backward has ended, and nothing hides them."""
    one_message: bool = False
    """Whether all gradients are one message; else a block's are one."""
    each_tensor: bool = False
    """Whether each gradient is a message of its own; where parameters are gathered once, each of these."""
    usual: bool = True
    """Whether a plan tries it unasked."""

    @property
    def shares(self) -> bool:
        """Whether ranks share out anything at all."""
        return self.moments or self.parameters or self.gradients


_ZERO = "Rajbhandari et al. 2020, section 5"
SHARDINGS: dict[str, Sharding] = {
    one.name: one
    for one in (
        Sharding(
            name="ddp", words="nothing is sharded, and buckets hold each gradient once more",
            source="Li et al. 2020, PyTorch Distributed; DistributedDataParallel", buckets=True, copied=4,
        ),
        Sharding(
            name="ddp-views", words="as ddp, but gradients are views of their buckets, or sent where they are",
            source="DistributedDataParallel(gradient_as_bucket_view=True), and the lessons", copied=2, usual=False,
        ),
        Sharding(
            name="ddp-after", words="as ddp, but gradients are copied into one message after backward, and back",
            source="the lesson ddp-flat", copied=4, after=True, one_message=True, usual=False,
        ),
        Sharding(
            name="ddp-each-after", words="as ddp, but each gradient is a message, after backward",
            source="the lesson ddp-naive", copied=2, after=True, each_tensor=True, usual=False,
        ),
        Sharding(
            name="zero1", words="moments sharded", source=f"{_ZERO}.1; PyTorch's ZeroRedundancyOptimizer",
            moments=True, gathers="once", copied=2,
        ),
        Sharding(
            name="zero1-each", words="as zero1, but each updated parameter is a broadcast", source="the lesson zero1",
            moments=True, gathers="once", copied=2, each_tensor=True, usual=False,
        ),
        Sharding(
            name="zero1-master", words="moments and fp32 parameters sharded, a copy in the compute dtype whole",
            source=f"{_ZERO}.1; Megatron's distributed optimizer", moments=True, parameters=True,
            in_compute_dtype=True, gathers="once",
        ),
        Sharding(
            name="zero2", words="all state sharded, parameters gathered once a step",
            source=f"{_ZERO}.2; fully_shard(reshard_after_forward=False)", moments=True, parameters=True,
            gradients=True, in_compute_dtype=True, gathers="once",
        ),
        Sharding(
            name="zero3", words="all state sharded, parameters gathered block by block",
            source=f"{_ZERO}.3; PyTorch's fully_shard (FSDP2)", moments=True, parameters=True, gradients=True,
            in_compute_dtype=True, gathers="each pass",
        ),
        Sharding(
            name="zero3-autocast", words="as zero3, but gathered in fp32 and cast, as by stepscope's own strategies",
            source=f"{_ZERO}.3; fully_shard under autocast", moments=True, parameters=True, gradients=True,
            gathers="each pass", usual=False,
        ),
    )
}  # fmt: skip
"""The kinds of data parallelism by name. With fewer ranks in a shard group than data-parallel ranks, the groups are
replicas of one another (hybrid sharding, HSDP)."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How a step is spread: the ranks of each dimension, and how each rank works through its share.

    Ranks are numbered with tensor parallelism innermost, then context, data and pipeline (Megatron's order), so that
    what communicates most is nearest.
    """

    data: int = 1
    tensor: int = 1
    """Ranks that share each matrix, and between them the sequence (sequence parallelism)."""
    context: int = 1
    """Ranks that share each sequence, in attention too."""
    pipeline: int = 1
    expert: int = 1
    """Ranks that share the experts; they are data-parallel ranks for everything else."""
    sharding: str = "ddp"
    shard: int = 1
    """Ranks in a shard group: a divisor of data x context."""
    chunks: int = 1
    """Pieces of the model on each pipeline rank: more than one is an interleaved schedule."""
    micro_batch: int = 1
    """Sequences in one forward pass of a rank."""
    micro_batches: int = 1
    checkpointing: str = "none"

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.context * self.pipeline

    @property
    def replicas(self) -> int:
        """Shard groups that hold the same."""
        return self.data * self.context // self.shard

    @property
    def stages(self) -> int:
        """Pieces into which the blocks are cut."""
        return self.pipeline * self.chunks

    @property
    def name(self) -> str:
        """The layout in short, as in `tp8 pp16 dp64 zero2 1x32 full`; dimensions of one rank are left out."""
        sizes = {"tp": self.tensor, "cp": self.context, "pp": self.pipeline, "ep": self.expert, "dp": self.data}
        words = [f"{short}{size}" for short, size in sizes.items() if size > 1]
        if self.chunks > 1:
            words.append(f"v{self.chunks}")
        if self.data * self.context > 1:
            words.append(self.sharding + (f"/{self.shard}" if self.shard not in (1, self.data * self.context) else ""))
        return " ".join(words) or "one rank"


FIXED = ("tensor", "context", "pipeline", "data", "expert", "chunks", "shard", "micro_batch")
_SHORT = {
    "tp": "tensor",
    "cp": "context",
    "pp": "pipeline",
    "dp": "data",
    "ep": "expert",
    "v": "chunks",
    "mb": "micro_batch",
}


def parse_layout(text: str) -> dict[str, int | str]:
    """`tensor=8,pp=16,sharding=zero3`: the dimensions of a layout that are settled, by field."""
    fields: dict[str, int | str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        field = _SHORT.get(name, name.replace("-", "_"))
        if field == "sharding":
            fields[field] = choose(value, tuple(SHARDINGS), "sharding")
            continue
        if field not in FIXED or not re.fullmatch(r"[1-9][0-9]{0,6}", value):
            raise InputError(
                f"cannot read {part[:40]!r} in --layout: write a dimension and its ranks, as in "
                f"tensor=8,pipeline=4; there are {', '.join((*FIXED, 'sharding'))}"
            )
        fields[field] = int(value)
    if not fields:
        raise InputError("--layout is empty: name a dimension, as in tensor=8")
    return fields


def settled(layout: Layout, experts: int = 1) -> str:
    """What `--layout` takes to leave this layout alone of those of its ranks, but for its checkpointing; of a model of
    so many experts."""
    sizes = {name: getattr(layout, name) for name in ("tensor", "context", "pipeline", "data")}
    words = {name: size for name, size in sizes.items() if size > 1}
    if experts > 1:
        words["expert"] = layout.expert
    if layout.pipeline > 1:
        words["chunks"] = layout.chunks
    if layout.data * layout.context > 1:
        words["sharding"] = layout.sharding
        if SHARDINGS[layout.sharding].parameters:
            words["shard"] = layout.shard
    return ",".join(f"{name}={value}" for name, value in {**words, "micro-batch": layout.micro_batch}.items())


_SHARDINGS = {
    "ddp": "ddp",
    "ddp-naive": "ddp-each-after",
    "ddp-flat": "ddp-after",
    "ddp-overlap": "ddp-views",
    "ddp-bucketed": "ddp-views",
    "zero1": "zero1-each",
    "fsdp-textbook": "zero3-autocast",
    "fsdp2": "zero3-autocast",
    "fsdp2:compute=bf16": "zero3",
}
"""The kind of sharding of each strategy that has one, with the options that choose another."""
_LESSONS = {"zero1-each": "zero1"}
"""Kinds of sharding of lessons that run another kind, too, and differ from it only in their messages."""
_WITHOUT_EFFECT = ("ddp", "ddp-bucketed")
"""Strategies whose options leave the kind of sharding as it is."""


def layout_of(workload: TextbookWorkload) -> Layout | None:
    """The layout in which a step ran; None where no plan is of its strategy, or of its products of 8 bits on ranks:
    a plan takes weights of such a step for bf16 beside masters."""
    micro_batches, ranks = workload.accumulation, workload.ranks
    if workload.parallel == NOT_PARALLEL:
        return Layout(
            micro_batch=workload.micro_batch_size, micro_batches=micro_batches, checkpointing=workload.checkpointing
        )
    name = workload.strategy.name
    sharding = _SHARDINGS.get(name if name in _WITHOUT_EFFECT else workload.parallel)
    if sharding is None or PRECISIONS[workload.dtype].scaled:
        return None
    return Layout(
        data=ranks,
        sharding=sharding,
        shard=ranks if SHARDINGS[sharding].shares else 1,
        micro_batches=micro_batches,
        micro_batch=workload.batch_size // ranks // micro_batches,
        checkpointing=workload.checkpointing,
    )


def step_of(workload: TextbookWorkload, layout: Layout) -> TextbookWorkload | None:
    """The step of one process as a strategy runs it in this layout; None where there is no such strategy."""
    names = _SHARDINGS if layout.ranks > 1 else (NOT_PARALLEL,)
    for name in names:
        try:
            step = msgspec.structs.replace(
                workload,
                parallel=name,
                ranks=layout.ranks,
                accumulation=layout.micro_batches,
                checkpointing=layout.checkpointing,
            )
        except InputError:
            continue  # the step has what this strategy does not take
        spread = layout_of(step)
        if spread is not None and _LESSONS.get(spread.sharding) == layout.sharding:
            spread = msgspec.structs.replace(spread, sharding=layout.sharding)
        if spread == layout:
            return step
    return None
