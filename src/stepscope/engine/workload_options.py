"""The options of a workload, the workloads that they make, and the options of how a step is measured.

A new field of Workload is one line of the table, and one of ModelConfig one of ModelOptions: `run`, `sweep` and `fit`
have it then, and hand it on.
"""

import functools
import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, cast

import msgspec

from stepscope.core.checkpointing import CHECKPOINTING_CHOICES, KEEPING, every_choice
from stepscope.core.errors import InputError, choose, warn
from stepscope.core.evidence import TRACE_TOOLS, TraceTool
from stepscope.core.model_config import (
    MODEL_OPTIONS,
    PRESETS,
    PUBLIC_SHAPES,
    ModelOptions,
    configure,
    editions_apart,
    of_edition,
)
from stepscope.core.options import (
    GIVEN,
    MEASURING,
    MODEL,
    PARALLEL,
    RECORDING,
    WORKLOAD,
    Option,
    completed,
    positive_number,
    words,
)
from stepscope.core.parts import (
    KERNELS,
    PART_WORDS,
    PARTS,
    REFERENCE,
    attention_names,
    is_kept,
    named_kernels,
)
from stepscope.core.run import Settings, settings_from
from stepscope.core.strategies import NOT_PARALLEL, STRATEGIES, option_words
from stepscope.core.user_model import code_digest, configuration_named, parse_arguments, unmet
from stepscope.core.workloads import (
    COMPILES,
    DTYPES,
    GRAPHS,
    NO_CLIP,
    OF_LIBRARIES,
    OPTIMIZERS,
    PHASES,
    PROJECTIONS,
    FactoryWorkload,
    TextbookWorkload,
    UserModel,
    Workload,
    is_configuration,
)
from stepscope.engine.request import MEMORY_STACKS, MemoryRequest, MemoryStacks, TraceRequest, combinations, grid

_warn_once = functools.cache(warn)


def norm_bound(text: str) -> float | str:
    """What `--clip` says: a number above zero, or none. Raises InputError for anything else."""
    return text if text == NO_CLIP else positive_number(text, "--clip")


def model_names(text: str) -> str:
    """What `--model` says, one name or several by commas, with presets for what an edition of an assignment calls them.
    Which of two models a name means that editions use differently is said on stderr, once."""
    for sentence in filter(None, map(editions_apart, text.split(","))):
        _warn_once(sentence)
    return ",".join(map(of_edition, text.split(",")))


def any_model_names(text: str) -> str:
    """What `--model` says where it may be a Hugging Face model: a name is its config.json in the local cache."""
    return ",".join(map(configuration_named, model_names(text).split(",")))


_WITH_PARTS = ("run", "sweep", "fit", "tune")
_PARTS = (*_WITH_PARTS, "plan")
_SHARED = ("run", "sweep", "tune", "study parallel")
_SEEDED = (
    "run", "sweep", "study underflow", "study scaling", "study swallowed", "study quality", "study parity",
    "study shadow",
)  # fmt: skip
_ANY_MODEL = (*_WITH_PARTS, "study compile", "study speed", "study underflow", "study swallowed", "study parity",
              "study shadow")  # fmt: skip

