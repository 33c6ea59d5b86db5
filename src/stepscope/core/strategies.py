"""The ways in which several ranks share a training step: a record for each function of training/parallel/strategies/.

Bytes are those that one rank sends for the gradients and the parameters of a step, P bytes of either, by the ring
algorithms that the collectives' lower bounds are of (Patarasuk and Yuan 2009; nccl-tests, doc/PERFORMANCE.md): an
all-reduce sends 2 (n - 1) / n of the message, a reduce-scatter or an all-gather (n - 1) / n. What a strategy sends of
the activations follows from the step's tokens.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from stepscope.core.errors import InputError, choose

NOT_PARALLEL = "none"
"""No ranks share the step."""

SCALINGS = ("both", "strong", "weak")
"""What ranks are given beside one process: its batch, one as large for each rank, or either."""

PARAMETERS, GRADIENTS, OPTIMIZER_STATE = "parameters", "gradients", "optimizer state"
BATCH, SEQUENCE, PRODUCTS, LAYERS = "batch", "sequence", "products", "layers"
"""What a strategy divides among the ranks."""


class Activations(msgspec.Struct, frozen=True, kw_only=True):
    """What the formulas of activations take of a step."""

    tokens: int
    """Of all ranks together."""
    width: int
    """Numbers in a token's residual stream."""
    key_width: int
    """Numbers in a token's keys, and in its values."""
    layers: int
    element_bytes: int
    """Of what products make."""
    residual_bytes: int
    """Of a number in the residual stream."""
    tied_bytes: int = 0
    """Of the weight that embedding and head share; 0 where each has its own."""


class StrategyOption(msgspec.Struct, frozen=True, kw_only=True):
    """A choice within a strategy, as in `fsdp2:reshard=no`."""

    name: str
    words: str
    default: str
    choices: tuple[str, ...] = ()
    """What it may be; empty for a whole number from 1 on."""
    only_with: tuple[str, str] | None = None
    """Another option, and the choice of it with which this one has an effect."""

    @property
    def written(self) -> str:
        """The option with what it may be: `reshard=yes|no`."""
        return f"{self.name}={'|'.join(self.choices) or 'N'}"

    def checked(self, value: str, strategy: str) -> str:
        """The value. Raises InputError for one that it cannot be."""
        allowed = value in self.choices if self.choices else value.isascii() and value.isdigit() and int(value) > 0
        if not allowed:
            may = f"one of {', '.join(self.choices)}" if self.choices else "a whole number from 1 on"
            raise InputError(f"--parallel {strategy}:{self.name}={value}: {self.name} is {may}")
        return value if self.choices else str(int(value))


class StrategyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A way in which ranks share a step."""

    name: str
    words: str
    """What it does, in a sentence."""
    module: str
    """Its file in training/parallel/strategies/, which has a function of its name."""
    is_lesson: bool
    """Whether it is written out here to be read; else the field's own is called."""
    backends: tuple[str, ...] = ("gloo", "nccl")
    splits: str = BATCH
    """What is divided among the ranks."""
    near: int = 1
    """How many ranks in a row divide each product among themselves and take the same part of the batch."""
    shards: tuple[str, ...] = ()
    """What each rank keeps a part of alone, between steps; the rest it keeps whole."""
    moves: tuple[float, float] | None = None
    """How often the bytes of all gradients, and those of all parameters, move between the ranks in a step, of which a
    rank sends (n - 1) / n each time: an all-reduce moves them twice; None where no formula is known."""
    activations: Literal["", "borders", "keys", "products"] = ""
    """What it sends of the activations (`sends_activations`); empty where it sends none, or no formula is known."""
    fills_buckets: bool = False
    """Whether buckets hold every gradient once more, from the first backward on: without gradient_as_bucket_view no
    gradient is a view of its bucket (PyTorch, torch/csrc/distributed/c10d/reducer.cpp, `initialize_buckets`)."""
    attentions: tuple[str, ...] = ()
    """The attentions that it can spread; empty for any."""
    options: tuple[StrategyOption, ...] = ()
    settings: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    """What was chosen of the options."""
    gathers_by_call: bool = False
    """Whether parameters come and go with the calls of the modules that own them."""
    captured: bool = False
    """Whether CUDA graphs can hold a rank's step: what it begins, it waits for on the device within the same phase."""
    splits_stream: bool = False
    """Whether ranks that divide products divide the residual stream between them by sequence."""
    dtensors: bool = False
    """Whether parameters are PyTorch's DTensors, which operators and kernels of one process do not take."""
    textbook_only: bool = False
    """Whether it needs the textbook's model, whose modules it knows by name."""

    def sends(self, gradients: int, parameters: int, ranks: int) -> float | None:
        """The bytes that a rank sends in a step, by the bytes of all gradients and parameters; None where no formula is
        known. Parameters that are not let go after forward are gathered once in place of twice; in 16 bits, one is half
        as long as in fp32."""
        if self.moves is None:
            return None
        of_gradients, of_parameters = self.moves
        of_parameters -= self.settings.get("reshard") == "no"
        of_parameters /= 2 if self.settings.get("compute") == "bf16" else 1
        return (ranks - 1) / ranks * (of_gradients * gradients + of_parameters * parameters)

    def sends_activations(self, step: Activations, ranks: int) -> float:
        """The bytes of activations and of their gradients that a rank sends besides, in the mean of the ranks.

        borders: the residual stream of every token goes from each stage to the next, and its gradient back (Narayanan
        et al. 2021, section 3.2): over all ranks, once each way for every border between stages on different ranks. The
        first rank and the last add up the gradient of a weight that both have: of two ranks, an all-reduce sends it
        once from each.
        keys: each block gathers keys and values in forward, and reduces their gradients to the ranks that own them
        (Llama Team 2024, The Llama 3 Herd of Models, section 3.3.2, on context parallelism by all-gather).
        products: each block all-reduces two outputs of products in forward, and two gradients of what it took from the
        residual stream in backward (Shoeybi et al. 2019, Megatron-LM, section 3).
        """
        others = (ranks - 1) / ranks
        match self.activations:
            case "borders" if ranks > 1:
                borders = ranks * self._chunks - 1
                return 2 * (borders * step.tokens * step.width * step.residual_bytes + step.tied_bytes) / ranks
            case "keys":
                return 4 * others * step.tokens * step.key_width * step.layers * step.element_bytes
            case "products":
                each = step.tokens * step.width * step.layers
                return 4 * others * each * (step.element_bytes + step.residual_bytes)
            case _:
                return 0.0

    @property
    def cuts_sums(self) -> bool:
        """Whether ranks add up parts of a sum that one process adds up whole."""
        return self.splits in (PRODUCTS, SEQUENCE) or self.near > 1

    def chosen(self, option: str) -> str:
        """What was chosen of an option, or its default."""
        return self.settings.get(option) or next(one.default for one in self.options if one.name == option)

    def stages(self, ranks: int) -> int:
        """Into how many stages it divides the model's blocks; 1 where it does not."""
        return ranks * self._chunks if self.splits == LAYERS else 1

    @property
    def _chunks(self) -> int:
        """Stages of each rank of a pipeline."""
        return int(self.chosen("chunks")) if self.chosen("schedule") == "interleaved" else 1

    def micro_batches(self, ranks: int, accumulation: int) -> int:
        """The micro-batches of a step: in a pipeline of which nobody said how many, as many as it has stages."""
        return accumulation if accumulation > 1 else self.stages(ranks)


_BUCKET = StrategyOption(name="bucket", default="25", words="MiB of gradients in a message")
_COMPUTE = StrategyOption(
    name="compute",
    default="own",
    choices=("own", "bf16"),
    words="the dtype in which parameters are gathered and used; shards and gradients keep theirs",
)
_NORMS = StrategyOption(
    name="norms",
    default="sharded",
    choices=("sharded", "whole"),
    words="whether parameters of modules without a matrix, such as norms, are sharded, or whole on every rank",
)

