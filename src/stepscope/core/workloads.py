"""A Workload: everything that makes two measurements the same experiment. The device is not part of it.

It is a model with choices of its step. The textbook's model has `sizes`, from which formulas say its work and memory
before anything runs. Of a user's, made by a factory or watched in a loop, `sizes` is None, and what was found is known.
A stored run tells them apart by `kind`; whoever asks whether there are formulas asks for `sizes`.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

import msgspec

from stepscope.core.checkpointing import (
    CHECKPOINTING_CHOICES,
    KEEPING,
    OFFLOAD,
    Span,
    group_of,
    nested_of,
    offload_of,
    selective_of,
    spans_of,
)
from stepscope.core.errors import InputError, choose
from stepscope.core.files import identity_of, sha256_of
from stepscope.core.model_config import LARGEST, PRESETS, ModelConfig, configure, whole_number
from stepscope.core.parts import (
    ATTENTIONS,
    PARTS,
    REFERENCE,
    Attention,
    Kernels,
    Part,
    attention_names,
    choose_name,
    is_kept,
    name_word,
)
from stepscope.core.precisions import PRECISIONS, Dtype
from stepscope.core.strategies import (
    BATCH,
    NOT_PARALLEL,
    PRODUCTS,
    SEQUENCE,
    STRATEGIES,
    StrategyRecord,
    batch_parts,
    computes_in_16_bits,
    spelled,
    strategy_of,
)
from stepscope.core.units import format_count

Phase = Literal["forward", "forward-backward", "train"]
"""forward: inference under no_grad, logits only. forward-backward: loss and gradients. train: and the optimizer."""

Compile = Literal["eager", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "blocks"]
"""How the model runs: eager, or in a mode of torch.compile. blocks: each block by itself, in the default mode, so that
its gradients are ready when its own backward ends and not when the whole model's does."""

Graph = Literal["none", "step"]
"""step: the whole step (forward, backward, optimizer) is captured into CUDA graphs and replayed."""

Projections = Literal["apart", "joint"]
"""joint: projections of one input (query, key and value; gate and up) are one product, forward and backward. Their
weights stay parameters of their own, and lie one behind the other in memory. In a user's model convolutions of patches,
whose stride is their kernel, are one product, too."""

GRAPH_WARMUP = 4
"""Steps until a step is replayed: three run as they are, and the next is captured."""

Optimizer = Literal[
    "adamw-foreach",
    "adamw-fused",
    "adamw-loop",
    "adamw-bf16-state",
    "adamw-one-launch",
    "adamw-under-backward",
    "adamw-8bit",
    "torchao.AdamW8bit",
    "torchao.AdamW4bit",
    "torchao.AdamWFp8",
    "bitsandbytes.AdamW8bit",
    "bitsandbytes.PagedAdamW8bit",
]
"""adamw-foreach, -fused, -loop: PyTorch's AdamW, by that implementation. adamw-bf16-state: AdamW that keeps exp_avg and
exp_avg_sq in bf16; parameters and arithmetic stay fp32. adamw-one-launch: by one kernel for all parameters.
adamw-under-backward: the same, begun as each gradient is ready. adamw-8bit: the same in one launch, with moments in 8
bits. LIBRARY.CLASS: another library's, whose states have 8 or 4 bits a number; for a user's module alone."""

OF_ONE_LAUNCH: tuple[str, ...] = ("adamw-one-launch", "adamw-under-backward", "adamw-8bit")
"""The optimizers by the kernel for all parameters."""

ROUNDED_STATES = {"adamw-bf16-state": ("bf16", "16 bits"), "adamw-8bit": ("8 bits", "8 bits")}
"""How those that round their moments keep them: what it is called, and how many bits it has."""

NO_CLIP = "none"
"""What says of `clip` that gradients are not clipped, where an option must say it: on a sweep's axis."""

DTYPES: tuple[str, ...] = tuple(PRECISIONS)
PHASES: tuple[str, ...] = get_args(Phase)
COMPILES: tuple[str, ...] = get_args(Compile)
GRAPHS: tuple[str, ...] = get_args(Graph)
PROJECTIONS: tuple[str, ...] = get_args(Projections)
OPTIMIZERS: tuple[str, ...] = tuple(name for name in get_args(Optimizer) if "." not in name)
OF_LIBRARIES: tuple[str, ...] = tuple(name for name in get_args(Optimizer) if "." in name)
"""The optimizers that other libraries bring."""

_FIRST_FIELDS = ("model", "batch_size", "seq_len", "dtype", "phase", "attention", "compile", "optimizer", "seed")
"""The fields that every digest has, see core/files.py. Do not add to it."""


