"""A verb is a function, and its options are made from its parameters.

A parameter states its Option (`core/options.py`), or takes the one of its name in the table of options that verbs
share; its annotation says how many values the option takes there: `tuple[str, ...]` is several, by commas. A parameter
whose type is a record stands for the options that the record's fields name; OneWorkload and ManyWorkloads stand for all
of a workload. Parameters that typer annotates are its arguments.
"""

import dataclasses
import functools
import importlib
import inspect
import math
import operator
import shutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from stepscope.app.cli.options import OPTIONS, run_names
from stepscope.app.cli.output import warn
from stepscope.core.errors import InputError
from stepscope.core.options import GROUPS, Conflict, Needs, Option, completed, remember, several

_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}
"""What stands for a value in a help text; several values are `N,...`."""

EXAMPLES: dict[str, tuple[str, ...]] = {}
"""Examples of each verb's use, by the verb's name."""

CONFLICTS: dict[str, tuple[Conflict | Needs, ...]] = {}
"""Options of each verb that exclude or need one another, by the verb's name."""

OPTIONS_OF: dict[str, list[Option]] = {}
"""The options of each verb that was asked for, by the verb's name."""


def verb(
    verb_name: str, *examples: str, conflicts: tuple[Conflict | Needs, ...] = (), **usual: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that makes a function a verb: its parameters become options, or stay typer's arguments.

    `usual` says in words what an option is when it is left out, where that is no constant.
    """

    def make(function: Callable[..., None]) -> Callable[..., None]:
        options = options_of(function, verb_name, usual)

        @functools.wraps(function)
        def made(**given: Any) -> None:
            options.call(given)

        options.give_signature(made)
        EXAMPLES[verb_name], OPTIONS_OF[verb_name], CONFLICTS[verb_name] = examples, options.taken, conflicts
        return made

    return make


def file_or_run(files: str) -> Any:
    """The argument that names a file of these kinds, or a run that holds one."""
    said = f"{files}, a run directory, a part of a run's name, or `last`."
    return typer.Argument(help=said, autocompletion=run_names)


@dataclass(frozen=True)
class Options:
    """The options that a function or a record takes."""

    parameters: list[inspect.Parameter]
    """What typer reads as the function's signature."""
    taken: list[Option]
    call: Callable[[dict[str, Any]], Any]
    """Calls the function, or makes the record, of the values of these parameters."""

    def give_signature(self, function: Any) -> None:
        """Give a function the parameters that typer reads."""
        function.__signature__ = inspect.Signature(self.parameters)
        function.__annotations__ = {parameter.name: parameter.annotation for parameter in self.parameters}


def options_of(takes: Callable[..., Any], verb_name: str, usual: Mapping[str, str]) -> Options:
    """The options of a function, or of a record."""
    found = Options([], [], lambda given: takes(**{name: maker(given) for name, maker in makers.items()}))
    makers: dict[str, Callable[[dict[str, Any]], Any]] = {}
    signature = inspect.signature(takes).parameters
    for name, parameter in signature.items():
        annotation, stated = parameter.annotation, None
        if get_origin(annotation) is Annotated:
            annotation, stated = get_args(annotation)[:2]
            if not isinstance(stated, Option):
                found.parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                makers[name] = operator.itemgetter(name)
                continue
            stated = dataclasses.replace(stated, name=name.rstrip("_"), takes=stated.takes or _one_value(annotation))
        if (is_many := getattr(annotation, "IS_MANY", None)) is not None:
            inner = _options_of_workload(annotation, verb_name, usual, is_many, signature)
        elif isinstance(annotation, type) and is_dataclass(annotation):
            inner = options_of(annotation, verb_name, usual)
        else:
            option = stated or line_of(name.rstrip("_"), verb_name)
            assert option is not None, f"{verb_name}: no option {name} in the table"
            default = option.default if parameter.default is parameter.empty else parameter.default
            part = _Part(option, _is_several(annotation), default)
            inner = Options([part.parameter(usual.get(option.name))], [option], part.value)
        found.parameters.extend(inner.parameters)
        found.taken.extend(inner.taken)
        makers[name] = inner.call
    return found


def _options_of_workload(
    kind: Callable[..., Any], verb_name: str, usual: Mapping[str, str], is_many: bool, named: Mapping[str, Any]
) -> Options:
    """The options of a workload, but for those that the verb names itself."""
    from stepscope.engine import workload_options as workload

    lines = workload.OPTIONS
    options = [each for each in lines if each.name not in named and line_of(each.name, verb_name) is each]
    parts = [_Part(option, is_many, None) for option in options]
    words = {**workload.usual_values(), **usual}

    def call(given: dict[str, Any]) -> Any:
        values = {part.option.name: part.value(given) for part in parts}
        return kind({name: value for name, value in values.items() if value is not None})

    return Options([part.parameter(words.get(part.option.name)) for part in parts], options, call)


def line_of(name: str, verb: str) -> Option | None:
    """The shared option of this name, as it is in a verb."""
    lines = [option for option in OPTIONS if option.name == name]
    if not lines:
        from stepscope.engine.workload_options import OPTIONS as OF_A_WORKLOAD

        lines = [option for option in OF_A_WORKLOAD if option.name == name and verb in (option.verbs or (verb,))]
    return max(lines, key=lambda option: len(option.verbs) > 0, default=None)


def _one_value(annotation: Any) -> type:
    """The type of one value: int of `tuple[int, ...] | None`."""
    parts = [part for part in get_args(annotation) if part not in (type(None), ...)]
    if parts and get_origin(annotation) is not Literal:
        return _one_value(parts[0])
    return annotation if annotation in (int, float, bool, Path) else str


def _is_several(annotation: Any) -> bool:
    return any(get_origin(part) is tuple for part in (annotation, *get_args(annotation)))


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
            autocompletion=option.complete or (completed(*option.choices) if option.choices else None),
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
        return value if option.takes in (None, int, float, bool, Path, str) else option.takes(value)

    @property
    def _repeats(self) -> bool:
        return self.option.repeated or (self.several and self.option.takes is Path)


# How every verb reads its arguments and shows its help; and the spellings of the release before.


OLD_SPELLINGS: dict[str, tuple[str, ...]] = {
    "--out": ("--runs", "--figures"),
    "--plot": ("--save",),
    "--read": ("--from",),
    "--memory-limit": ("--memory",),
    "--trace": ("--record",),
    "--question": ("--only",),
    "--models": ("--model",),
    "--dtypes": ("--dtype",),
    "--phases": ("--phase",),
    "--modes": ("--compile",),
    "--implementations": ("--attention",),
    "--devices": ("--device",),
    "--lr": ("--learning-rate",),
    "--learning-rates": ("--learning-rate",),
    "--warmups": ("--warmup",),
}
"""What an option was called, and is called now: the first of these names that the verb has. They go with the next
release. `--memory` without a size, which asked for a record, is taken care of beside it."""

_FEW_VERBS = 4
"""Verbs that a line names."""

_OLD_MODES = {"--gate": "attention-gate", "--model": "attention-step"}
"""Options of `study attention` that made another study of it: verbs of their own now."""


class Verb(TyperCommand):
    """One verb: its options in groups, examples below them, old spellings understood."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            name: not getattr(param, "is_flag", False)
            for param in self.params
            if param.param_type_name == "option"
            for name in (*param.opts, *param.secondary_opts)
        }
        if verb_name(ctx) == "watch":
            args = _ended_before_the_script(args, takes_value)
        has_arguments = any(param.param_type_name == "argument" for param in self.params)
        renewed = list(_renewed(args, takes_value, has_arguments))
        _refuse_empty_paths(renewed, verb_name(ctx))
        try:
            rest = super().parse_args(ctx, renewed)
        except Exception as error:
            # Typer's own errors have no name to import by: their module differs between versions.
            if type(error).__name__ == "NoSuchOption":
                _refuse_anothers_option(str(getattr(error, "option_name", "")), ctx)
            raise
        sources = {param.opts[0]: ctx.get_parameter_source(param.name) for param in self.params}
        given = [flag for flag, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
        remember(given)
        for conflict in CONFLICTS.get(verb_name(ctx), ()):
            if fault := conflict.fault(given):
                raise InputError(fault)
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                group = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Help"
                groups.setdefault(group, []).append(record)
        for group in ("Arguments", *GROUPS, "Help"):
            if group in groups:
                with formatter.section(group):
                    formatter.write_dl(groups[group], col_max=26)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Examples"):
            for example in EXAMPLES.get(verb_name(ctx), ()):
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")


class Verbs(TyperGroup):
    """A command of verbs. A verb is built when it is asked for, since typer takes some milliseconds for each."""

    verbs: ClassVar[dict[str, tuple[str, str]]] = {}
    """Each verb's function, as module:function, and what it does. The module is imported when the verb is asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        functions = {name: function for name, (function, _) in self.verbs.items()}
        self.commands = _BuiltWhenAsked(functions, self.commands, self.command_of)

    @staticmethod
    def command_of(registered: Any) -> Callable[..., None]:
        """The function that typer reads, from what a verb's line names."""
        return registered

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        texts = {name: text for name, (_, text) in self.verbs.items()}
        texts |= {name: _summary(command.help or "") for name, command in self.commands.built.items()}
        with formatter.section("Verbs"):
            formatter.write_dl(list(texts.items()))


class _BuiltWhenAsked(MutableMapping[str, Any]):
    """Commands by name, made of functions when they are first looked up."""

    def __init__(
        self, functions: dict[str, str], built: Mapping[str, Any], command_of: Callable[[Any], Callable[..., None]]
    ) -> None:
        self.functions, self.built, self.command_of = functions, dict(built), command_of

    def __getitem__(self, name: str) -> Any:
        if name not in self.built:
            module, _, function = self.functions[name].partition(":")
            alone = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=help_width())
            alone.command(name, cls=Verb)(self.command_of(getattr(importlib.import_module(module), function)))
            self.built[name] = typer.main.get_command(alone)
        return self.built[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self.built[name] = command

    def __delitem__(self, name: str) -> None:
        del self.built[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.functions, **self.built})

    def __len__(self) -> int:
        return len({**self.functions, **self.built})


