"""A verb is a function, and its options are made from its parameters and the table of options.

Each keyword parameter names a line of the table; its annotation says how many values the option takes there:
`tuple[str, ...]` is several, by commas. A parameter whose type options fill (`OneWorkload`, `ManyWorkloads`,
`Settings`, `Recording`, `Presentation`) stands for all of these options, and one whose type is another dataclass for
the options that its fields name. Parameters that typer annotates are its arguments.
"""

import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
import typer

from stepscope.app.cli import completion
from stepscope.app.cli.options import OPTIONS, Option, line_of, several
from stepscope.app.cli.presentation import Presentation
from stepscope.app.cli.recording import Recording, recording_from
from stepscope.app.cli.workloads import ManyWorkloads, OneWorkload
from stepscope.core.errors import InputError
from stepscope.core.model_config import ModelConfig
from stepscope.core.own_workload import OwnWorkload
from stepscope.core.run import Settings, settings_from
from stepscope.core.workload import Workload


def _as_said(kind: Callable[[dict[str, Any]], Any], **options: Any) -> Any:
    return kind({name: value for name, value in options.items() if value is not None})


_FILLED: dict[type, tuple[tuple[type, ...], bool, Callable[..., Any]]] = {
    OneWorkload: ((ModelConfig, Workload, OwnWorkload), False, functools.partial(_as_said, OneWorkload)),
    ManyWorkloads: ((ModelConfig, Workload, OwnWorkload), True, functools.partial(_as_said, ManyWorkloads)),
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
        parameters, call = options_of(function, verb_name, usual)

        @functools.wraps(function)
        def made(**given: Any) -> None:
            call(given)

        made.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        made.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        EXAMPLES[verb_name] = examples
        return made

    return make


def file_or_run(files: str) -> Any:
    """The argument that names a file of these kinds, or a run that holds one."""
    said = f"{files}, a run directory, a part of a run's name, or `last`."
    return typer.Argument(help=said, autocompletion=completion.run_names)


def options_of(
    takes: Callable[..., Any], verb_name: str, usual: Mapping[str, str]
) -> tuple[list[inspect.Parameter], Callable[[dict[str, Any]], Any]]:
    """The parameters that typer reads for a function or a record, and what calls it with their values."""
    parameters: list[inspect.Parameter] = []
    makers: dict[str, Callable[[dict[str, Any]], Any]] = {}
    named = set(inspect.signature(takes).parameters)  # what a verb takes by itself is no part of a workload there
    for parameter in inspect.signature(takes).parameters.values():
        annotation: Any = parameter.annotation
        if get_origin(annotation) is Annotated:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            makers[parameter.name] = operator.itemgetter(parameter.name)
        elif annotation in _FILLED:
            types, several, maker = _FILLED[annotation]
            options = [
                found
                for option in OPTIONS
                if option.fills in types and option.name not in named and (found := line_of(option.name, verb_name))
            ]
            parts = {option.name: _Part(option, several, _own_default(option)) for option in options}
            said = {**_workload_defaults(), **usual}
            parameters += [part.parameter(said.get(name)) for name, part in parts.items()]
            makers[parameter.name] = functools.partial(_filled, maker, parts)
        elif isinstance(annotation, type) and is_dataclass(annotation):
            found, makers[parameter.name] = options_of(annotation, verb_name, usual)
            parameters += found
        else:
            option = line_of(parameter.name.rstrip("_"), verb_name)
            assert option is not None, f"{verb_name}: no option {parameter.name} in the table"
            default = option.default if parameter.default is parameter.empty else parameter.default
            part = _Part(option, _is_several(annotation), default)
            parameters.append(part.parameter(usual.get(option.name)))
            makers[parameter.name] = part.value
    return parameters, lambda given: takes(**{name: maker(given) for name, maker in makers.items()})


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
            *([option.short] if option.short else []),
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


def _filled(maker: Callable[..., Any], parts: dict[str, _Part], given: dict[str, Any]) -> Any:
    return maker(**{name: part.value(given) for name, part in parts.items()})


def _own_default(option: Option) -> Any:
    """The default of an option that fills a type with others; None for those of a workload, which Workload knows."""
    return None if option.fills in (ModelConfig, Workload, OwnWorkload) else option.default