OPTIONS = (
    Option("A preset, or what an edition calls it, as in cs336-2026-xl.", MODEL, "model", model_names,
           choices=tuple(PRESETS)),
    Option("A preset, or a Hugging Face model by its config.json or its name in the local cache, which gets random "
           "weights: nothing is downloaded.", MODEL, "model", any_model_names, choices=tuple(PRESETS),
           verbs=_ANY_MODEL),
    Option("A preset, or a shape that others published.", MODEL, "model", model_names,
           choices=(*PRESETS, *PUBLIC_SHAPES), verbs=("plan",)),
    *MODEL_OPTIONS,
    Option("Tokens in a sequence.", WORKLOAD, "seq_len", int),
    Option("Sequences in a step.", WORKLOAD, "batch_size", int),
    Option("", WORKLOAD, "dtype", str, choices=DTYPES),
    Option("", WORKLOAD, "phase", str, choices=PHASES),
    Option(f"How several ranks share a step. Options follow the name, as in fsdp2:reshard=no: {option_words()}.",
           PARALLEL, "parallel", str, choices=(NOT_PARALLEL, *STRATEGIES), verbs=_SHARED),
    Option("Processes that share a step, a device each.", PARALLEL, "ranks", int, verbs=_SHARED),
    Option("Also path/file.py:function.", WORKLOAD, "attention", str, choices=attention_names()),
    *(Option(f"How {what} is computed, also by path/file.py:function.", WORKLOAD, part, str,
             choices=tuple(PARTS[part]), verbs=_PARTS)
      for part, what in PART_WORDS.items()),
    Option("How norm, rope, mlp and loss are computed, where they are not said. quack has no mlp.", WORKLOAD,
           "kernels", str, choices=KERNELS, verbs=(*_PARTS, "study parallel")),
    Option("Whether projections of one input are one product.", WORKLOAD, "projections", str, choices=PROJECTIONS,
           verbs=_WITH_PARTS),
    Option("", WORKLOAD, "compile", str, choices=COMPILES),
    Option("What is replayed as CUDA graphs.", WORKLOAD, "graph", str, choices=GRAPHS),
    Option("", WORKLOAD, "optimizer", str, choices=OPTIMIZERS),
    Option("Those of a library, which must be installed, are for a model of your own.", WORKLOAD, "optimizer", str,
           choices=(*OPTIMIZERS, *OF_LIBRARIES), verbs=_WITH_PARTS),
    Option("The bound on the gradients' global norm, as in 1.0, to which they are scaled down; none leaves them.",
           WORKLOAD, "clip", norm_bound, metavar="NORM"),
    Option(f"What backward runs again instead of keeping: {CHECKPOINTING_CHOICES}. Where several may be given, all is "
           "a row for each, but for offload and selective-K.", WORKLOAD, "checkpointing", str,
           complete=completed("none", *KEEPING, "selective-4", "offload-4", "every-1", "every-4", "nested-2")),
    Option("Micro-batches that a step is split into.", WORKLOAD, "accumulation", int),
    Option("Seed of parameters and data.", WORKLOAD, "seed", int, 0, verbs=_SEEDED),
    Option("A model of your own, as package.module:factory or path/file.py:factory, run with your rights. factory() "
           "returns (module, batch) or (module, batch, loss); docs/your-own.md has all it may return.", MODEL,
           "module", str),
    Option("An argument of --module's factory, or a field of --model's file, as in width=64; a sweep takes several by "
           "commas.", MODEL, "arg", str, metavar="NAME=VALUE", repeated=True),
)  # fmt: skip
"""Every option of a workload, in the order in which a help text shows them."""

_FIELDS = tuple(dict.fromkeys(option.name for option in OPTIONS if option.name not in ("module", "arg")))


def flags_of(verb: str) -> tuple[str, ...]:
    """The options of a workload that a verb has, without those that name a module."""
    lines = (option for option in OPTIONS if option.name in _FIELDS and verb in (option.verbs or (verb,)))
    return tuple(dict.fromkeys(option.flag for option in lines))


_SIZES = tuple(option.name for option in MODEL_OPTIONS)


def usual_values() -> dict[str, str]:
    """What Workload itself takes for what is not said, in words."""
    fields = msgspec.structs.fields(TextbookWorkload)
    return {field.name: str(field.default) for field in fields if field.default is not msgspec.NODEFAULT}


def usual_sizes(*, on_gpu: bool) -> dict[str, Any]:
    """The model and its sequence where none is named, of a size that the device takes in its stride."""
    return {"model": "small", "seq_len": 512} if on_gpu else {"model": "tiny", "seq_len": 128}


@dataclass(frozen=True, slots=True)
class OneWorkload:
    """The options of a workload that were given, by their names."""

    options: Mapping[str, Any]
    IS_MANY: ClassVar = False

    @property
    def flags(self) -> list[str]:
        """The options as a user writes them."""
        return _flags(self.options)

    @property
    def fields(self) -> dict[str, Any]:
        """The options by the fields of a workload and of its model."""
        return _with_parts(self.options)

    def joined(self, ranks: int) -> "OneWorkload":
        """The options, for the ranks of a job that is there already. Raises InputError where other ranks are given."""
        requested = self.options.get("ranks", ranks)
        if requested != ranks:
            raise InputError(f"--ranks {requested}, and this job has {ranks}: leave it out")
        return OneWorkload({**self.options, "ranks": ranks})

    @property
    def user_workload(self) -> FactoryWorkload | None:
        """The workload of the user's module, where one is named."""
        if arguments := self.options.get("arg"):
            _one_value_each(arguments)
        options = {name: value if name == "arg" else (value,) for name, value in self.options.items()}
        return next(iter(_user_workloads(options)), None)

    def workload(self, **defaults: Any) -> TextbookWorkload:
        """The workload of the textbook's model; what is given nowhere is as Workload has it."""
        chosen = _with_parts({**defaults, **self.options})
        sizes = {name: chosen.pop(name) for name in _SIZES if name in chosen}
        return TextbookWorkload(model=configure(chosen.pop("model"), **sizes), **chosen)

    def any_workload(self, **defaults: Any) -> Workload:
        """The workload of the user's module, where one is named, else of the textbook's model."""
        return self.user_workload or self.workload(**defaults)

    def check(self) -> None:
        """Raise InputError for options that cannot be, before the device is known, on which the rest depends: with many
        layers, and the longest of the usual sequences, which whatever splits the others splits too."""
        if self.user_workload is None:
            self.workload(model="tiny", seq_len=512, **({} if "model" in self.options else {"layers": 1000}))