STRATEGIES: dict[str, StrategyRecord] = {
    record.name: record
    for record in (
        StrategyRecord(
            name="ddp-naive", module="ddp_textbook", is_lesson=True, captured=True, moves=(2, 0),
            words="All-reduces each gradient by itself, after backward.",
        ),
        StrategyRecord(
            name="ddp-flat", module="ddp_textbook", is_lesson=True, captured=True, moves=(2, 0),
            words="All-reduces all gradients as one tensor, after backward.",
        ),
        StrategyRecord(
            name="ddp-overlap", module="ddp_textbook", is_lesson=True, captured=True, moves=(2, 0),
            words="All-reduces each gradient while backward goes on, as soon as it is ready.",
        ),
        StrategyRecord(
            name="ddp-bucketed", module="ddp_textbook", is_lesson=True, captured=True, moves=(2, 0),
            words="All-reduces gradients in buckets of 25 MiB while backward goes on.", options=(_BUCKET,),
        ),
        StrategyRecord(
            name="zero1", module="zero1", is_lesson=True, captured=True, shards=(OPTIMIZER_STATE,),
            moves=(2, 1),
            words="Keeps the optimizer's state of a part of the parameters on each rank, which updates that part and "
            "sends it to the others.",
        ),
        StrategyRecord(
            name="fsdp-textbook", module="fsdp_textbook", is_lesson=True, moves=(1, 2), gathers_by_call=True,
            shards=(PARAMETERS, GRADIENTS, OPTIMIZER_STATE), options=(_COMPUTE, _NORMS),
            words="Keeps a shard of each parameter on each rank, gathers a block's for its forward and its backward, "
            "and reduces its gradients to their shards.",
        ),
        StrategyRecord(
            name="context-textbook", module="context", is_lesson=True, splits=SEQUENCE, textbook_only=True,
            attentions=("reference", "sdpa"), moves=(2, 0), activations="keys",
            words="Splits each sequence: a rank takes a chunk near its head and one near its tail, gathers the keys "
            "and values of all, and averages gradients as ddp-bucketed does.",
        ),
        StrategyRecord(
            name="ddp", module="pytorch", is_lesson=False, moves=(2, 0), fills_buckets=True,
            words="PyTorch's DistributedDataParallel.",
            options=(
                _BUCKET,
                StrategyOption(
                    name="unused", default="no", choices=("no", "yes"),
                    words="whether each step looks for parameters that got no gradient",
                ),
            ),
        ),
        StrategyRecord(
            name="fsdp2", module="pytorch", is_lesson=False, moves=(1, 2), dtensors=True,
            shards=(PARAMETERS, GRADIENTS, OPTIMIZER_STATE),
            words="PyTorch's fully_shard, block by block.",
            options=(
                StrategyOption(
                    name="reshard", default="yes", choices=("yes", "no"),
                    words="whether a block's parameters are let go after forward, and gathered again",
                ),
                StrategyOption(
                    name="offload", default="no", choices=("no", "yes"),
                    words="whether shards, gradients and optimizer state lie in the host's memory",
                ),
                _COMPUTE,
            ),
        ),
        StrategyRecord(
            name="tensor", module="tensor", is_lesson=False, splits=PRODUCTS, textbook_only=True, dtensors=True,
            shards=(PARAMETERS, GRADIENTS, OPTIMIZER_STATE), activations="products",
            words="PyTorch's parallelize_module: heads and the feed-forward's width are split over the ranks, and "
            "activations are all-reduced twice a block.",
        ),
        StrategyRecord(
            name="tensor-sequence", module="tensor", is_lesson=False, splits=PRODUCTS, textbook_only=True,
            dtensors=True, splits_stream=True,
            shards=(PARAMETERS, GRADIENTS, OPTIMIZER_STATE),
            words="As tensor, and what lies between the split products, embedding and head are split, too: norms and "
            "residual stream by the sequence.",
        ),
        StrategyRecord(
            name="fsdp2-tensor", module="tensor", is_lesson=False, textbook_only=True, near=2, dtensors=True,
            splits_stream=True,
            shards=(PARAMETERS, GRADIENTS, OPTIMIZER_STATE),
            words="Pairs of ranks run tensor-sequence on the same samples, and fsdp2 shards their parts across pairs.",
        ),
        StrategyRecord(
            name="pipeline", module="pipeline", is_lesson=False, splits=LAYERS, textbook_only=True,
            shards=(PARAMETERS, GRADIENTS, OPTIMIZER_STATE), moves=(0, 0),
            activations="borders",
            options=(
                StrategyOption(
                    name="schedule", default="1f1b", choices=("1f1b", "gpipe", "interleaved"),
                    words="the order of micro-batches",
                ),
                StrategyOption(
                    name="chunks", default="2", words="stages of a rank", only_with=("schedule", "interleaved")
                ),
            ),
            words="PyTorch's pipeline schedules: each rank has some of the blocks, and micro-batches go through.",
        ),
        StrategyRecord(
            name="context", module="context", is_lesson=False, splits=SEQUENCE, textbook_only=True, backends=("nccl",),
            attentions=("sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn"), moves=(2, 0),
            words="PyTorch's context_parallel: each sequence is split over the ranks, whose attention passes keys and "
            "values round; on GPUs alone.",
        ),
    )
}  # fmt: skip
"""Every strategy, by its name; lessons first, in the order in which they are learned."""

