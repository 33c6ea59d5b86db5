"""What the command line says of one workload or of many: the textbook's model, or one of the user's own."""

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.app.cli.options import OPTIONS
from stepscope.core.errors import InputError, warn
from stepscope.core.factory_arguments import code_digest, is_configuration, parse_arguments
from stepscope.core.model_config import ModelConfig, configure
from stepscope.core.model_file import unmet
from stepscope.core.parts import MODULE_PARTS, PARTS, check_modules, named_kernels
from stepscope.core.workloads import FactoryWorkload, TextbookWorkload, UserModel, Workload
from stepscope.engine.plan import combinations, grid


@dataclass(frozen=True, slots=True)
class OneWorkload:
    """What was said of a workload, by the names of the options; what was not said is not in it."""

    said: Mapping[str, Any]

    @property
    def flags(self) -> list[str]:
        """The options that were given."""
        return _flags(self.said)

    def joined(self, ranks: int) -> "OneWorkload":
        """The same on the ranks of a job that is there. Raises InputError where other ranks were said."""
        said = self.said.get("ranks", ranks)
        if said != ranks:
            raise InputError(f"--ranks {said}, and this job has {ranks}: leave it out")
        return OneWorkload({**self.said, "ranks": ranks})

    @property
    def own(self) -> FactoryWorkload | None:
        """The workload of a model of the user's own, where one was said."""
        _one_value_each(self.said.get("arg", ()))
        found = _own_workloads({name: value if name == "arg" else (value,) for name, value in self.said.items()})
        return found[0] if found else None

    @property
    def fields(self) -> dict[str, Any]:
        """What was said, by the fields of a workload and of its model."""
        return _with_parts(self.said)

    def workload(self, **otherwise: Any) -> TextbookWorkload:
        """The workload; what was not said is as in `otherwise`, or else as Workload has it."""
        chosen = _with_parts({**otherwise, **self.said})
        sizes = {name: chosen.pop(name) for name in _SIZES if name in chosen}
        return TextbookWorkload(model=configure(chosen.pop("model"), **sizes), **chosen)

    def check(self) -> None:
        """Raise InputError for what is said and cannot be, before the device is known, on which the rest depends: with
        many layers, and the longest of the usual sequences, which whatever splits the others splits too."""
        self.workload(model="tiny", seq_len=512, **({} if "model" in self.said else {"layers": 1000}))


@dataclass(frozen=True, slots=True)
class ManyWorkloads:
    """What was said of several workloads, by the names of the options, each with several values."""

    said: Mapping[str, tuple[Any, ...]]

    @property
    def flags(self) -> list[str]:
        """The options that were given."""
        return _flags(self.said)

    def workloads(self, **otherwise: Any) -> list[Workload]:
        """Every combination."""
        if own := _own_workloads(self.said):
            return [*own]
        chosen = {**{name: (value,) for name, value in otherwise.items()}, **self.said}
        chosen = {name: chosen[name] for name in _FIELDS if name in chosen}  # in the order of the table
        kernels = chosen.pop("kernels", (None,))
        presets = chosen.pop("model")
        sizes = {name: chosen.pop(name) for name in _SIZES if name in chosen}
        models = [
            configure(preset, **dict(zip(sizes, combination, strict=True)))
            for preset in presets
            for combination in itertools.product(*sizes.values())
        ]
        found = [
            w for name in kernels for w in grid(model=models, **_with_parts({**chosen, "kernels": name}, several=True))
        ]
        return list(dict.fromkeys(found))


_TWO_MODELS = "--module and --model both say which model: give one of them"
_ARG_ALONE = "--arg belongs to --module, or --model CONFIG.json: say whose argument it is"
_OF_ANY_MODEL = (
    "dtype", "phase", "compile", "graph", "optimizer", "clip", "checkpointing", "accumulation", "parallel", "ranks",
    "seed", "kernels", *MODULE_PARTS,
)  # fmt: skip
"""Options of a workload that say something of a user's own model, too."""


_OF_A_CONFIGURATION = ("batch_size", "seq_len")
"""Options of a workload that are arguments of a model's config.json."""


