"""The peak memory of one rank of a layout: states by count, activations by running its stage symbolically.

A rank holds, with P parameters on it, n ranks in its shard group, and p, g, c, o bytes of a stored parameter, a
gradient, a copy in the compute dtype and both moments (Rajbhandari et al. 2020, section 3.1):

                parameters              gradients       moments
    ddp         P p                     P g + P g       P o          (buckets hold each gradient once more)
    ddp-views   P p                     P g             P o              (ddp-after and ddp-each-after, too)
    zero1       P p                     P g             P o / n
    zero1-master  P p / n + P c         P g             P o / n
    zero2       P p / n + P c           P g / n         P o / n
    zero3       P p / n                 P g / n         P o / n

Where gradients are sharded, those of a block are on their way, and with zero3 the parameters of one or two blocks, and
of embedding and head, are whole for a while: `sharded_units.py` plays that. Beside that, a rank holds what its schedule
has in flight: each chunk's saved activations, and what the chunk at work needs more.
"""

import functools
import math

import msgspec

from stepscope.allocations.prediction.estimate import DISTINCT_BATCHES, WORKSPACE_BYTES
from stepscope.allocations.prediction.rank_model import Share
from stepscope.allocations.prediction.sharded_units import Shards
from stepscope.allocations.prediction.stages import Gradients, Moved, Stage, StageNeeds, moved_by_stage, stage_needs
from stepscope.core.attentions import scores_of
from stepscope.core.checkpointing import OFFLOAD, Span, of_fewer_layers, spans_of
from stepscope.core.layout import SHARDINGS, Layout
from stepscope.core.precisions import PRECISIONS
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.work.communication import Bytes
from stepscope.core.work.pipelines import chunks_in_flight
from stepscope.core.work.planned_model import PlannedModel, largest_stage
from stepscope.core.work.transformer import moment_bytes
from stepscope.core.workload import Workload

_MIXED = ("bf16", "fp16")
_FEW_BLOCKS = 2
"""Stages of at most so many blocks are run as they are; larger ones follow from 1 and 2, where blocks are alike."""


class RankNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the rank that needs most, by what they are, at its peak."""

    parameters: int
    gradients: int
    moments: int
    buckets: int
    """Gradients once more, as they are sent."""
    gathered: int
    """Copies of parameters in the compute dtype, parameters that are whole for a while, and gradients on their way."""
    saved: int
    """Activations of everything in flight but what is at work."""
    working: int
    """The chunk at work: its activations, temporaries and newest gradients; or the optimizer's temporaries."""
    fixed: int
    """Data and the workspaces of libraries."""
    rank: int
    """The pipeline rank."""

    @property
    def peak(self) -> int:
        return sum((
            self.parameters, self.gradients, self.moments, self.buckets, self.gathered, self.saved, self.working,
            self.fixed,
        ))  # fmt: skip


def bytes_of(workload: Workload, sharding: str) -> Bytes:
    """Bytes of an element. Where parameters are gathered in autocast's dtype, the residual stream is in it; else
    autocast copies fp32 weights, and the residual stream stays fp32."""
    precision = PRECISIONS[workload.dtype]
    in_products = SHARDINGS[sharding].in_compute_dtype
    return Bytes(
        parameters=precision.weights,
        gradients=precision.weights,
        compute=precision.products,
        residual=precision.products if in_products else precision.residual,
    )


def rank_workload(workload: Workload, layout: Layout, blocks: int) -> Workload:
    """The step as one rank of the layout runs it for a micro-batch."""
    pure = workload.dtype in _MIXED and SHARDINGS[layout.sharding].in_compute_dtype
    return msgspec.structs.replace(
        workload,
        model=msgspec.structs.replace(workload.model, layers=blocks),
        batch_size=layout.micro_batch,
        seq_len=workload.seq_len // layout.context,
        dtype="bf16-pure" if pure else workload.dtype,
        checkpointing=of_fewer_layers(layout.checkpointing, blocks),
        accumulation=1,
    )


class _Question(msgspec.Struct, frozen=True):
    """What a stage's needs depend on, of a layout: many layouts ask the same."""

    workload: Workload
    model: PlannedModel
    tensor: int
    context: int
    first: bool
    last: bool
    gradients: Gradients
    shards: Shards | None


@functools.lru_cache(maxsize=65536)
def _needs(question: _Question) -> StageNeeds:
    return stage_needs(_stage(question))


def _stage(question: _Question) -> Stage:
    share = Share(model=question.model, tensor=question.tensor, context=question.context)
    return Stage(
        workload=question.workload, share=share, first=question.first, last=question.last,
        gradients=question.gradients, shards=question.shards,
    )  # fmt: skip