ALONE = StrategyRecord(name=NOT_PARALLEL, module="", is_lesson=False, captured=True, words="One process runs the step.")
"""What stands in a strategy's place where no ranks share the step."""


def option_words() -> str:
    """Every option of a strategy, and which strategies take it, in a line."""
    takers: dict[str, list[str]] = {}
    for record in STRATEGIES.values():
        for option in record.options:
            takers.setdefault(option.written, []).append(record.name)
    return ", ".join(f"{option} ({' and '.join(names)})" for option, names in takers.items())


def shared_somehow(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What was chosen of a workload, with PyTorch's DDP for ranks of which nobody said how they share the step: what a
    search begins with."""
    return {"parallel": "ddp", **chosen} if chosen.get("ranks", 1) > 1 else dict(chosen)


def strategy_named(parallel: str) -> StrategyRecord:
    """The strategy of that name, with what is chosen of its options, as in `fsdp2:reshard=no:offload=yes`. Raises
    InputError for what there is not."""
    name, *chosen = parallel.split(":")
    choose(name, (NOT_PARALLEL, *STRATEGIES), "parallel")
    if name == NOT_PARALLEL:
        raise InputError(f"--parallel {NOT_PARALLEL} takes no options")
    record = STRATEGIES[name]
    if not chosen:
        return record
    options = {option.name: option for option in record.options}
    settings: dict[str, str] = {}
    for word in chosen:
        option, sign, value = word.partition("=")
        if "," in value:
            raise InputError(
                f"--parallel {parallel}: several options are joined by colons, as in {name}:{word.replace(',', ':')}"
            )
        if option in settings:
            raise InputError(f"--parallel {parallel}: {option} is said twice, leave out one of them")
        if option not in options or not sign:
            takes = ", ".join(one.written for one in record.options) or "no options"
            raise InputError(f"--parallel {parallel}: {name} takes {takes}, and not {word!r} here")
        settings[option] = options[option].checked(value, name)
    for option in (options[one] for one in settings):
        if option.only_with and settings.get(option.only_with[0]) != option.only_with[1]:
            raise InputError(
                f"--parallel {parallel}: {option.name} has an effect with {'='.join(option.only_with)} alone"
            )
    return replace(record, settings=settings)


def known_strategy(parallel: str) -> StrategyRecord | None:
    """The strategy of a stored run, with its options; None where ranks share nothing, or this release knows none of
    that name."""
    try:
        return strategy_named(parallel)
    except InputError:
        return None


def spelled(parallel: str) -> str:
    """The same strategy and options in one spelling: in the record's order, without what is the default."""
    if parallel == NOT_PARALLEL:
        return parallel
    record = strategy_named(parallel)
    chosen = [(option, record.settings.get(option.name, option.default)) for option in record.options]
    words = [f"{option.name}={value}" for option, value in chosen if value != option.default]
    return ":".join([record.name, *words])


def computes_in_16_bits(parallel: str) -> bool:
    """Whether ranks gather bf16 copies of parameters whose shards are fp32."""
    return ":compute=bf16" in parallel


def strategy_of(parallel: str) -> StrategyRecord:
    """The strategy of a workload, with what is chosen of its options; ALONE where no ranks share the step."""
    return ALONE if parallel == NOT_PARALLEL else strategy_named(parallel)


def batch_parts(parallel: str, ranks: int) -> int:
    """Over how many ranks this strategy splits the batch: each part is another's work. Raises InputError where so many
    ranks cannot share a step by it."""
    record = strategy_of(parallel)
    if ranks % record.near:
        raise InputError(f"--parallel {parallel} takes ranks by {record.near}, not {ranks}: choose a multiple")
    return ranks // record.near if record.splits == BATCH else 1