_BESIDE_SIZES = (
    "dtype", "phase", "attention", "compile", "optimizer", "norm", "rope", "mlp", "loss", "projections",
    "checkpointing", "accumulation", "parallel", "ranks", "clip",
)  # fmt: skip
"""The fields of a textbook's step that are no sizes, and that its memory depends on."""


class StepChoices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a step is asked to be, whatever its model."""

    dtype: Dtype = "fp32"
    phase: Phase = "train"
    compile: Compile = "eager"
    optimizer: Optimizer | str | None = "adamw-foreach"
    """One of OPTIMIZERS, or the class of a user's own; None where no optimizer steps."""
    checkpointing: str = "none"
    """One of CHECKPOINTING_CHOICES (core/checkpointing.py): what is run again in backward instead of being kept."""
    accumulation: int = 1
    """Number of micro-batches in a step: each runs forward and backward, gradients add up, the optimizer steps once."""
    graph: Graph = "none"
    """Whether the step is replayed as CUDA graphs."""
    clip: float | None = None
    """The bound on the gradients' global L2 norm, to which the optimizer's phase scales them down; None for none."""
    parallel: str = NOT_PARALLEL
    """How several ranks share a step: one of core/strategies.py, perhaps with options, or that none do."""
    ranks: int = 1
    """The processes that take part in a step, a device each. Batch sizes are those of all ranks together."""

    def __post_init__(self) -> None:
        choose(self.dtype, DTYPES, "dtype")
        choose(self.phase, PHASES, "phase")
        choose(self.compile, COMPILES, "compile mode")
        choose(self.graph, GRAPHS, "graph")
        whole_number(self.accumulation, "accumulation", 1, LARGEST)
        clip = cast("object", self.clip)  # a stored record may hold anything
        if clip == NO_CLIP:
            clip = None
        if clip is not None:
            if isinstance(clip, bool) or not isinstance(clip, (int, float)) or not 0 < clip < math.inf:
                raise InputError(
                    f"clip is {clip!r:.40}: give the highest norm of the gradients, a number above 0, as in 1.0"
                )
            clip = float(clip)
        msgspec.structs.force_setattr(self, "clip", clip)
        msgspec.structs.force_setattr(self, "parallel", spelled(self.parallel))
        whole_number(self.ranks, "ranks", 1, LARGEST)
        self._check_together()

    def _check_together(self) -> None:
        """Raise InputError for choices that exclude each other."""
        masters, shared = PRECISIONS[self.dtype].masters > 0, self.parallel != NOT_PARALLEL
        trains, replayed = self.phase == "train", self.graph == "step"
        of_one_launch = trains and self.optimizer in OF_ONE_LAUNCH
        bf16_state = trains and self.optimizer == "adamw-bf16-state"
        of_library = trains and self.optimizer in OF_LIBRARIES
        captured = ", ".join(name for name, record in STRATEGIES.items() if record.captured)
        other = "bf16" if self.dtype == "bf16-master" else self.dtype
        faults = (
            (
                not shared and self.ranks > 1,
                f"{self.ranks} ranks need a way to share the step: say --parallel, as in --parallel ddp",
            ),
            (
                shared and self.phase == "forward",
                f"--parallel {self.parallel} shares a training step: leave out --phase forward",
            ),
            (
                computes_in_16_bits(self.parallel) and PRECISIONS[self.dtype].tensors != "bf16",
                f"--parallel {self.parallel} computes in bf16: say --dtype bf16, or leave out compute=bf16",
            ),
            (
                self.compile != "eager" and self.strategy.stages(self.ranks) > 1,
                f"--parallel {self.parallel} runs its stages eagerly: leave out --compile {self.compile}",
            ),
            (
                replayed and self.compile in ("reduce-overhead", "max-autotune"),
                f"compile mode {self.compile} captures CUDA graphs of its own, which --graph step cannot hold: "
                "choose default, blocks or max-autotune-no-cudagraphs",
            ),
            (
                replayed and (bf16_state or of_library),
                f"{self.optimizer} counts its updates on the host, which --graph step does not replay: "
                "choose adamw-one-launch",
            ),
            (
                masters and (bf16_state or of_library),
                f"{self.optimizer} keeps no master weights: with dtype {self.dtype} choose another AdamW",
            ),
            (
                self.dtype == "bf16-pure" and of_one_launch,
                f"{self.optimizer} keeps master weights of what is bf16: with it choose dtype bf16-master",
            ),
            (
                self.dtype == "fp16" and of_one_launch,
                f"{self.optimizer} takes no scaled gradients: choose dtype bf16 or bf16-master",
            ),
            (
                replayed and not self.strategy.captured,
                f"graph step holds no step that is shared by {self.parallel}: choose one of {captured}",
            ),
            (
                shared and masters and not (PRECISIONS[self.dtype].scaled and computes_in_16_bits(self.parallel)),
                f"dtype {self.dtype} has bf16 weights beside masters, for a step that one process runs: say --dtype "
                f"{other} --parallel fsdp2:compute=bf16, where the shards are the masters",
            ),
            (
                shared and self.optimizer == "adamw-under-backward",
                "optimizer adamw-under-backward is for a step that one process runs: leave out --parallel, or choose "
                "another",
            ),
            (
                self.strategy.dtensors and (bf16_state or of_one_launch),  # they update plain tensors alone
                f"optimizer {self.optimizer} does not update the DTensors of --parallel {self.parallel}: choose "
                "--optimizer adamw-fused, or a lesson",
            ),
            (
                self.clip is not None and ":offload=yes" in self.parallel and trains,
                f"--parallel {self.parallel} keeps gradients in the host's memory, and ranks cannot add up their norm "
                "there: leave out --clip, or offload=yes",
            ),
        )
        if fault := next((why for is_one, why in faults if is_one), None):
            raise InputError(fault)

    @property
    def strategy(self) -> StrategyRecord:
        """How ranks share the step, with what is chosen of its options."""
        return strategy_of(self.parallel)

    @property
    def batch_parts(self) -> int:
        """Over how many ranks the batch is split, each with a part of its own."""
        return batch_parts(self.parallel, self.ranks)

    @property
    def token_parts(self) -> int:
        """Over how many ranks the tokens of a step are split."""
        return self.batch_parts * (self.ranks if self.strategy.splits == SEQUENCE else 1)

    @property
    def one_by_one(self) -> bool:
        """Whether operators run one by one, as blocks that offload need it."""
        return self.compile == "eager" and self.graph == "none"

    def without_what_has_no_effect(self) -> None:
        """Set to its default, while the record is made, what changes nothing in this phase: it must not split cells."""
        settled: dict[str, object] = {}
        if self.phase == "forward":
            # Inference keeps nothing for backward and has no gradients to add up.
            settled |= {"checkpointing": "none", "accumulation": 1}
        if self.phase != "train":
            settled |= {"optimizer": None, "clip": None}
        for field, value in settled.items():
            msgspec.structs.force_setattr(self, field, value)

    @property
    def choice_words(self) -> dict[str, str]:
        """The words of a key for the choices that are not the usual, by field."""
        optimizer = self.optimizer or ""
        return {
            "compile": f"compile-{self.compile}" if self.compile != "eager" else "",
            "graph": f"graph-{self.graph}" if self.graph != "none" else "",
            "optimizer": optimizer if optimizer != "adamw-foreach" else "",
            "clip": f"clip-{self.clip:g}" if self.clip is not None else "",
            "checkpointing": f"checkpoint-{self.checkpointing}" if self.checkpointing != "none" else "",
            "accumulation": f"accumulate-{self.accumulation}" if self.accumulation != 1 else "",
            "parallel": re.sub("[:=]", "-", f"{self.parallel}-x{self.ranks}") if self.parallel != NOT_PARALLEL else "",
        }