def _interpolated(low: StageNeeds, high: StageNeeds, steps: float, *, beyond: StageNeeds | None = None) -> StageNeeds:
    """The needs so many steps beyond `low`, where `high` is one step beyond it, or beyond the needs that are given."""
    under = low if beyond is None else beyond
    return StageNeeds(
        **{
            name: getattr(low, name) + math.ceil((getattr(high, name) - getattr(under, name)) * steps)
            for name in StageNeeds.__struct_fields__
        }
    )


def _buckets(layout: Layout, sizes: Bytes, held: tuple[int, int, int]) -> int:
    """Bytes of the buckets that stay beside gradients (`core/strategies.py` has the source)."""
    shared = layout.data * layout.context > 1
    return sum(held) * sizes.gradients if shared and SHARDINGS[layout.sharding].buckets else 0


class _RankStage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of a rank, whatever the layout's sizes."""

    blocks: int
    first: bool
    last: bool
    gradients: Gradients = "elsewhere"
    shards: Shards | None = None


class RankMemory:
    """Answers what a rank of any layout of one step needs; remembers what layouts have in common."""

    def __init__(self, workload: Workload, model: PlannedModel) -> None:
        self.workload, self.model = workload, model
        self._linear = scores_of(workload.attention) != "whole"
        """Whether activations grow with the number of tokens: those of fused attention do."""
        self._known: dict[tuple[object, ...], StageNeeds] = {}
        self._corners: dict[tuple[object, ...], StageNeeds] = {}
        self._counts: dict[tuple[int, ...], tuple[int, int, int]] = {}
        self._moved: dict[tuple[object, ...], tuple[Moved, ...]] = {}
        self._sizes = {name: bytes_of(workload, name) for name in SHARDINGS}

    def least(self, layout: Layout) -> int:
        """Bytes that the states of the largest rank need, whatever its activations: quickly."""
        sizes, held = self._sizes[layout.sharding], self._held(layout, 0)
        return sum(self._states(layout, sizes, held)) + _buckets(layout, sizes, held)

    def needs(self, layout: Layout, *, exactly: bool = False) -> RankNeeds:
        """What the rank that needs most holds at its peak; `exactly` runs its very stage, however long that takes."""
        ranks = (0, layout.pipeline - 1) if layout.pipeline > 1 else (0,)
        return max((self._of_rank(layout, rank, exactly) for rank in ranks), key=lambda needs: needs.peak)

    def moved(self, layout: Layout, *, first: bool, last: bool, blocks: int) -> Moved:
        """Bytes that a micro-batch's elementwise operations move: from those of one sequence and of two, since what
        concerns weights does not grow with the micro-batch."""
        key = (
            layout.tensor, layout.context, layout.checkpointing, SHARDINGS[layout.sharding].in_compute_dtype, first,
            last, blocks,
        )  # fmt: skip
        if key not in self._moved:
            of_sizes = (msgspec.structs.replace(layout, micro_batch=size) for size in (1, 2))
            stage = _RankStage(blocks=blocks, first=first, last=last)
            questions = (self._question(one, stage) for one in of_sizes)
            self._moved[key] = tuple(moved_by_stage(_stage(question)) for question in questions)
        one, two = self._moved[key]
        more = layout.micro_batch - 1
        return Moved(
            forward=one.forward + more * (two.forward - one.forward),
            backward=one.backward + more * (two.backward - one.backward),
            kernels_forward=one.kernels_forward,
            kernels_backward=one.kernels_backward,
            fused_forward=one.fused_forward + more * (two.fused_forward - one.fused_forward),
            fused_backward=one.fused_backward + more * (two.fused_backward - one.fused_backward),
        )

    def offloaded(self, layout: Layout) -> int:
        """Bytes that a block sends to the host's memory for a micro-batch, if it offloads."""
        alone = msgspec.structs.replace(layout, checkpointing=f"{OFFLOAD}-1")
        return self._by_tokens(alone, _RankStage(blocks=1, first=False, last=False)).offloaded

    def _held(self, layout: Layout, rank: int) -> tuple[int, int, int]:
        """Parameters on a rank: of its blocks, of its experts, and outside blocks."""
        key = (layout.tensor, layout.pipeline, layout.chunks, layout.expert, rank)
        if key not in self._counts:
            self._counts[key] = self._count(layout, rank)
        return self._counts[key]

    def _count(self, layout: Layout, rank: int) -> tuple[int, int, int]:
        last = layout.pipeline - 1
        chunk = largest_stage(self.model.config.layers, layout.stages)
        fewer = chunk * layout.stages - self.model.config.layers
        # Where blocks do not divide evenly, the ranks with head and embedding have fewer of them.
        blocks = chunk * layout.chunks - (rank == last and fewer > 0) - (rank == 0 and last > 0 and fewer > 1)
        vocabulary = self.model.local_vocabulary(layout.tensor) * self.model.config.d_model
        ends = (rank == 0) + (rank == last and (last > 0 or not self.model.config.tied))
        outside = ends * vocabulary + (self.model.config.d_model if rank == last else 0)
        dense = blocks * self.model.local_block(layout.tensor)
        return dense, blocks * self.model.local_experts(layout.tensor, layout.expert), outside

    def _states(self, layout: Layout, sizes: Bytes, held: tuple[int, int, int]) -> tuple[int, int, int]:
        """Bytes of stored parameters, gradients that stay, and moments."""
        sharding = SHARDINGS[layout.sharding]
        dense, experts, outside = held
        everything = dense + experts + outside
        of_experts = min(layout.shard, layout.data * layout.context // layout.expert) if experts else 1
        shared = -(-(dense + outside) // layout.shard) + -(-experts // of_experts)
        state = 2 * moment_bytes(self.workload) + PRECISIONS[self.workload.dtype].masters
        return (
            (shared if sharding.parameters else everything) * sizes.parameters,
            (shared if sharding.gradients else everything) * sizes.gradients,
            state * (shared if sharding.moments else everything),
        )

    def _of_rank(self, layout: Layout, rank: int, exactly: bool) -> RankNeeds:
        sharding, sizes = SHARDINGS[layout.sharding], self._sizes[layout.sharding]
        held = self._held(layout, rank)
        parameters, gradients, moments = self._states(layout, sizes, held)
        made_here = layout.micro_batches * layout.chunks == 1 and self.model.experts == 1
        stage = _RankStage(
            blocks=largest_stage(self.model.config.layers, layout.stages), first=rank == 0,
            last=rank == layout.pipeline - 1, gradients="made" if made_here else "elsewhere",
            shards=self._shards(layout, sizes, held[2]),
        )  # fmt: skip
        if layout.chunks > 1 and layout.pipeline > 1 and stage.last:
            stage = msgspec.structs.replace(stage, first=False)  # the embedding is in another chunk
        needs = self._stage_needs(layout, stage, exactly)
        once = sum(held) * self._gathered_bytes(layout, sizes) if sharding.gathers == "once" else 0
        saved = (chunks_in_flight(layout, rank) - 1) * needs.saved
        kept = 0 if made_here else gradients
        fixed = 2 * WORKSPACE_BYTES + 2 * DISTINCT_BATCHES * 8 * self.workload.tokens // layout.data // layout.context
        roots = moments // 2 if self.workload.optimizer == "adamw-foreach" else 0
        in_forward, in_backward = needs.gathered_forward, needs.gathered_backward
        phases = (
            (kept, once + in_forward, saved, needs.forward - in_forward),
            (kept, once + in_backward, saved, needs.backward - in_backward),
            (gradients, once, 0, roots),
        )
        gradients, gathered, saved, working = max(phases, key=sum)
        return RankNeeds(
            parameters=parameters, gradients=gradients, moments=moments, buckets=_buckets(layout, sizes, held),
            gathered=gathered, saved=saved, working=working, fixed=fixed, rank=rank,
        )  # fmt: skip

    def _gathered_bytes(self, layout: Layout, sizes: Bytes) -> int:
        """Bytes of an element of a gathered parameter; 0 where none are."""
        sharding = SHARDINGS[layout.sharding]
        if not sharding.parameters:
            return 0
        return sizes.compute if sharding.in_compute_dtype else sizes.parameters

    def _shards(self, layout: Layout, sizes: Bytes, outside: int) -> Shards | None:
        sharding = SHARDINGS[layout.sharding]
        if not sharding.gradients:
            return None
        return Shards(
            ranks=layout.shard, root=outside,
            block=self.model.local_block(layout.tensor) + self.model.local_experts(layout.tensor, layout.expert),
            gathered_bytes=self._gathered_bytes(layout, sizes) if sharding.gathers == "each pass" else 0,
            reduced_bytes=sizes.gradients,
        )  # fmt: skip

    def _question(self, layout: Layout, stage: "_RankStage") -> _Question:
        return _Question(
            rank_workload(self.workload, layout, stage.blocks), self.model, layout.tensor, layout.context, stage.first,
            stage.last, stage.gradients, stage.shards,
        )  # fmt: skip

    def _stage_needs(self, layout: Layout, stage: "_RankStage", exactly: bool) -> StageNeeds:
        if exactly:
            return _needs(self._question(layout, stage))
        if stage.shards is not None:
            return self._of_units(layout, stage, stage.shards)
        key = self._key(layout, stage)
        if key not in self._known:
            self._known[key] = self._by_corners(layout, stage)
        return self._known[key]

    def _of_units(self, layout: Layout, stage: "_RankStage", shards: Shards) -> StageNeeds:
        """The needs where parameters come and go, from those where they are there: the stage is the same for every
        number of ranks. Forward has two blocks and what is outside whole; backward has a block's gradients and those of
        what is outside on their way besides."""
        plain = self._stage_needs(layout, msgspec.structs.replace(stage, shards=None, gradients="elsewhere"), False)
        gathered = (2 * shards.block + shards.root) * shards.gathered_bytes
        both = gathered + (shards.block + shards.root) * shards.reduced_bytes
        return msgspec.structs.replace(
            plain, forward=plain.forward + gathered, backward=plain.backward + both, gathered_forward=gathered,
            gathered_backward=both,
        )  # fmt: skip

    def _key(self, layout: Layout, stage: "_RankStage") -> tuple[object, ...]:
        return (
            layout.tensor, layout.context, layout.micro_batch, layout.checkpointing, stage,
            SHARDINGS[layout.sharding].in_compute_dtype,
        )  # fmt: skip

    def _by_corners(self, layout: Layout, stage: "_RankStage") -> StageNeeds:
        """The needs by interpolation between few and more blocks, one sequence and two."""
        spans = spans_of(layout.checkpointing, stage.blocks)
        if stage.blocks <= _FEW_BLOCKS or any(span.on_host for span in spans):
            return self._by_tokens(layout, stage)
        if len(spans) > 1:
            return self._of_unlike(layout, stage, spans)
        low, high = (
            self._by_tokens(layout, msgspec.structs.replace(stage, blocks=count))
            for count in (_FEW_BLOCKS - 1, _FEW_BLOCKS)
        )
        return _interpolated(low, high, stage.blocks - _FEW_BLOCKS + 1)

    def _of_unlike(self, layout: Layout, stage: "_RankStage", spans: tuple[Span, ...]) -> StageNeeds:
        """The needs of two spans of blocks, from those of a block of each, and of one more of either."""
        first, last = (span.blocks for span in spans)
        low, longer_first, longer_last = (
            self._by_tokens(
                msgspec.structs.replace(layout, checkpointing=f"selective-{count}"),
                msgspec.structs.replace(stage, blocks=blocks),
            )
            for blocks, count in ((2, 1), (3, 1), (3, 2))
        )
        return _interpolated(_interpolated(low, longer_first, first - 1), longer_last, last - 1, beyond=low)

    def _by_tokens(self, layout: Layout, stage: "_RankStage") -> StageNeeds:
        """The needs of so many tokens, for fused attention from those of a whole sequence and of two."""
        if not self._linear:
            return _needs(self._question(layout, stage))
        corners: list[StageNeeds] = []  # of one sequence and of two
        for micro_batch in (1, 2):
            of_corner = msgspec.structs.replace(layout, micro_batch=micro_batch)
            corner = self._key(of_corner, stage)
            if corner not in self._corners:
                self._corners[corner] = _needs(self._question(of_corner, stage))
            corners.append(self._corners[corner])
        return _interpolated(corners[0], corners[1], layout.micro_batch - 1)


def memory_of_ranks(workload: Workload) -> RankMemory:
    """What a rank needs in any layout of a step that ranks share."""
    alone = msgspec.structs.replace(workload, parallel=NOT_PARALLEL, ranks=1)
    return RankMemory(alone, PlannedModel(config=workload.model))


def sharded_peak(workload: Workload, gpus: int) -> int:
    """Peak bytes on each of so many GPUs that share the step's state by `fully_shard`, block by block, and have each a
    batch as large as the workload's."""
    layout = Layout(
        data=gpus, shard=gpus, sharding="zero3-autocast", micro_batch=workload.micro_batch_size,
        micro_batches=workload.accumulation, checkpointing=workload.checkpointing,
    )  # fmt: skip
    # A layout's ranks share the workload's tokens, and these have as many each.
    of_others = 2 * DISTINCT_BATCHES * 8 * (workload.tokens - workload.tokens // gpus)
    return RankMemory(workload, PlannedModel(config=workload.model)).needs(layout).peak + of_others