@dataclass(frozen=True, slots=True)
class ManyWorkloads:
    """The options of several workloads that were given, by their names, each with several values."""

    options: Mapping[str, tuple[Any, ...]]
    IS_MANY: ClassVar = True

    @property
    def flags(self) -> list[str]:
        """The options as a user writes them."""
        return _flags(self.options)

    def workloads(self, **defaults: Any) -> list[Workload]:
        """Every combination."""
        if of_a_user := _user_workloads(self.options):
            return [*of_a_user]
        chosen = {**{name: (value,) for name, value in defaults.items()}, **self.options}
        chosen = {name: chosen[name] for name in _FIELDS if name in chosen}  # in the order of the table
        kernels = chosen.pop("kernels", (None,))
        presets = chosen.pop("model")
        sizes = {name: chosen.pop(name) for name in _SIZES if name in chosen}
        models = [
            configure(preset, **dict(zip(sizes, combination, strict=True)))
            for preset in presets
            for combination in itertools.product(*sizes.values())
        ]
        combined: list[TextbookWorkload] = []
        for name, model in itertools.product(kernels, models):
            of_model = {**chosen, "kernels": name}
            if _ALL in chosen.get("checkpointing", ()):
                kept = all(map(is_kept, chosen.get("attention", (REFERENCE,))))
                usual = {"compile": "eager", "graph": "none", "parallel": NOT_PARALLEL}
                nests = all({*chosen.get(field, (value,))} == {value} for field, value in usual.items())
                others = (word for word in chosen["checkpointing"] if word != _ALL)
                of_model["checkpointing"] = (*others, *every_choice(model.layers, kept=kept, nests=nests))
            combined += grid(model=[model], **_with_parts(of_model, several=True))
        return list(dict.fromkeys(combined))


_ALL = "all"
"""In a list of checkpointings: every one that a table of all of them has."""

_TWO_MODELS = "--module and --model both say which model: give one of them"
_ARG_ALONE = "--arg belongs to --module, or --model CONFIG.json: say whose argument it is"
_OF_ANY_MODEL = (
    "dtype", "phase", "compile", "graph", "optimizer", "clip", "checkpointing", "accumulation", "parallel", "ranks",
    "seed", "kernels", "attention", "projections", *PARTS,
)  # fmt: skip
"""Options of a workload that say something of a user's own model, too."""


_ARGUMENTS = ("batch_size", "seq_len")
"""Options of a workload that are arguments of a factory with parameters of these names, and of a config.json."""


_SAID_IN_A_FILE = {
    "--d-model": "hidden_size=N",
    "--d-ff": "intermediate_size=N",
    "--heads": "num_attention_heads=N",
    "--kv-heads": "num_key_value_heads=N",
    "--vocabulary": "vocab_size=N",
    "--tied": "tie_word_embeddings=true",
    "--window": "sliding_window=N",
    "--softcap": "attn_logit_softcapping=N",
}
"""Fields of most config.json files of Hugging Face that say what an option says of the textbook's model."""