def _own_workloads(said: Mapping[str, Sequence[Any]]) -> list[FactoryWorkload]:
    """Every combination of what was said of models of the user's own; none where no such model was said."""
    files = [name for name in said.get("model", ()) if is_configuration(name)]
    factories = said.get("module", ())
    if factories and said.get("model"):
        raise InputError(_TWO_MODELS)
    if files and len(files) < len(said["model"]):
        raise InputError("--model names a config.json and a preset: ask for one kind at a time")
    if not factories and not files:
        if said.get("arg"):
            raise InputError(_ARG_ALONE)
        return []
    check_modules(said)
    takes = (*_OF_ANY_MODEL, *(("model", *_OF_A_CONFIGURATION) if files else ()))
    strangers = [flag for flag in _flags(said) if flag.removeprefix("--").replace("-", "_") not in takes]
    if strangers:
        instead = "give a field of the file, as in --arg num_hidden_layers=2" if files else (
            "give the factory an argument, as in --arg width=64"
        )  # fmt: skip
        whose = "--model CONFIG.json" if files else "--module"
        raise InputError(f"{', '.join(strangers)} belongs to the textbook's model, and not to {whose}: {instead}")
    arguments = parse_arguments(said.get("arg", ()))
    for name in _OF_A_CONFIGURATION if files else ():
        if name in said:
            if name in arguments:
                raise InputError(f"--{name.replace('_', '-')} and --arg {name} say the same: give one of them")
            arguments[name] = tuple(said[name])
    choices = {name: said[name] for name in _OF_ANY_MODEL if name in said and name != "kernels"}
    found = [
        FactoryWorkload(
            factory=str(factory), code=code_digest(str(factory)), model=UserModel(name=""),
            arguments=dict(zip(arguments, values, strict=True)), **chosen,
        )
        for factory in files or factories
        for values in itertools.product(*arguments.values())
        for kernels in said.get("kernels", (None,))
        for chosen in combinations(_with_parts({**choices, "kernels": kernels}, several=True, parts=MODULE_PARTS))
    ]  # fmt: skip
    for workload in found:
        _say_unmet(workload)
    return [*{workload.key: workload for workload in found}.values()]  # parts that are said are so in all kernels


def _say_unmet(workload: FactoryWorkload) -> None:
    """Say on stderr, once each, what the workload's config.json asks for and its step does not do."""
    for sentence in unmet(workload):
        _warn_once(f"--model {workload.factory}: {sentence}")


_warn_once = functools.cache(warn)


def factory_arguments(own: str | None, written: Sequence[str]) -> dict[str, Any]:
    """What one factory, or one configuration, gets as arguments. Raises InputError for several values of an argument,
    and for any where no such model is named."""
    if written and own is None:
        raise InputError(_ARG_ALONE)
    arguments = _one_value_each(written)
    if own is not None:
        _say_unmet(FactoryWorkload(factory=own, model=UserModel(name=""), arguments=arguments))
    return arguments


def _one_value_each(written: Sequence[str]) -> dict[str, Any]:
    found = parse_arguments(written)
    for name, values in found.items():
        if len(values) > 1:
            raise InputError(
                f"--arg {name} has {len(values)} values: one model is looked at, so write one; sweep takes several"
            )
    return {name: values[0] for name, values in found.items()}


def _with_parts(
    chosen: Mapping[str, Any], *, several: bool = False, parts: Collection[str] = tuple(PARTS)
) -> dict[str, Any]:
    """What was chosen, with what `kernels` says of every part that was not. several: whether values are tuples. parts:
    those that it says something of."""
    found = dict(chosen)
    kernels = found.pop("kernels", None)
    if kernels is None:
        return found
    named = {part: name for part, name in named_kernels(kernels).items() if part in parts}
    return {**{part: (name,) if several else name for part, name in named.items()}, **found}


def _flags(said: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys(option.name for option in OPTIONS if option.fills in (ModelConfig, TextbookWorkload))
    return [f"--{name.replace('_', '-')}" for name in names if name in said]


_FIELDS = [option.name for option in OPTIONS if option.fills in (ModelConfig, TextbookWorkload)]
_SIZES = [option.name for option in OPTIONS if option.fills is ModelConfig and option.name != "model"]
TEXTBOOK_OPTIONS = tuple(name for name in _FIELDS if name not in _OF_ANY_MODEL)
"""Options of a workload that say something of the textbook's model alone."""