def help_width() -> dict[str, Any]:
    """Settings of a context whose help is as wide as the terminal."""
    return {"max_content_width": shutil.get_terminal_size().columns}


def verb_name(ctx: Any) -> str:
    """The verb's name in the table: `study attention`, not `stepscope study attention`."""
    return ctx.command_path.partition(" ")[2]


def _summary(text: str) -> str:
    """The first paragraph of a help text, whole."""
    return " ".join(text.partition("\n\n")[0].split())


def _renewed(args: list[str], takes_value: dict[str, bool], has_arguments: bool) -> Iterator[str]:
    """The arguments with old spellings replaced, each said on stderr."""
    rest = iter(list(enumerate(args)))
    for i, arg in rest:
        flag, sign, value = arg.partition("=")
        if arg == "--":
            yield from (arg, *(word for _, word in rest))
        elif arg == "--memory" and "--record" in takes_value and not _is_size(args[i + 1 : i + 2], has_arguments):
            _say(flag, "--record memory", " where no size follows")
            yield from ("--record", "memory")
        elif flag in OLD_SPELLINGS and flag not in takes_value and (new := _name_now(flag, takes_value)):
            _say(flag, new)
            yield f"{new}{sign}{value}"
            if not sign:
                yield from _next_word(rest)
        else:
            yield arg
            if takes_value.get(flag) and not sign:
                yield from _next_word(rest)