def _user_workloads(options: Mapping[str, Sequence[Any]]) -> list[FactoryWorkload]:
    """Every combination of the options of a user's modules; none where no module is named."""
    files = [name for name in options.get("model", ()) if is_configuration(name)]
    factories = options.get("module", ())
    if factories and options.get("model"):
        raise InputError(_TWO_MODELS)
    if files and len(files) < len(options["model"]):
        raise InputError("--model names a config.json and a preset: ask for one kind at a time")
    if not factories and not files:
        if options.get("arg"):
            raise InputError(_ARG_ALONE)
        return []
    takes = (*_OF_ANY_MODEL, *_ARGUMENTS, *(("model",) if files else ()))
    strangers = [flag for flag in _flags(options) if flag.removeprefix("--").replace("-", "_") not in takes]
    if strangers:
        field = _SAID_IN_A_FILE.get(strangers[0], "num_hidden_layers=2")
        whose, instead = (
            ("--model CONFIG.json", f"give a field of the file, as in --arg {field}")
            if files
            else ("--module", "give the factory an argument, as in --arg width=64")
        )
        raise InputError(f"{', '.join(strangers)} belongs to the textbook's model, and not to {whose}: {instead}")
    arguments = parse_arguments(options.get("arg", ()))
    for name in _ARGUMENTS:
        if name in options:
            if name in arguments:
                raise InputError(f"--{name.replace('_', '-')} and --arg {name} say the same: give one of them")
            arguments[name] = tuple(options[name])
    choices = {name: options[name] for name in _OF_ANY_MODEL if name in options and name != "kernels"}
    workloads = [
        FactoryWorkload(
            factory=str(factory),
            code=code_digest(str(factory)),
            model=UserModel(name=""),
            arguments=dict(zip(arguments, values, strict=True)),
            **chosen,
        )
        for factory in files or factories
        for values in itertools.product(*arguments.values())
        for kernels in options.get("kernels", (None,))
        for chosen in combinations(_with_parts({**choices, "kernels": kernels}, several=True))
    ]
    for workload in workloads:
        _say_unmet(workload)
    return [*{workload.key: workload for workload in workloads}.values()]  # parts that are said are so in all kernels


def _say_unmet(workload: FactoryWorkload) -> None:
    """Say on stderr, once each, what the workload's config.json asks for and its step does not do."""
    for sentence in unmet(workload):
        _warn_once(f"--model {workload.factory}: {sentence}")


def factory_arguments(factory: str | None, written: Sequence[str]) -> dict[str, Any]:
    """What one factory, or one configuration, gets as arguments. Raises InputError for several values of an argument,
    and for any where no such model is named."""
    if written and factory is None:
        raise InputError(_ARG_ALONE)
    arguments = _one_value_each(written)
    if factory is not None:
        _say_unmet(FactoryWorkload(factory=factory, model=UserModel(name=""), arguments=arguments))
    return arguments


def _one_value_each(written: Sequence[str]) -> dict[str, Any]:
    arguments = parse_arguments(written)
    for name, values in arguments.items():
        if len(values) > 1:
            raise InputError(
                f"--arg {name} has {len(values)} values: one model is looked at, so write one; sweep takes several"
            )
    return {name: values[0] for name, values in arguments.items()}


def _with_parts(chosen: Mapping[str, Any], *, several: bool = False) -> dict[str, Any]:
    """What was chosen, with what `kernels` says of every part that was not. several: whether values are tuples."""
    others = dict(chosen)
    kernels = others.pop("kernels", None)
    if kernels is None:
        return others
    named = named_kernels(kernels)
    return {**{part: (name,) if several else name for part, name in named.items()}, **others}


