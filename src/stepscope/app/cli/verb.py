"""Commands, made of verbs (`core/options.py`): a verb's parameters are its options.

A parameter states its Option, or takes the one of its name in the table of options that verbs share; its annotation
says how many values the option takes there: `tuple[str, ...]` is several, by commas. A parameter whose type is a record
stands for the options that the record's fields name; OneWorkload and ManyWorkloads stand for all of a workload.
"""

import functools
import gc
import importlib
import inspect
import math
import operator
import shlex
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin

import click
import msgspec

from stepscope.app.cli.options import OPTIONS, run_names
from stepscope.core.errors import InputError, one_line, warn
from stepscope.core.options import GIVEN, GROUPS, Argument, Option, Verb, completed, several

if TYPE_CHECKING:
    from stepscope.engine.workload_options import OneWorkload

_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}
"""What stands for a value in a help text; several values are `N,...`."""

Values = dict[str, Any]
"""The values that click read, by the parameters' names."""


def command_of(verb: Verb, kind: type[click.Command] | None = None, **settings: Any) -> Any:
    """The command that reads a verb's options and calls its function, as one of click's commands."""
    parameters, options, call = _options_of(verb.function, verb)

    def run(**values: Any) -> None:
        if not gc.isenabled():  # as the command began
            from stepscope.core.environment import set_aside

            set_aside()
        if code := call(values):
            raise click.exceptions.Exit(code)

    text = inspect.cleandoc(verb.function.__doc__ or "")
    command: Any = (kind or Command)(
        verb.name.rpartition(" ")[2], params=parameters, callback=run, help=text, **settings
    )
    command.verb, command.options = verb, options
    return command


def _options_of(
    takes: Callable[..., Any], verb: Verb
) -> tuple[list[click.Parameter], list[Option], Callable[[Values], Any]]:
    """What click reads for a function or a record; its options; and what calls it with their values."""
    parameters: list[click.Parameter] = []
    options: list[Option] = []
    makers: dict[str, Callable[[Values], Any]] = {}
    signature = inspect.signature(takes).parameters

    def add(option: Option, several: bool, default: Any, words: Mapping[str, str]) -> Callable[[Values], Any]:
        repeats = option.repeated or (several and option.takes is Path)
        parameters.append(_parameter(option, several, repeats, default, words.get(option.name)))
        options.append(option)
        return functools.partial(_value, option, several, repeats, default)

    for name, parameter in signature.items():
        annotation: Any = parameter.annotation
        stated: Any = None
        if get_origin(annotation) is Annotated:
            annotation, stated = get_args(annotation)[:2]
        if isinstance(stated, Argument):
            argument = _argument(name, stated, annotation, parameter.default)
            parameters.append(argument)
            read = operator.itemgetter(name)
            makers[name] = read if argument.nargs == 1 else lambda values, read=read: list(read(values)) or None
        elif (is_many := getattr(annotation, "IS_MANY", None)) is not None:
            from stepscope.engine import workload_options as workload

            words = {**workload.usual_values(), **verb.defaults}
            of_one = {  # the verb's own parameters take precedence over a workload's
                line.name: add(line, is_many, None, words)
                for line in workload.OPTIONS
                if line.name not in signature and _shared_option(line.name, verb.name) is line
            }
            makers[name] = functools.partial(_workload, annotation, of_one)
        elif isinstance(annotation, type) and is_dataclass(annotation):
            inner_parameters, inner_options, makers[name] = _options_of(annotation, verb)
            parameters += inner_parameters
            options += inner_options
        else:
            plain = name.rstrip("_")
            if isinstance(stated, Option):
                option = msgspec.structs.replace(stated, name=plain, takes=stated.takes or _one_value(annotation))
            else:
                option = _shared_option(plain, verb.name)
            assert option is not None, f"{verb.name}: no option {name} in the table"
            default = option.default if parameter.default is parameter.empty else parameter.default
            inner = get_args(annotation)
            is_several = get_origin(annotation) is tuple or any(get_origin(kind) is tuple for kind in inner)
            makers[name] = add(option, is_several, default, verb.defaults)
    return parameters, options, lambda values: takes(**{name: maker(values) for name, maker in makers.items()})


def _workload(kind: Callable[..., Any], makers: Mapping[str, Callable[[Values], Any]], values: Values) -> Any:
    """The OneWorkload or ManyWorkloads of the options that were given."""
    chosen = {name: maker(values) for name, maker in makers.items()}
    return kind({name: value for name, value in chosen.items() if value is not None})


def _shared_option(name: str, verb: str) -> Option | None:
    """The shared option of this name, as it is in a verb."""
    lines = [option for option in OPTIONS if option.name == name and verb in (option.verbs or (verb,))]
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