def _refuse_anothers_option(flag: str, ctx: Any) -> None:
    """Raise InputError, with the verbs that have it, for an option that this verb has not and others have."""
    root = ctx.find_root().command
    owners = [name for name, command in _verbs_in(root) if any(flag in param.opts for param in command.params)]
    if owners:
        more = f" and {len(owners) - _FEW_VERBS} more" if len(owners) > _FEW_VERBS else ""
        have = "have" if len(owners) > 1 else "has"
        some = f"{', '.join(owners[:_FEW_VERBS])}{more}"
        raise InputError(f"No such option: {flag}: {verb_name(ctx)} has none, and {some} {have} it")


def _verbs_in(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name in group.commands:
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from _verbs_in(command, f"{name} ")
        else:
            yield f"{before}{name}", command


def _refuse_empty_paths(args: list[str], verb: str) -> None:
    """Raise InputError for an option whose path is empty: it would mean the directory that one stands in."""
    paths = {option.flag for option in OPTIONS_OF.get(verb, ()) if option.takes is Path}
    options = args[: args.index("--")] if "--" in args else args
    for i, arg in enumerate(options):
        flag, sign, value = arg.partition("=")
        if flag in paths and not value and (sign or options[i + 1 : i + 2] == [""]):
            raise InputError(f"{flag} is empty: name a path, or write `{flag} .` for the current directory")


def _ended_before_the_script(args: list[str], takes_value: dict[str, bool]) -> list[str]:
    """The arguments with `--` before the first that is no option: what follows a script is the script's."""
    i = 0
    while i < len(args) and args[i] != "--":
        flag, sign, _ = args[i].partition("=")
        if not args[i].startswith("-") or args[i] == "-m":
            return [*args[:i], "--", *args[i:]]
        i += 2 if takes_value.get(flag) and not sign else 1
    return args


def _next_word(rest: Iterator[tuple[int, str]]) -> Iterator[str]:
    """The value that an option takes from the next argument, whatever it looks like."""
    for _, word in rest:
        yield word
        return


def _name_now(flag: str, takes_value: dict[str, bool]) -> str | None:
    return next((new for new in OLD_SPELLINGS[flag] if new in takes_value), None)


def _is_size(following: list[str], has_arguments: bool) -> bool:
    """Whether what follows `--memory` is its size: it is no option, and nothing that is an argument of the verb."""
    word = following[0] if following else "-"
    return word[:1].isdigit() or not (word.startswith("-") or has_arguments)


def study_now(args: list[str]) -> list[str]:
    """`study attention --gate` and `--model` are verbs of their own."""
    if args[:1] != ["attention"]:
        return args
    options = args[1 : args.index("--")] if "--" in args else args[1:]
    for arg in options:
        mode = arg.partition("=")[0]
        if mode in _OLD_MODES:
            _say(f"study attention {mode}", f"study {_OLD_MODES[mode]}")
            return [_OLD_MODES[mode], *(arg for arg in args[1:] if arg != "--gate")]
    return args


def _say(old: str, new: str, where: str = "") -> None:
    warn(f"{old}{where} is spelled {new} now; the old spelling goes with the next release")
