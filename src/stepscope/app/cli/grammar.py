"""How every verb reads its arguments and shows its help; and the spellings of the release before."""

import shutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from stepscope.app.cli.given_options import remember
from stepscope.app.cli.options import GROUPS, OPTIONS, line_of
from stepscope.app.cli.output import warn
from stepscope.app.cli.verb import EXAMPLES
from stepscope.core.errors import InputError

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
        remember(flag for flag, source in sources.items() if source is not None and source.name == "COMMANDLINE")
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

    verbs: ClassVar[dict[str, Callable[..., None]]] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _BuiltWhenAsked(self.verbs, self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        texts = {name: function.__doc__ or "" for name, function in self.verbs.items()}
        texts |= {name: command.help or "" for name, command in self.commands.built.items()}
        with formatter.section("Verbs"):
            formatter.write_dl([(name, _summary(text)) for name, text in texts.items()])


class _BuiltWhenAsked(MutableMapping[str, Any]):
    """Commands by name, made of functions when they are first looked up."""

    def __init__(self, functions: dict[str, Callable[..., None]], built: Mapping[str, Any]) -> None:
        self.functions, self.built = functions, dict(built)

    def __getitem__(self, name: str) -> Any:
        if name not in self.built:
            alone = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=help_width())
            alone.command(name, cls=Verb)(self.functions[name])
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
    paths = {option.flag for option in OPTIONS if option.takes is Path and option is line_of(option.name, verb)}
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
