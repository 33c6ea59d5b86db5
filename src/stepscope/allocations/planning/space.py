"""Every layout of a step over so many ranks, and why a combination is none."""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from stepscope.core.attentions import is_kept, scores_of
from stepscope.core.checkpointing import spans_of
from stepscope.core.layout import SHARDINGS, Layout
from stepscope.core.parts import REFERENCE
from stepscope.core.work.planned_model import PlannedModel
from stepscope.core.workload import Workload

CHECKPOINTINGS = ("none", "selective", "every-1")
"""The checkpointing that is tried unasked, what computes least again first. Where `selective` does not fit, a search
tries `selective-K` and `attention` besides (`mixtures.py`)."""
MOST_SEQUENCES = 8
"""The most sequences of a micro-batch that are tried."""
CHUNKS = (1, 2, 4, 8)
"""Pieces of the model on a pipeline rank that are tried."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is asked: a step, its ranks, and what of the layout is settled."""

    workload: Workload
    """The whole step; its accumulation and checkpointing are not read."""
    model: PlannedModel
    ranks: int
    node: int
    """GPUs of a node."""
    fixed: Mapping[str, int | str] = {}
    checkpointings: tuple[str, ...] = ()
    """The checkpointings that the question settles, if any."""

    @property
    def what_would_fit(self) -> str:
        """What needs less memory, in words: first what the question itself settles."""
        own = ["another --checkpointing"] if self.checkpointings and "every-1" not in self.checkpointings else []
        own += [] if is_kept(self.workload.attention) else ["--attention flash"]
        usual = "more ranks, a shorter sequence, optimizer state in 16 bits or more memory is needed"
        return f"{' or '.join(own)} may fit; else {usual}" if own else usual

    @property
    def tried(self) -> tuple[str, ...]:
        """The checkpointing of its layouts, but for mixtures."""
        return self.checkpointings or CHECKPOINTINGS

    @property
    def mixes(self) -> bool:
        """Whether mixtures of `selective` and `attention` are tried where `selective` does not fit."""
        return not self.checkpointings and is_kept(self.workload.attention)

    @property
    def offloads(self) -> bool:
        """Whether blocks that offload are tried there, too."""
        return self.mixes and self.workload.one_by_one


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of each dimension."""

    tensor: int
    context: int
    pipeline: int
    data: int
    expert: int


class Space:
    """The grids and layouts of a question. `refused` counts the grids that cannot be, by the reason."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.refused: Counter[str] = Counter()
        self.grids_seen = 0

    def grids(self) -> Iterator[Grid]:
        """Every way to share out the ranks that can be."""
        question = self.question
        for tensor in self._choices("tensor", question.ranks):
            for context in self._choices("context", question.ranks // tensor):
                for pipeline in self._choices("pipeline", question.ranks // tensor // context):
                    data = question.ranks // tensor // context // pipeline
                    if question.fixed.get("data", data) != data:
                        continue
                    experts = divisors(data * context) if question.model.experts > 1 else (1,)
                    for expert in (e for e in experts if question.fixed.get("expert", e) == e):
                        grid = Grid(tensor=tensor, context=context, pipeline=pipeline, data=data, expert=expert)
                        self.grids_seen += 1
                        reason = self._impossible(grid)
                        if reason:
                            self.refused[reason] += 1
                        else:
                            yield grid

    def layouts(self, grid: Grid) -> Iterator[list[Layout]]:
        """The layouts of a grid, those together that differ only in micro-batch and checkpointing."""
        question, fixed = self.question, self.question.fixed
        per_rank = question.workload.batch_size // grid.data
        sizes = [size for size in divisors(per_rank) if fixed.get("micro_batch", size) == size <= MOST_SEQUENCES]
        sizes = sizes or [int(fixed.get("micro_batch", 1))] * (per_rank % int(fixed.get("micro_batch", 1)) == 0)
        for chunks in self._chunks(grid.pipeline):
            for sharding, shard in self._shardings(grid):
                found = [
                    Layout(
                        data=grid.data, tensor=grid.tensor, context=grid.context, pipeline=grid.pipeline,
                        expert=grid.expert, sharding=sharding, shard=shard, chunks=chunks, micro_batch=size,
                        micro_batches=per_rank // size, checkpointing=checkpointing,
                    )
                    for size in sizes
                    if chunks == 1 or per_rank // size % grid.pipeline == 0
                    for checkpointing in question.tried
                ]  # fmt: skip
                if found:
                    yield found

    def _choices(self, dimension: str, most: int) -> tuple[int, ...]:
        fixed = self.question.fixed.get(dimension)
        found = divisors(most)
        return found if fixed is None else tuple(one for one in found if one == fixed)

    def _chunks(self, pipeline: int) -> list[int]:
        if pipeline == 1:
            return [1]
        wanted = self.question.fixed.get("chunks")
        tried = CHUNKS if wanted is None else (int(wanted),)
        return [count for count in tried if count * pipeline <= self.question.model.config.layers]

    def _shardings(self, grid: Grid) -> list[tuple[str, int]]:
        fixed, width = self.question.fixed, grid.data * grid.context
        if width == 1:
            return [("ddp", 1)]
        inside = max(d for d in divisors(width) if d * grid.tensor <= max(self.question.node, grid.tensor))
        found: list[tuple[str, int]] = []
        for name, sharding in SHARDINGS.items():
            if fixed.get("sharding", name) != name or not (sharding.usual or "sharding" in fixed):
                continue
            if name == "zero1-master" and self.question.workload.dtype not in ("bf16", "fp16"):
                continue  # without a compute dtype of its own it is zero1
            groups = (1,) if not sharding.shares else (width, inside) if sharding.parameters else (width,)
            if "shard" in fixed and sharding.shares:
                groups = (int(fixed["shard"]),)
            found += [(name, size) for size in dict.fromkeys(groups) if size > 1 or not sharding.shares]
        return found

    def _impossible(self, grid: Grid) -> str:
        """Why there is no such grid, or nothing."""
        return next((reason for reason, fault in _faults(self.question, grid) if fault), "")


def _faults(question: Question, grid: Grid) -> Iterator[tuple[str, object]]:
    """Reasons why a grid may not be, each with what is true where it holds."""
    config, length, tensor, context = question.model.config, question.workload.seq_len, grid.tensor, grid.context
    keys = config.key_heads
    yield "tensor parallel ranks do not divide the heads", config.heads % tensor
    yield "tensor parallel ranks do not divide the heads of keys", keys % tensor and tensor % keys
    yield "tensor parallel ranks do not divide d_ff", config.d_ff % tensor
    yield "context parallel needs fused attention", context > 1 and scores_of(question.workload.attention) == "whole"
    yield (
        "context parallel ranks do not divide the sequence into two equal pieces each",
        context > 1 and length % (2 * context * tensor),
    )
    yield "a fused loss takes the whole vocabulary", tensor > 1 and question.workload.loss != REFERENCE
    yield "tensor parallel ranks do not divide the sequence", tensor > 1 and length % (context * tensor)
    yield "more pipeline stages than blocks", grid.pipeline > config.layers
    spans = [spans_of(one, config.layers) for one in question.tried]
    unlike = any(len(each) > 1 or any(span.on_host for span in each) for each in spans)
    yield (
        "blocks that keep unlike, or offload (--checkpointing), are not divided among pipeline stages",
        grid.pipeline > 1 and unlike,
    )
    yield "expert parallel ranks do not divide the experts", question.model.experts % grid.expert
    yield "data parallel ranks do not divide the batch", question.workload.batch_size % grid.data


@functools.lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, the smallest first."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))