class _Argument(click.Argument):
    """An argument with its help, which click before 8.5 has for options alone."""

    def __init__(self, words: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.words = words

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self.words


def _argument(name: str, stated: Argument, annotation: Any, default: Any) -> _Argument:
    """An argument as click reads it: several words where its annotation is a list."""
    several = any(get_origin(kind) is list for kind in (annotation, *get_args(annotation)))
    return _Argument(
        stated.help,
        param_decls=[name],
        metavar=stated.metavar,
        required=default is inspect.Parameter.empty,
        nargs=-1 if several else 1,
        type=click.Path(path_type=Path) if _one_value(annotation) is Path else str,
        shell_complete=run_names if stated.names_a_run else None,
    )


def _parameter(option: Option, several: bool, repeats: bool, default: Any, usual: str | None) -> click.Option:
    """An option as click reads it. usual: what it is when left out, in words."""
    kind: Any = option.takes if option.takes in (int, float, bool) else str
    if option.takes is Path or option.metavar == "FILE":
        kind = click.Path(path_type=Path)
    metavar, text = option.metavar or _METAVARS.get(option.takes, "WORD"), option.help
    if option.choices:
        text = f"{text} One of {', '.join(option.choices)}.".strip()
    if repeats:
        default, text = None, f"{text} May be repeated."
    elif several and kind is not bool:
        kind, default, metavar = str, ",".join(map(str, default or ())) or None, f"{metavar},..."
    elif option.least is not None and kind in (int, float):
        kind = click.IntRange(int(option.least)) if kind is int else click.FloatRange(option.least)
    if usual is None and option.takes is not bool and default is not None:
        usual = str(default)
    offer: Any = option.complete or (completed(*option.choices) if option.choices else None)

    def offered(_: click.Context, __: click.Parameter, incomplete: str) -> list[Any]:
        return offer(incomplete)

    return click.Option(
        [*filter(None, (option.short,)), option.flag, option.parameter],
        help=f"{text} (default: {usual})" if usual else text,
        type=kind,
        is_flag=kind is bool,
        multiple=repeats,
        default=default,
        metavar=None if kind is bool else metavar,
        shell_complete=offered if offer else None,
    )


def _value(option: Option, is_several: bool, repeats: bool, default: Any, values: Values) -> Any:
    """What the verb gets for an option, of the values that click read."""
    value = values[option.parameter]
    if repeats:
        return tuple(value) or default
    if value is None:
        return default
    if is_several:
        return (value,) if option.takes is bool else several(value, option)
    if option.takes is float and not math.isfinite(value):
        raise InputError(f"{option.flag} is {value}: write a finite number")
    return value if option.takes in (None, int, float, bool, Path, str) else option.takes(value)


def workload_in(text: str, takes: str) -> "OneWorkload":
    """The options of a workload in the text of --against, as `run` reads them. takes: what may be written, in words."""
    from stepscope.engine.workload_options import OneWorkload

    workloads: list[OneWorkload] = []

    def take(*, workload: OneWorkload) -> None:
        workloads.append(workload)

    command = command_of(Verb("run", take), click.Command, add_help_option=False)
    try:
        command.main(args=shlex.split(text), prog_name="--against", standalone_mode=False)
    except ValueError as error:
        raise InputError(f"cannot read --against {text!r}: {error}") from None
    except click.ClickException as error:
        fault = one_line(Exception(error.format_message())).removesuffix(".")
        raise InputError(f"--against {text!r}: {fault}; {takes}") from None
    if not workloads or not workloads[0].options:
        raise InputError(f"--against {text!r} says nothing of a workload: {takes}")
    return workloads[0]


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

_HELP_ALL = "--help-all"
_FEW_VERBS = 4
"""Verbs that a line names."""


class Command(click.Command):
    """The command of one verb: its options in groups, examples below them, old spellings understood."""

    verb: Verb
    options: list[Option]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            name: not getattr(param, "is_flag", False)
            for param in self.params
            if param.param_type_name == "option"
            for name in (*param.opts, *param.secondary_opts)
        }
        if self.verb.name == "watch":
            args = _ended_before_the_script(args, takes_value)
        if self.verb.name == "compare" and "--" in args:
            args.insert(args.index("--"), "--")  # the parser takes one of them: the verb reads the other
        has_arguments = any(param.param_type_name == "argument" for param in self.params)
        renewed = _renewed(args, takes_value, has_arguments)
        # An empty path would mean the directory that one stands in.
        paths = {option.flag for option in self.options if option.takes is Path or option.metavar == "FILE"}
        before_script = renewed[: renewed.index("--")] if "--" in renewed else renewed
        for i, arg in enumerate(before_script):
            flag, sign, value = arg.partition("=")
            if flag in paths and not value and (sign or before_script[i + 1 : i + 2] == [""]):
                raise InputError(f"{flag} is empty: name a path, or write `{flag} .` for the current directory")
        before = renewed[: renewed.index("--")] if "--" in renewed else renewed
        if _HELP_ALL in before:
            ctx.meta[_HELP_ALL] = True
            renewed = ["--help"]
        try:
            rest = super().parse_args(ctx, renewed)
        except click.NoSuchOption as error:
            self._refuse_anothers_option(error.option_name, ctx)
            raise
        sources = {param.opts[-1]: ctx.get_parameter_source(param.name) for param in self.params}
        flags = [flag for flag, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
        GIVEN.set(tuple(flags))
        for rule in self.verb.conflicts:
            if fault := rule.fault(flags):
                raise InputError(fault)
        return rest

    def _refuse_anothers_option(self, flag: str, ctx: Any) -> None:
        """Raise InputError, with the verbs that have it, for an option that this verb has not and others have."""
        verbs = ctx.find_root().command
        studies = verbs.commands["study"]
        everywhere = [group.get_command(ctx, name) for group in (verbs, studies) for name in group.commands]
        owners = [
            command.verb.name
            for command in everywhere
            if isinstance(command, Command) and any(flag in param.opts for param in command.params)
        ]
        if owners:
            more = f" and {len(owners) - _FEW_VERBS} more" if len(owners) > _FEW_VERBS else ""
            have = "have" if len(owners) > 1 else "has"
            some = f"{', '.join(owners[:_FEW_VERBS])}{more}"
            # A comparison names its runs.
            instead = ": name a folder, a sweep or a tag" if (flag, self.verb.name) == ("--where", "compare") else ""
            raise InputError(f"No such option: {flag}: {self.verb.name} has none, and {some} {have} it{instead}")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        of_options = {option.parameter: option.group for option in self.options}
        common = () if ctx.meta.get(_HELP_ALL) else self.verb.common
        left_out = 0
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            is_argument = param.param_type_name == "argument"
            group = "Arguments" if is_argument else of_options.get(param.name or "", "Help")
            if common and group in GROUPS and not {*param.opts} & {*common}:
                left_out += 1
            else:
                groups.setdefault(group, []).append(record)
        if left_out:
            groups["Help"].append((_HELP_ALL, f"Show the other {left_out} options, too."))
        for group in ("Arguments", *GROUPS, "Help"):
            if group in groups:
                with formatter.section(group):
                    formatter.write_dl(groups[group], col_max=26)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Examples"):
            for example in self.verb.examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")


class Verbs(click.Group):
    """A command of verbs. A verb is built when it is asked for: its module may take a while to import."""

    verbs: ClassVar[dict[str, tuple[str, str]]] = {}
    """Each verb's module, or module:record, and what it does. The module is imported when the verb is asked for."""
    home: ClassVar = ""
    """What the names of the modules begin with."""
    groups: ClassVar[dict[str, tuple[str, ...]]] = {}
    """The verbs under the heads that the help shows them by; empty: all stand together."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        every: dict[str, Any] = {**dict.fromkeys(self.verbs), **self.commands}  # None: not built yet
        self.commands = every

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self.commands.get(cmd_name) is None and cmd_name in self.verbs:
            module, _, record = self.verbs[cmd_name][0].partition(":")
            registered = getattr(importlib.import_module(f"{self.home}{module}"), record or "command")
            self.commands[cmd_name] = command_of(self.verb_of(registered))
        return self.commands.get(cmd_name)

    @staticmethod
    def verb_of(registered: Any) -> Verb:
        """The verb that a line of the table names."""
        return registered

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        texts = {name: text for name, (_, text) in self.verbs.items()}
        texts |= {name: command.help for name, command in self.commands.items() if name not in texts}
        for head, names in (self.groups or {"Verbs": tuple(texts)}).items():
            with formatter.section(head):
                formatter.write_dl([(name, texts[name]) for name in names], col_max=10)


def _renewed(args: list[str], takes_value: dict[str, bool], has_arguments: bool) -> list[str]:
    """The arguments with old spellings replaced, each said on stderr."""
    renewed: list[str] = []
    i = 0
    while i < len(args):
        arg = args[i]
        if arg == "--":
            return [*renewed, *args[i:]]
        flag, sign, value = arg.partition("=")
        following = args[i + 1] if i + 1 < len(args) else "-"
        is_size = following[:1].isdigit() or not (following.startswith("-") or has_arguments)
        if arg == "--memory" and "--record" in takes_value and not is_size:
            say_spelling(flag, "--record memory", " where no size follows")
            renewed += ["--record", "memory"]
        else:
            known = (flag, *OLD_SPELLINGS.get(flag, ()))
            now = next((name for name in known if name in takes_value), flag)
            if now != flag:
                say_spelling(flag, now)
            renewed.append(f"{now}{sign}{value}")
            if takes_value.get(now) and not sign:  # a value is no option, whatever it looks like
                i += 1
                renewed += args[i : i + 1]
        i += 1
    return renewed


def _ended_before_the_script(args: list[str], takes_value: dict[str, bool]) -> list[str]:
    """The arguments with `--` before the first that is no option: what follows a script is the script's."""
    i = 0
    while i < len(args) and args[i] != "--":
        flag, sign, _ = args[i].partition("=")
        if not args[i].startswith("-") or args[i] == "-m":
            return [*args[:i], "--", *args[i:]]
        i += 2 if takes_value.get(flag) and not sign else 1
    return args


def say_spelling(old: str, new: str, where: str = "") -> None:
    """Say on stderr that an old spelling goes."""
    warn(f"{old}{where} is spelled {new} now; the old spelling goes with the next release")
