"""A verb is a function, and its options are made from its parameters and the table of options.

Each keyword parameter names a line of the table; its annotation says how many values the option takes there:
`tuple[str, ...]` is several, by commas. A parameter whose type options fill (`OneWorkload`, `ManyWorkloads`,
`Settings`, `Recording`, `Presentation`) stands for all of these options. Parameters that typer annotates are its
arguments.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
import typer

from stepscope.cli import completion
from stepscope.cli.options import (
    OPTIONS,
    ManyWorkloads,
    OneWorkload,
    Option,
    Recording,
    line_of,
    recording_from,
    settings_from,
    several,
)
from stepscope.cli.presentation import Presentation
from stepscope.core.errors import InputError
from stepscope.core.model_config import ModelConfig
from stepscope.core.run import Settings
from stepscope.core.workload import Workload


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _one_workload(**said: Any) -> OneWorkload:
    return OneWorkload(_given(said))


def _many_workloads(**said: Any) -> ManyWorkloads:
    return ManyWorkloads(_given(said))


_FILLED: dict[type, tuple[tuple[type, ...], bool, Callable[..., Any]]] = {
    OneWorkload: ((ModelConfig, Workload), False, _one_workload),
    ManyWorkloads: ((ModelConfig, Workload), True, _many_workloads),
    Settings: ((Settings,), False, settings_from),
    Recording: ((Recording,), False, recording_from),
    Presentation: ((Presentation,), False, Presentation),
}
"""Parameters that stand for several options: what these fill, whether each takes several values, and what is made."""


_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}
"""What stands for a value in a help text; several values are `N,...`."""

EXAMPLES: dict[str, tuple[str, ...]] = {}
"""Examples of each verb's use, by the verb's name."""


def verb(verb_name: str, *examples: str, **usual: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that makes a function a verb: its parameters become options of the table, or stay typer's arguments.

    `usual` says in words what an option is when it is left out, where that is no constant.
    """

    def make(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        makers: dict[str, Callable[[dict[str, Any]], Any]] = {}
        for parameter in inspect.signature(function).parameters.values():
            if get_origin(parameter.annotation) is Annotated:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                makers[parameter.name] = functools.partial(_as_given, parameter.name)
            elif parameter.annotation in _FILLED:
                types, several, maker = _FILLED[parameter.annotation]
                options = [
                    found for option in OPTIONS if option.fills in types and (found := line_of(option.name, verb_name))
                ]
                parts = {option.name: _Part(option, several, _own_default(option)) for option in options}
                said = {**_workload_defaults(), **usual}
                parameters += [part.parameter(said.get(name)) for name, part in parts.items()]
                makers[parameter.name] = functools.partial(_filled, maker, parts)
            else:
                option = line_of(parameter.name.rstrip("_"), verb_name)
                assert option is not None, f"{verb_name}: no option {parameter.name} in the table"
                default = option.default if parameter.default is parameter.empty else parameter.default
                part = _Part(option, _is_several(parameter.annotation), default)
                parameters.append(part.parameter(usual.get(option.name)))
                makers[parameter.name] = part.value

        @functools.wraps(function)
        def made(**given: Any) -> None:
            function(**{parameter: maker(given) for parameter, maker in makers.items()})

        made.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        made.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        EXAMPLES[verb_name] = examples
        return made

    return make


@dataclass(frozen=True, slots=True)
class _Part:
    """An option in a verb: how many values it takes there, and what it is when it is left out."""

    option: Option
    several: bool
    default: Any

    def parameter(self, usual: str | None) -> inspect.Parameter:
        """The option as a parameter of a function that typer reads."""
        option = self.option
        kind: Any = option.takes if option.takes in (int, float, bool, Path) else str
        default, metavar = self.default, option.metavar or _METAVARS.get(option.takes, "WORD")
        text = option.words
        if self._repeats:
            kind, default, text = list[kind], default or None, f"{text} May be repeated."
        elif self.several and kind is not bool:
            kind, default, metavar = str, ",".join(map(str, default or ())) or None, f"{metavar},..."
        if usual is None and option.takes is not bool and default is not None:
            usual = str(default)
        info = typer.Option(
            option.flag,
            help=f"{text} (default: {usual})" if usual else text,
            rich_help_panel=option.group,
            min=None if self.several or self._repeats else option.least,
            metavar=None if option.takes is bool else metavar,
            show_default=False,
            autocompletion=option.complete or (completion.words(*option.choices) if option.choices else None),
        )
        annotation = Annotated[kind | None if default is None else kind, info]
        return inspect.Parameter(
            option.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )

    def value(self, given: dict[str, Any]) -> Any:
        """What the verb gets."""
        value, option = given[self.option.parameter], self.option
        if self._repeats:
            return tuple(value) if value is not None else self.default
        if value is None:
            return self.default
        if self.several:
            return (value,) if option.takes is bool else several(value, option)
        if option.takes is float and not math.isfinite(value):
            raise InputError(f"{option.flag} is {value}: write a finite number")
        return value if option.takes in (int, float, bool, Path, str) else option.takes(value)

    @property
    def _repeats(self) -> bool:
        return self.option.repeated or (self.several and self.option.takes is Path)


@functools.cache
def _workload_defaults() -> dict[str, str]:
    """What Workload itself takes for what is not said."""
    fields = msgspec.structs.fields(Workload)
    return {field.name: str(field.default) for field in fields if field.default is not msgspec.NODEFAULT}


def _is_several(annotation: Any) -> bool:
    return any(get_origin(part) is tuple for part in (annotation, *get_args(annotation)))


def _as_given(name: str, given: dict[str, Any]) -> Any:
    return given[name]


def _filled(maker: Callable[..., Any], parts: dict[str, _Part], given: dict[str, Any]) -> Any:
    return maker(**{name: part.value(given) for name, part in parts.items()})


def _own_default(option: Option) -> Any:
    """The default of an option that fills a type with others; None for those of a workload, which Workload knows."""
    return None if option.fills in (ModelConfig, Workload) else option.default