class TextbookWorkload(StepChoices, frozen=True, kw_only=True, tag_field="kind", tag="textbook"):
    """One experiment with the textbook's model. Equal Workloads are the same experiment, and only those share a key."""

    model: ModelConfig
    batch_size: int = 4
    """All sequences of a step, whatever the accumulation."""
    seq_len: int = 512
    attention: Attention = "reference"
    norm: Kernels = REFERENCE
    rope: Kernels = REFERENCE
    mlp: Kernels = REFERENCE
    loss: Kernels = REFERENCE
    """How each part is computed: the textbook's code, or another implementation of core/parts.py."""
    projections: Projections = "apart"
    seed: int = 0
    factory: ClassVar[str] = ""
    arguments: ClassVar[Mapping[str, Any]] = {}
    by_factory: ClassVar[tuple[str, ...]] = ()
    may_run: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.model, ModelConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"the workload's model is {self.model!r}: give a ModelConfig, as from configure('small')")
        whole_number(self.batch_size, "batch_size", 1, LARGEST)
        whole_number(self.seq_len, "seq_len", 1, LARGEST)
        whole_number(self.seed, "seed", 0, LARGEST)
        whole_number(self.tokens, "batch_size x seq_len", 1, LARGEST)
        super().__post_init__()
        msgspec.structs.force_setattr(self, "attention", choose_name(self.attention, attention_names(), "attention"))
        self._check_parts()
        if self.optimizer in OF_LIBRARIES:
            raise InputError(
                f"optimizer {self.optimizer} is for a model of your own, as by --module or --model config.json: choose "
                f"one of {', '.join(OPTIMIZERS)}"
            )
        if self.optimizer is not None or self.phase == "train":
            choose(str(self.optimizer), OPTIMIZERS, "optimizer")
        self._check_checkpointing()
        self._check_division()
        self.without_what_has_no_effect()
        if self.phase == "forward":
            msgspec.structs.force_setattr(self, "loss", REFERENCE)  # inference ends with the logits

    @property
    def key(self) -> str:
        """A readable name of the cell, safe in file names, that ends in a digest of every field."""
        return "-".join([*self.words(), _digest(self.identity)])

    @property
    def alike(self) -> object:
        """Equal of workloads that are the same experiment."""
        return self

    @property
    def sizes(self) -> ModelConfig:
        """The sizes of the model, from which formulas say its work and memory."""
        return self.model

    @property
    def layers(self) -> int:
        """The model's blocks; 0 where they are not known."""
        return self.model.layers

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.name

    @property
    def origin(self) -> str:
        """What the model is, in words: its sizes."""
        return ", ".join(f"{field} {format_count(size)}" for field, size in self.model.sizes.items())

    @property
    def named(self) -> dict[str, str | int]:
        """What names the model and its batch, by field."""
        return {"model": self.model.name, "batch_size": self.batch_size, "seq_len": self.seq_len}

    @property
    def spelled(self) -> list[tuple[str, object]] | None:
        """What is not the usual, by the names that options and arguments share; None where those cannot say it."""
        preset = self.model.name.partition("+")[0]
        if preset not in PRESETS:
            return None
        of_model = _different(self.model, configure(preset), without=("name",))
        usual = TextbookWorkload(model=self.model, phase=self.phase)
        return [("model", preset), *of_model, *_choices(self, usual, without=("model", "phase"))]

    def words(self, *without: str) -> list[str]:
        """The words of the key, but for these fields: sizes, and choices that are not the usual."""
        words = {
            "model": self.model.name,
            "batch_size": f"b{self.batch_size}",
            "seq_len": f"s{self.seq_len}",
            "dtype": self.dtype,
            "phase": self.phase,
            "attention": name_word(self.attention) if self.attention != "reference" else "",
            **part_words(self.parts),
            "projections": f"{self.projections}-projections" if self.projections != "apart" else "",
            **self.choice_words,
        }
        return [word for field, word in words.items() if word and field not in without]

    @property
    def identity(self) -> dict[str, object]:
        """What digests are made of: the fields of the workload and of its model."""
        return {**identity_of(self, _FIRST_FIELDS), "model": self.model.identity}

    @property
    def parts(self) -> dict[Part, Kernels]:
        """How each part of core/parts.py is computed."""
        return {"norm": self.norm, "rope": self.rope, "mlp": self.mlp, "loss": self.loss}

    @property
    def tokens(self) -> int:
        """Tokens in one step."""
        return self.batch_size * self.seq_len

    @property
    def micro_batch_size(self) -> int:
        """Sequences in one forward pass."""
        return self.batch_size // self.accumulation

    @property
    def spans(self) -> tuple[Span, ...]:
        """The model's blocks, from the first to the last, by what they keep for backward."""
        return spans_of(self.checkpointing, self.model.layers)

    def at_most(self, other: "Workload") -> bool:
        """Whether this cell needs no more memory than `other`: no size larger, everything else the same."""
        if other.sizes is None:
            return False
        alike = all(getattr(self, field) == getattr(other, field) for field in _BESIDE_SIZES)
        ours, theirs = self.model.sizes, other.model.sizes
        if not alike or ours.keys() != theirs.keys() or self.model.tied != other.model.tied:
            return False
        sizes = (*ours.values(), self.batch_size, self.seq_len)
        others = (*theirs.values(), other.batch_size, other.seq_len)
        return all(a <= b for a, b in zip(sizes, others, strict=True))

    def _check_parts(self) -> None:
        for part, name in self.parts.items():
            msgspec.structs.force_setattr(self, part, choose_name(name, PARTS[part], part))
            if name != REFERENCE and (self.strategy.splits != BATCH or self.strategy.near > 1):
                raise InputError(
                    f"{part} {name} runs where a rank computes whole blocks of its own samples: leave out --parallel "
                    f"{self.parallel}, or choose --{part} {REFERENCE}"
                )
        if self.loss != REFERENCE and self.strategy.gathers_by_call:
            raise InputError(
                f"loss {self.loss} reads the head's weight without calling the head, and --parallel {self.parallel} "
                f"gathers what is called: choose --loss {REFERENCE}, or --parallel fsdp2"
            )
        check_projections(self.projections, self)

    def _check_checkpointing(self) -> None:
        group, last, layers = group_of(self.checkpointing), selective_of(self.checkpointing), self.model.layers
        offloaded, calls = offload_of(self.checkpointing), nested_of(self.checkpointing)
        if self.checkpointing not in ("none", *KEEPING) and group is last is offloaded is calls is None:
            raise InputError(f"unknown checkpointing {self.checkpointing!r}: choose {CHECKPOINTING_CHOICES}")
        if self.phase == "forward":
            return
        if (self.checkpointing == "attention" or last is not None) and not is_kept(self.attention):
            raise InputError(
                f"checkpointing {self.checkpointing} keeps what a fused operator returns, and attention "
                f"{self.attention} is no such operator: choose --attention "
                f"{', '.join(filter(is_kept, attention_names()))}, or --checkpointing selective or every-1"
            )
        of_blocks = (("every", group, "groups"), (OFFLOAD, offloaded, "offloads"), ("nested", calls, "divides"))
        for word, blocks, does in of_blocks:
            if blocks is not None and blocks > layers:
                raise InputError(
                    f"checkpointing {self.checkpointing} {does} more blocks than {self.model.name} has: "
                    f"choose {word}-1 to {word}-{layers}"
                )
        if last is not None and last >= layers:
            fewer = f"selective-1 to selective-{layers - 1}, or " if layers > 1 else ""
            raise InputError(
                f"checkpointing {self.checkpointing} leaves no block of {self.model.name} that keeps less, which has "
                f"{layers}: choose {fewer}selective"
            )
        if calls is not None and self.parallel != NOT_PARALLEL:
            raise InputError(
                f"checkpointing {self.checkpointing} is for a step that one process runs: leave out --parallel "
                f"{self.parallel}, or choose --checkpointing every-1"
            )
        if (offloaded or calls) and not self.one_by_one:
            raise InputError(
                f"checkpointing {self.checkpointing} needs operators that run one by one: choose --compile eager and "
                "--graph none, or --checkpointing selective"
            )

    def _check_division(self) -> None:
        """Refuse what cannot be divided among micro-batches, ranks, and the stages of a pipeline."""
        parts, strategy = self.batch_parts, self.strategy
        if self.batch_size % parts:
            near = " or ".join(str(self.ranks // parts * each) for each in _nearest_divisors(self.batch_size, parts))
            raise InputError(
                f"batch_size {self.batch_size} is that of all ranks together, and cannot be divided by {parts}: "
                f"choose a multiple of {parts}, or --ranks {near}"
            )
        size = self.batch_size // parts
        if self.phase != "forward" and size % self.accumulation:
            near = " or ".join(map(str, _nearest_divisors(size, self.accumulation)))
            of_rank = f", of which each of {parts} ranks has {size}," if parts > 1 else ""
            raise InputError(
                f"batch_size {self.batch_size}{of_rank} cannot be split into {self.accumulation} equal micro-batches: "
                f"choose accumulation {near}"
            )
        for field in ("window", "softcap", "sinks") if strategy.splits == SEQUENCE else ():
            if getattr(self.model, field):
                without = field if field == "sinks" else f"a {field}"
                raise InputError(f"parallel {self.parallel} computes attention without {without}: leave out --{field}")
        if self.model.sinks and (strategy.splits == PRODUCTS or strategy.near > 1):
            raise InputError(f"parallel {self.parallel} splits heads, and not their sinks: leave out --sinks")
        if strategy.attentions and self.attention not in strategy.attentions:
            raise InputError(
                f"--parallel {self.parallel} does not spread attention {self.attention}: choose --attention "
                f"{' or '.join(strategy.attentions)}"
            )
        if strategy.splits == SEQUENCE and self.ranks > 1 and self.seq_len % (2 * self.ranks):
            raise InputError(
                f"--parallel {self.parallel} gives each of {self.ranks} ranks two equal chunks of a sequence, and "
                f"seq_len {self.seq_len} cannot be divided by {2 * self.ranks}: choose a multiple"
            )
        parts = 1 if not strategy.splits_stream else strategy.near if strategy.near > 1 else self.ranks
        if self.seq_len % parts:
            raise InputError(
                f"--parallel {self.parallel} splits the residual stream by sequence over {parts} ranks, and seq_len "
                f"{self.seq_len} cannot be divided by {parts}: choose a multiple"
            )
        stages = strategy.stages(self.ranks)
        if stages == 1:
            return
        if self.model.layers < stages:
            raise InputError(
                f"--parallel {self.parallel} makes {stages} stages of {self.model.layers} layers over {self.ranks} "
                f"ranks: give each stage a layer or more"
            )
        if len(self.spans) > 1 or any(span.on_host for span in self.spans):
            raise InputError(
                f"checkpointing {self.checkpointing} is for blocks that each rank has all of, and --parallel "
                f"{self.parallel} gives them to stages: choose --checkpointing selective or attention"
            )
        micro_batches = strategy.micro_batches(self.ranks, self.accumulation)
        if self.batch_size % micro_batches or micro_batches < self.ranks:
            raise InputError(
                f"--parallel {self.parallel} over {self.ranks} ranks cannot cut batch_size {self.batch_size} into "
                f"{micro_batches} micro-batches: give a multiple, or --accumulation, of {self.ranks} or more"
            )


def check_projections(projections: str, choices: StepChoices) -> None:
    """Raise InputError for a name that is none, and for joint projections where no step has them."""
    choose(projections, PROJECTIONS, "projections")
    if projections == "joint" and (choices.parallel != NOT_PARALLEL or PRECISIONS[choices.dtype].scaled):
        other = f"dtype {choices.dtype}" if choices.parallel == NOT_PARALLEL else f"--parallel {choices.parallel}"
        raise InputError(f"projections joint does not go with {other}: choose --projections apart")


def _digest(identity: object) -> str:
    return sha256_of(msgspec.json.encode(identity, order="sorted"))[:8]


def _different(one: msgspec.Struct, usual: msgspec.Struct, *, without: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    """The fields that are not the usual. An optimizer that a factory brought is no choice."""
    for field in one.__struct_fields__:
        value = getattr(one, field)
        if field not in without and value != getattr(usual, field, None) and value is not None:
            yield field, value


def _choices(one: StepChoices, usual: StepChoices, *, without: tuple[str, ...]) -> list[tuple[str, object]]:
    """The fields of a step that are not the usual, with `kernels` in place of the model's parts where all have one
    name; and its phase."""
    chosen = kernels_at_once(dict(_different(one, usual, without=without)))
    return [*chosen.items(), *([("phase", one.phase)] if one.phase != "train" else [])]


def kernels_at_once(fields: Mapping[str, object]) -> dict[str, object]:
    """The fields with `kernels` in place of the model's parts, where all have one name."""
    names = {fields.get(part) for part in PARTS}
    if len(names) > 1 or None in names:
        return dict(fields)
    return {name: value for name, value in fields.items() if name not in PARTS} | {"kernels": names.pop()}


def part_words(parts: Mapping[Part, Kernels]) -> dict[str, str]:
    """The words of a key for the parts of a model; one word, with the first, where all have one name."""
    names = {*parts.values()}
    if len(names) == 1 and names != {REFERENCE}:
        return {"norm": f"{name_word(parts['norm'])}-parts"}
    return {part: f"{name_word(name)}-{part}" if name != REFERENCE else "" for part, name in parts.items()}


def _nearest_divisors(number: int, near: int) -> list[int]:
    """The divisors of `number` next below and next above `near`, where there is one within 4096."""
    below = next((d for d in range(min(near, number), max(0, near - 4096), -1) if number % d == 0), None)
    above = next((d for d in range(near, min(number, near + 4096) + 1) if number % d == 0), None)
    return [divisor for divisor in dict.fromkeys((below, above)) if divisor is not None] or [1]


# A module that is not ours: only what was found of it is known.


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of the batch."""

    shape: tuple[int, ...]
    dtype: str
    """The dtype as PyTorch names it, without `torch.`: `int64`, `float32`."""

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class UserModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A module that is not ours, as it was found."""

    name: str
    """The name of its class."""
    parameters: int | None = None
    """The number of its parameters; None until it is made."""
    inputs: dict[str, Input] = {}
    """The tensors of its batch, by their names or their places."""
    structure: str = ""
    """A digest of its submodules, parameters and buffers: names, classes, shapes and dtypes."""
    source: str = ""
    """A digest of the code that makes it. Changed code is another experiment."""


_LATER: dict[str, object] = {
    "parallel": NOT_PARALLEL, "ranks": 1, "graph": "none", "clip": None, "norm": REFERENCE, "rope": REFERENCE,
    "mlp": REFERENCE, "loss": REFERENCE, "attention": None, "projections": "apart",
}  # fmt: skip
"""Fields that came after the first results were stored, with their defaults: they count where they differ."""


class _UserStep(StepChoices, frozen=True, kw_only=True):
    """What a step of a module that is not ours has in common with the textbook's."""

    model: UserModel
    sizes: ClassVar[None] = None
    layers: ClassVar[int] = 0

    @property
    def batch_size(self) -> int | None:
        """Samples in a step, whatever the accumulation: the first size of the first tensor of its batch; None where
        there is none."""
        return next((tensor.shape[0] for tensor in self.model.inputs.values() if tensor.shape), None)

    @property
    def seq_len(self) -> int | None:
        """The second size of the token ids, the first integers (B, S) in the batch; None where there are none."""
        tensors = self.model.inputs.values()
        return next((t.shape[1] for t in tensors if len(t.shape) == 2 and t.dtype in ("int64", "int32")), None)

    @property
    def tokens(self) -> int | None:
        """Tokens in one step; None where its batch holds no token ids."""
        return self.batch_size * self.seq_len if self.batch_size and self.seq_len else None

    @property
    def micro_batch_size(self) -> int | None:
        """Samples in one forward pass; None where that is not known."""
        size = self.batch_size
        return size // self.accumulation if size and size % self.accumulation == 0 else None

    @property
    def identity(self) -> dict[str, object]:
        """What digests of an experiment are made of: all that can be known before anything runs, without what came
        later and says nothing."""
        fields: dict[str, object] = msgspec.to_builtins(self.requested)
        return {name: value for name, value in fields.items() if name not in _LATER or value != _LATER[name]}

    @property
    def requested(self) -> "_UserStep":
        """The workload as it can be known before anything runs."""
        return self

    @property
    def alike(self) -> object:
        """Equal of workloads that are the same experiment. What was found of a model when it ran is no part of it:
        another dtype changes its structure and its inputs."""
        model = msgspec.structs.replace(self.model, structure="", inputs={})
        return msgspec.json.encode(msgspec.structs.replace(self, model=model), order="sorted")

    def at_most(self, _other: "Workload") -> bool:
        """Whether this cell needs no more memory than `other`: without sizes nobody knows."""
        return False

    @property
    def key(self) -> str:
        """A name of the cell, safe in file names, that ends in a digest of what tells it from others."""
        # A run's directory is named before a factory is called.
        words = [re.sub(r"[^\w.+-]+", "_", word)[:60] for word in self.requested.words()]
        return "-".join([*words, _digest(self.identity)])

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.name

    def words(self, *without: str) -> list[str]:
        """The words of the key, without these fields."""
        words = {
            "model": self.name,
            "batch_size": f"b{self.batch_size}" if self.batch_size else "",
            "seq_len": f"s{self.seq_len}" if self.seq_len else "",
            "dtype": self.dtype,
            "phase": self.phase,
            **self.choice_words,
        }
        return [word for field, word in words.items() if word and field not in without]


def is_configuration(named: str) -> bool:
    """Whether a model is named by the config.json of a Hugging Face model, and not by a factory or a preset."""
    return named.endswith(".json")


class FactoryWorkload(_UserStep, frozen=True, kw_only=True, tag_field="kind", tag="own"):
    """A step of the module that a user's factory makes."""

    factory: str
    """The factory as the user named it: `package.module:factory`, `train.py:factory`, or a model's config.json."""
    arguments: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """The arguments that the factory is called with."""
    code: str = ""
    """A digest of the factory's own file, which is known before it is called."""
    norm: Kernels = REFERENCE
    rope: Kernels = REFERENCE
    mlp: Kernels = REFERENCE
    loss: Kernels = REFERENCE
    """How these parts are computed: the model's own code, or the kernels of core/parts.py, where a module computes the
    same (training/parts/replaced.py)."""
    attention: Attention | None = None
    """What computes its attention where transformers calls it, without a mask; None for what the model says."""
    projections: Projections = "apart"
    seed: int = 0
    by_factory: tuple[str, ...] = ()
    """The choices that the factory made, in place of options: `optimizer`, `phases`."""
    may_run: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.seed, "seed", 0, LARGEST)
        if "optimizer" not in self.by_factory and self.phase == "train":
            choose(str(self.optimizer), (*OPTIMIZERS, *OF_LIBRARIES), "optimizer")
        for part, name in self.parts.items():
            msgspec.structs.force_setattr(self, part, choose_name(name, PARTS[part], part))
        if self.attention is not None:
            choose(self.attention, tuple(ATTENTIONS), "attention")
        check_projections(self.projections, self)
        self.without_what_has_no_effect()

    @property
    def parts(self) -> dict[Part, Kernels]:
        """How each part of core/parts.py is computed."""
        return {"norm": self.norm, "rope": self.rope, "mlp": self.mlp, "loss": self.loss}

    @property
    def requested(self) -> "FactoryWorkload":
        """The workload as it can be known before the factory is called."""
        optimizer = "adamw-foreach" if "optimizer" in self.by_factory else self.optimizer
        return msgspec.structs.replace(self, model=UserModel(name=""), optimizer=optimizer, by_factory=())

    @property
    def origin(self) -> str:
        """Where the model comes from, in words."""
        if not self._has_place:
            return "given as an object"
        arguments = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"made by {self.factory}{f' with {arguments}' if arguments else ''}"

    @property
    def _has_place(self) -> bool:
        """Whether the factory is named, so that another process finds it; False of an object that was given."""
        return ":" in self.factory or is_configuration(self.factory)

    @property
    def named(self) -> dict[str, str | int]:
        """What names the model and its batch, by field."""
        return {"model": self.factory, **{name: str(value) for name, value in self.arguments.items()}}

    @property
    def spelled(self) -> list[tuple[str, object]] | None:
        """What is not the usual, by the names that options and arguments share; None where those cannot say it."""
        if not self._has_place:
            return None
        usual = FactoryWorkload(factory=self.factory, model=UserModel(name=""), phase=self.phase)
        without = ("factory", "code", "arguments", "model", "phase")
        return [
            ("model" if is_configuration(self.factory) else "module", self.factory),
            *(("arg", f"{name}={value}") for name, value in self.arguments.items()),
            *_choices(self.requested, usual, without=without),
        ]

    @property
    def name(self) -> str:
        """The model's name; until it is made, its factory's."""
        return self.model.name or re.split(r"[:/]", self.factory.removesuffix(".json"))[-1]

    def words(self, *without: str) -> list[str]:
        in_key = {"batch_size": self.batch_size, "seq_len": self.seq_len}  # as b4 and s128
        values = [f"{n}{value}" for n, value in self.arguments.items() if n not in in_key or in_key[n] != value]
        parts = self.parts
        if self.rope == REFERENCE:  # it came later: keys of what was stored before stay
            del parts["rope"]
        more = {
            "arguments": "-".join(values),
            "attention": self.attention or "",
            **part_words(parts),
            "projections": f"{self.projections}-projections" if self.projections != "apart" else "",
        }
        return super().words(*without) + [word for field, word in more.items() if word and field not in without]


class WatchedWorkload(_UserStep, frozen=True, kw_only=True, tag_field="kind", tag="watched"):
    """A step of a loop that is not ours, as it was seen."""

    program: str
    """The script and its arguments, without its folder; empty for a loop watched from inside."""
    rank: int | None = None
    """The number of this process among those that train together; None if it is alone."""
    world_size: int = 1
    seed: ClassVar[int] = 0
    attention: ClassVar[None] = None
    projections: ClassVar[str] = "apart"
    factory: ClassVar[str] = ""
    arguments: ClassVar[Mapping[str, Any]] = {}
    by_factory: ClassVar[tuple[str, ...]] = ()
    may_run: ClassVar[bool] = False
    """Only its script can run it."""
    spelled: ClassVar[None] = None

    @property
    def parts(self) -> dict[Part, Kernels]:
        """How each part is computed, where that was chosen: nowhere."""
        return {}

    @property
    def origin(self) -> str:
        """Where the model comes from, in words."""
        rank = f", rank {self.rank} of {self.world_size}" if self.rank is not None else ""
        return f"watched in {self.program}{rank}" if self.program else f"watched{rank}"

    @property
    def named(self) -> dict[str, str | int]:
        """What names the model and its batch, by field."""
        return {"model": self.name}

    def words(self, *without: str) -> list[str]:
        rank = [f"rank{self.rank}"] if self.rank is not None and "rank" not in without else []
        return super().words(*without) + rank


Workload = TextbookWorkload | FactoryWorkload | WatchedWorkload
"""What a Run measured: one face over three records, which are stored with their `kind`. Whoever needs formulas asks
whether `sizes` is None."""

T = TypeVar("T")


def key_without_code(workload: Workload) -> str:
    """The key, without digests of code: another commit's has the same."""
    match workload:
        case FactoryWorkload():
            return msgspec.structs.replace(workload, code="").key
        case WatchedWorkload():
            return msgspec.structs.replace(workload, model=msgspec.structs.replace(workload.model, source="")).key
        case _:
            return workload.key


def by_sizes(workload: Workload, formula: Callable[[TextbookWorkload], T]) -> T | None:
    """What a formula of the sizes says of a workload; None where they are not known."""
    return formula(workload) if workload.sizes is not None else None


Kind = Literal["textbook", "own", "watched"]


def with_kind(workload: bytes) -> bytes:
    """The JSON of a workload with its kind. Workloads that were stored before there were several kinds do not have
    it."""
    if "kind" in msgspec.json.decode(workload, type=dict[str, msgspec.Raw]):
        return workload
    fields = workload.strip()[1:]
    return b'{"kind":"textbook"' + (b"" if fields.strip() == b"}" else b",") + fields
