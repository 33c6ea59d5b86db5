"""A workload as the words that measure it: options of the command line, and arguments of `stepscope.run`."""

import shlex
from collections.abc import Iterable, Iterator

from stepscope.core.model_config import PRESETS, ModelConfig, configure
from stepscope.core.own_arguments import is_configuration
from stepscope.core.own_workload import AnyWorkload, OwnModel, OwnWorkload
from stepscope.core.parts import MODULE_PARTS, PARTS
from stepscope.core.run import Settings
from stepscope.core.workload import Workload

_Sized = Workload | OwnWorkload | ModelConfig


def run_command(workload: AnyWorkload, settings: Settings | None = None) -> str | None:
    """The `stepscope run ...` that measures the workload; None where no options say it, as for a watched loop."""
    chosen = _chosen(workload)
    if chosen is None:
        return None
    words: list[str] = []
    for name, value in chosen:
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, shlex.quote(str(value))]
    return " ".join(["stepscope", "run", *words, *_of_settings(settings or Settings())])


def run_call(workload: AnyWorkload) -> str | None:
    """The `stepscope.run(...)` in Python that measures the workload; None where no arguments say it, as for a watched
    loop."""
    chosen = _chosen(workload)
    if chosen is None:
        return None
    arguments = {name: value for name, value in chosen if name != "arg"}
    parts = {name: arguments.pop(name) for name in PARTS if name in arguments}
    if parts:
        arguments["kernels"] = parts  # `loss` is a function there
    said = [repr(arguments.pop("model"))] if "model" in arguments and isinstance(workload, Workload) else []
    said += [f"{'module' if name == 'model' else name}={value!r}" for name, value in arguments.items()]
    if isinstance(workload, OwnWorkload) and workload.arguments:
        said.insert(1, f"arguments={dict(workload.arguments)!r}")
    return f"stepscope.run({', '.join(said)})"


def _chosen(workload: AnyWorkload) -> list[tuple[str, object]] | None:
    """What is not the usual, by the names that options and arguments share."""
    if isinstance(workload, Workload):
        model, preset = workload.model, workload.model.name.partition("+")[0]
        if preset not in PRESETS:
            return None
        of_model = _different(model, configure(preset), without=("name",))
        of_step = _different(workload, Workload(model=model, phase=workload.phase), without=("model", "phase"))
        of_step = _kernels_at_once(dict(of_step))
        chosen = [("model", preset), *of_model, *of_step]
    elif isinstance(workload, OwnWorkload) and (":" in workload.factory or is_configuration(workload.factory)):
        workload = workload.asked
        usual = OwnWorkload(factory=workload.factory, model=OwnModel(name=""), phase=workload.phase)
        without = ("factory", "code", "arguments", "model", "phase")
        chosen = [
            ("model" if is_configuration(workload.factory) else "module", workload.factory),
            *(("arg", f"{name}={value}") for name, value in workload.arguments.items()),
            *_kernels_at_once(dict(_different(workload, usual, without=without)), MODULE_PARTS),
        ]
    else:
        return None
    return [*chosen, *([("phase", workload.phase)] if workload.phase != "train" else [])]


def _different(one: _Sized, usual: _Sized, *, without: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    """The fields that are not the usual. An optimizer that a factory brought is no choice."""
    for field in one.__struct_fields__:
        value = getattr(one, field)
        if field not in without and value != getattr(usual, field, None) and value is not None:
            yield field, value


def _kernels_at_once(of_step: dict[str, object], parts: Iterable[str] = PARTS) -> list[tuple[str, object]]:
    """With `kernels` in place of the model's parts, where all have one name."""
    names = {of_step.get(part) for part in parts}
    chosen = [*of_step.items()]
    if len(names) > 1 or None in names:
        return chosen
    return [*((name, value) for name, value in chosen if name not in PARTS), ("kernels", names.pop())]


def _of_settings(settings: Settings) -> list[str]:
    usual = Settings()
    words: list[str] = []
    if settings.warmup_floor == settings.warmup_cap:
        words += ["--warmup", str(settings.warmup_cap)]
    if settings.steps_floor == settings.steps_cap:
        words += ["--steps", str(settings.steps_cap)]
    elif settings.seconds != usual.seconds:
        words += ["--seconds", f"{settings.seconds:g}"]
    return words