def _flags(options: Mapping[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name in _FIELDS if name in options]


TEXTBOOK_OPTIONS = tuple(name for name in _FIELDS if name not in _OF_ANY_MODEL)
"""Options of a workload that say something of the textbook's model alone."""


# What a caller in Python says of a step.


_CHOICES = {*_FIELDS} - {"model", *PARTS}


def choices_among(function: str, arguments: Mapping[str, Any], options: ModelOptions) -> dict[str, Any]:
    """The choices of a step among the arguments of a function and its other keywords, which are options of the model;
    one that is None was left out. Raises TypeError, in Python's own words, for a keyword that is none of these."""
    for name in options:
        if name not in _SIZES:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return {name: value for name, value in {**arguments, **options}.items() if name in _CHOICES and value is not None}


def check_one_model(
    model: object,
    module: str | None,
    arguments: Mapping[str, Any] | None,
    *,
    batch: object = None,
    loss: object = None,
    optimizer: object = None,
) -> None:
    """Raise InputError if two models are named, or if a model is given something that it does not take."""
    if model is not None and module is not None:
        raise InputError("model and module both say which model is meant: give one of them")
    if arguments and module is None:
        raise InputError("arguments belong to module, a factory: say whose they are")
    of_a_module = {"batch": batch, "loss": loss, "optimizer": None if isinstance(optimizer, str) else optimizer}
    strangers = [name for name, value in of_a_module.items() if value is not None]
    if strangers and (module is not None or model is None or isinstance(model, str)):
        whose = "a factory gives its own" if module is not None else "the textbook's model has its own"
        raise InputError(f"{' and '.join(strangers)}: only a model that is an nn.Module takes it, {whose}")


def of_factory(factory: str, arguments: Mapping[str, Any] | None, choices: Mapping[str, Any]) -> FactoryWorkload:
    """The workload of what a factory makes of its arguments, of which seq_len and batch_size may be choices. Raises
    InputError for choices of the textbook's model."""
    factory = configuration_named(factory)
    sizes = {name: choices[name] for name in _ARGUMENTS if name in choices}
    if twice := sizes.keys() & (arguments or {}).keys():
        raise InputError(f"{' and '.join(sorted(twice))} stand in arguments, too: say it once")
    others = {name: value for name, value in choices.items() if name not in sizes}
    workload = FactoryWorkload(
        factory=factory,
        code=code_digest(factory),
        model=UserModel(name=""),
        arguments={**(arguments or {}), **sizes},
        **fields_of_any_model(others, "give the factory arguments"),
    )
    for sentence in unmet(workload):
        warnings.warn(f"{factory}: {sentence}", stacklevel=3)
    return workload


def fields_of_any_model(choices: Mapping[str, Any], remedy: str) -> dict[str, Any]:
    """The fields of a FactoryWorkload that were chosen. Raises InputError for choices of the textbook's model."""
    strangers = [name for name in choices if name not in _OF_ANY_MODEL]
    if strangers:
        raise InputError(f"only the textbook's model takes {', '.join(strangers)}: {remedy}")
    parts = named_kernels(choices["kernels"]) if "kernels" in choices else {}
    return {**{name: value for name, value in choices.items() if name != "kernels"}, **parts}


# How long a step is measured, and what is kept of some more steps.


RECORDED = ("memory", *TRACE_TOOLS)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long a step is measured."""

    warmup: int | None = None
    steps: int | None = None
    seconds: float = 5.0
    no_profile: Annotated[bool, Option("Leave out the profiled step after the timed ones.", MEASURING)] = False

    @property
    def settings(self) -> Settings:
        """The record of these options that a run keeps."""
        return settings_from(self.warmup, self.steps, self.seconds, self.no_profile)


Record = Annotated[
    tuple[str, ...],
    Option(
        "What to keep of some more steps: every allocation with its stack (memory), a trace of torch.profiler "
        "(kineto) or of Nsight Systems (nsys). Several by commas.",
        RECORDING,
        metavar="|".join(RECORDED),
        repeated=True,
        complete=completed(*RECORDED),
    ),
]
TraceSteps = Annotated[int, Option("How many steps a trace holds.", RECORDING)]
TraceStacks = Annotated[bool, Option("With Python stacks in the trace (slow). Needs --record kineto.", RECORDING)]
MemoryStacksOf = Annotated[
    str | None,
    Option(
        "Whose stacks allocations keep: python (default), or all: C++ too, which takes minutes. Needs --record memory.",
        RECORDING,
        complete=completed(*MEMORY_STACKS),
    ),
]
MemorySteps = Annotated[
    int,
    Option(
        "How many steps are recorded: 3 or more show what grows from step to step. Needs --record memory.", RECORDING
    ),
]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What is kept of some more steps, after the timed ones."""

    record: Record = ()
    trace_steps: TraceSteps = 2
    trace_stacks: TraceStacks = False
    memory_stacks: MemoryStacksOf = None
    memory_steps: MemorySteps = 1
    trace: TraceRequest = field(init=False)
    memory: MemoryRequest | None = field(init=False)

    def __post_init__(self) -> None:
        named = tuple(dict.fromkeys(word for text in self.record for word in words(text, "--record")))
        for name in named:
            choose(name, RECORDED, "record")
        needs = (
            ("--trace-stacks", self.trace_stacks, ("kineto",), "stacks"),
            ("--memory-stacks", self.memory_stacks is not None, ("memory",), "stacks"),
            ("--memory-steps", "--memory-steps" in GIVEN.get(), ("memory",), "steps"),
            ("--trace-steps", "--trace-steps" in GIVEN.get(), TRACE_TOOLS, "steps"),
        )
        for flag, value, records, what in needs:
            if value and not set(records) & set(named):
                add = "add it" if len(records) == 1 else "add one of them"
                raise InputError(f"{flag} belongs to --record {' or '.join(records)}: {add}, or leave the {what} out")
        tools = cast("tuple[TraceTool, ...]", tuple(name for name in named if name in TRACE_TOOLS))
        stacks = cast("MemoryStacks", self.memory_stacks or "python")  # MemoryRequest refuses others
        memory = MemoryRequest(stacks=stacks, steps=self.memory_steps) if "memory" in named else None
        object.__setattr__(self, "trace", TraceRequest(tools=tools, steps=self.trace_steps, stacks=self.trace_stacks))
        object.__setattr__(self, "memory", memory)
