"""The peak memory of one rank of a layout: states by count, activations by running its stage symbolically.

A rank holds, with P parameters on it, n ranks in its shard group, and p, g, c, o bytes of a stored parameter, a
gradient, a copy in the compute dtype and both moments (Rajbhandari et al. 2020, section 3.1):

                parameters              gradients       moments
    ddp         P p                     P g             P o
    zero1       P p                     P g             P o / n
    zero1-master  P p / n + P c         P g             P o / n
    zero2       P p / n + P c           P g / n         P o / n
    zero3       P p / n + 2 blocks c    P g / n         P o / n      (and embedding and head: see `sharding.py`)

Where gradients are sharded, those of two blocks are on their way. Beside that, a rank holds what its schedule has in
flight: each chunk's saved activations, and what the chunk at work needs more.
"""

import functools
import math

import msgspec

from stepscope.core.attentions import scores_of
from stepscope.core.layout import SHARDINGS, Layout
from stepscope.core.precisions import PRECISIONS
from stepscope.core.workload import Workload
from stepscope.memory.prediction.estimate import DISTINCT_BATCHES, WORKSPACE_BYTES
from stepscope.memory.prediction.rank_model import Share
from stepscope.memory.prediction.stages import Gradients, Moved, Stage, StageNeeds, moved_by_stage, stage_needs
from stepscope.work.communication import Bytes
from stepscope.work.pipelines import chunks_in_flight
from stepscope.work.planned_model import PlannedModel, largest_stage
from stepscope.work.transformer import moment_bytes

_MIXED = ("bf16", "fp16")
_FEW_BLOCKS = 2
"""Stages of at most so many blocks are run as they are; larger ones follow from 1 and 2, since blocks are alike."""


class RankNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the rank that needs most, by what they are, at its peak."""

    parameters: int
    gradients: int
    moments: int
    gathered: int
    """Copies of parameters in the compute dtype, and gradients on their way."""
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
        return self.parameters + self.gradients + self.moments + self.gathered + self.saved + self.working + self.fixed


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
    checkpointing = layout.checkpointing
    if checkpointing.startswith("every-"):
        checkpointing = f"every-{min(blocks, int(checkpointing.removeprefix('every-')))}"
    return msgspec.structs.replace(
        workload,
        model=msgspec.structs.replace(workload.model, layers=blocks),
        batch_size=layout.micro_batch,
        seq_len=workload.seq_len // layout.context,
        dtype="bf16-pure" if pure else workload.dtype,
        checkpointing=checkpointing,
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


@functools.lru_cache(maxsize=65536)
def _needs(question: _Question) -> StageNeeds:
    return stage_needs(_stage(question))


def _stage(question: _Question) -> Stage:
    share = Share(model=question.model, tensor=question.tensor, context=question.context)
    return Stage(
        workload=question.workload, share=share, first=question.first, last=question.last,
        gradients=question.gradients,
    )  # fmt: skip


def _interpolated(low: StageNeeds, high: StageNeeds, steps: float) -> StageNeeds:
    """The needs so many steps beyond `low`, where `high` is one step beyond it."""
    return StageNeeds(
        forward=low.forward + math.ceil((high.forward - low.forward) * steps),
        backward=low.backward + math.ceil((high.backward - low.backward) * steps),
        saved=low.saved + math.ceil((high.saved - low.saved) * steps),
    )


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
        return sum(self._states(layout, self._sizes[layout.sharding], self._held(layout, 0)))

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
            questions = (self._question(one, blocks, first, last, "elsewhere") for one in of_sizes)
            self._moved[key] = tuple(moved_by_stage(_stage(question)) for question in questions)
        one, two = self._moved[key]
        more = layout.micro_batch - 1
        return Moved(
            forward=one.forward + more * (two.forward - one.forward),
            backward=one.backward + more * (two.backward - one.backward),
            kernels_forward=one.kernels_forward,
            kernels_backward=one.kernels_backward,
        )

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
        whole = not sharding.gradients
        made_here = whole and layout.micro_batches * layout.chunks == 1 and self.model.experts == 1
        chunk = largest_stage(self.model.config.layers, layout.stages)
        needs = self._stage_needs(layout, rank, chunk, "made" if made_here else "elsewhere", exactly)
        gathered = self._gathered(layout, sizes, held)
        in_flight = chunks_in_flight(layout, rank) - 1
        saved = in_flight * needs.saved
        kept = 0 if made_here else gradients
        fixed = 2 * WORKSPACE_BYTES + 2 * DISTINCT_BATCHES * 8 * self.workload.tokens // layout.data // layout.context
        copies = gathered if sharding.gathers == "each pass" else 0
        on_their_way = copies if sharding.gradients else 0
        roots = moments // 2 if self.workload.optimizer == "adamw-foreach" else 0
        phases = (
            (kept, gathered, saved, needs.forward),
            (kept, gathered + on_their_way, saved, needs.backward),
            (gradients, gathered - copies, 0, roots),
        )
        gradients, gathered, saved, working = max(phases, key=sum)
        return RankNeeds(
            parameters=parameters, gradients=gradients, moments=moments, gathered=gathered, saved=saved,
            working=working, fixed=fixed, rank=rank,
        )  # fmt: skip

    def _gathered(self, layout: Layout, sizes: Bytes, held: tuple[int, int, int]) -> int:
        sharding = SHARDINGS[layout.sharding]
        if not sharding.parameters:
            return 0
        dense, experts, outside = held
        size = sizes.compute if sharding.in_compute_dtype else sizes.parameters
        if sharding.gathers == "once":
            return (dense + experts + outside) * size
        block = self.model.local_block(layout.tensor) + self.model.local_experts(layout.tensor, layout.expert)
        return (2 * block + outside) * size

    def _question(self, layout: Layout, blocks: int, first: bool, last: bool, gradients: Gradients) -> _Question:
        return _Question(
            rank_workload(self.workload, layout, blocks), self.model, layout.tensor, layout.context, first, last,
            gradients,
        )  # fmt: skip

    def _stage_needs(self, layout: Layout, rank: int, blocks: int, gradients: Gradients, exactly: bool) -> StageNeeds:
        first, last = rank == 0, rank == layout.pipeline - 1
        if layout.chunks > 1 and layout.pipeline > 1 and last:
            first = False  # the embedding is in another chunk
        if exactly:
            return _needs(self._question(layout, blocks, first, last, gradients))
        key = (
            layout.tensor, layout.context, layout.micro_batch, layout.checkpointing, blocks, first, last, gradients,
            SHARDINGS[layout.sharding].in_compute_dtype,
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = self._by_corners(layout, blocks, first, last, gradients)
        return self._known[key]

    def _by_corners(self, layout: Layout, blocks: int, first: bool, last: bool, gradients: Gradients) -> StageNeeds:
        """The needs by interpolation between few and more blocks, one sequence and two."""
        if blocks > _FEW_BLOCKS:
            low, high = (
                self._by_tokens(layout, count, first, last, gradients) for count in (_FEW_BLOCKS - 1, _FEW_BLOCKS)
            )
            return _interpolated(low, high, blocks - _FEW_BLOCKS + 1)
        return self._by_tokens(layout, blocks, first, last, gradients)

    def _by_tokens(self, layout: Layout, blocks: int, first: bool, last: bool, gradients: Gradients) -> StageNeeds:
        """The needs of so many tokens, for fused attention from those of a whole sequence and of two."""
        if not self._linear:
            return _needs(self._question(layout, blocks, first, last, gradients))
        corners: list[StageNeeds] = []  # of one sequence and of two
        for micro_batch in (1, 2):
            corner = (
                layout.tensor, layout.context, micro_batch, layout.checkpointing, blocks, first, last, gradients,
                SHARDINGS[layout.sharding].in_compute_dtype,
            )  # fmt: skip
            if corner not in self._corners:
                of_corner = msgspec.structs.replace(layout, micro_batch=micro_batch)
                self._corners[corner] = _needs(self._question(of_corner, blocks, first, last, gradients))
            corners.append(self._corners[corner])
        return _interpolated(corners[0], corners[1], layout.micro_batch - 1)
