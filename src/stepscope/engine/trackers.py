"""Writes a run's figures where a script keeps its own: Weights & Biases, MLflow or TensorBoard.

Into the run that is active in the process, and never a second one beside it. Each library is taken as the script has
loaded it. A measurement that has no script makes a run of its own, which ends with it.
"""

import gc
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stepscope.core.errors import InputError, choose, one_line
from stepscope.core.formulas.spelled import cell_name
from stepscope.core.run import Run
from stepscope.runs.metrics import summarise

TRACKERS = {"wandb": "Weights & Biases", "mlflow": "MLflow", "tensorboard": "TensorBoard"}
"""Libraries that take figures, and their names."""
FOLDER = "tensorboard"
"""What TensorBoard reads in a run's directory, where the script has no writer of its own."""

Say = Callable[[str], None]
Figures = Mapping[str, float]


def trackers_named(names: str | Iterable[str]) -> tuple[str, ...]:
    """These trackers, each once. Raises InputError for one that is unknown, or whose library is not installed."""
    chosen = tuple(choose(name, tuple(TRACKERS), "log") for name in ([names] if isinstance(names, str) else names))
    for name in chosen:
        spec = importlib.util.find_spec(name)
        # Without an origin it is a plain folder of this name, as wandb makes for its files.
        if name not in sys.modules and (spec is None or spec.origin is None):
            raise InputError(f"--log {name} needs {TRACKERS[name]}, which is not installed here: pip install {name}")
    return tuple(dict.fromkeys(chosen))


def figures_of(run: Run) -> dict[str, float]:
    """The run's figures by the names that trackers show: those of its summary, that are known."""
    known = {name: value for name, value in summarise(run).items() if value is not None and math.isfinite(value)}
    return {f"stepscope/{name}": value for name, value in known.items()}


class ScriptTrackers:
    """The trackers that a script's figures go to. It never raises: the loop that it is told from is not ours."""

    def __init__(self, names: tuple[str, ...], say: Say) -> None:
        self._names = dict.fromkeys(names) if os.environ.get("RANK", "0") == "0" else {}
        self._say = say
        self._written: dict[str, Figures] = {}

    def write(self, run: Run, directory: Path, step: int, *, last: bool) -> None:
        """Write figures that are new. step: of the script. last: whether all is measured; a tracker without an active
        run is told of then."""
        figures = figures_of(run) if self._names else {}
        for name in self._names:
            before = self._written.get(name, {})
            new = {key: value for key, value in figures.items() if before.get(key) != value}
            if not new:
                continue
            try:
                where = _INTO[name](new, step)
                if where is None and last and not before and name == "tensorboard":
                    where = _own_event_file(new, run, directory, step)
            except Exception as error:  # Whatever a library raises, the script goes on.
                self._say(f"--log {name}: nothing is written: {one_line(error)}")
                continue
            if where is not None:
                self._written[name] = figures
                if not before:
                    self._say(f"--log {name}: figures go to {where}")
            elif last:
                lacks = "its run has ended, and lacks what was measured after the times"
                none = f"no run of {TRACKERS[name]} is active in this script, so nothing is written"
                self._say(f"--log {name}: {lacks if before else none}")


def write_own(names: tuple[str, ...], run: Run, directory: Path, say: Say) -> None:
    """Write a run's figures into what is active in this process, or else into a run that is made for them."""
    figures = figures_of(run)
    for name in dict.fromkeys(names) if figures else ():
        try:
            say(f"--log {name}: figures are in {_INTO[name](figures, 0) or _OWN[name](figures, run, directory)}")
        except Exception as error:  # What was measured is stored, whatever a library raises.
            say(f"--log {name}: nothing is written: {one_line(error)}")


# Into what is active in this process. Each returns its name, or None where nothing is.


def _into_wandb(figures: Figures, step: int) -> str | None:
    """Beside the figures that the script logs next: wandb counts steps itself, by what is logged."""
    active = getattr(sys.modules.get("wandb"), "run", None)
    if active is None:
        return None
    active.log(dict(figures), commit=False)
    return f"the run {active.name or active.id}"


def _into_mlflow(figures: Figures, step: int) -> str | None:
    """Into the active run, or that of Lightning's logger, which makes none active."""
    mlflow: Any = sys.modules.get("mlflow")
    if mlflow is not None and (active := mlflow.active_run()) is not None:
        mlflow.log_metrics(dict(figures), step=step)
        return f"the run {active.info.run_name or active.info.run_id}"
    for module in ("lightning.pytorch.loggers.mlflow", "pytorch_lightning.loggers.mlflow"):
        for logger in _alive(module, "MLFlowLogger"):
            logger.log_metrics(dict(figures), step)
            return f"the run {logger.run_id}"
    return None


def _into_tensorboard(figures: Figures, step: int) -> str | None:
    """Into the script's writer; where it has several, that whose folder's name is the shortest."""
    writers = [each for each in _alive("torch.utils.tensorboard.writer", "SummaryWriter") if each.file_writer]
    if not writers:
        return None
    writer = min(writers, key=lambda each: (len(str(each.log_dir)), str(each.log_dir)))
    for name, value in figures.items():
        writer.add_scalar(name, value, step)
    writer.flush()
    return str(writer.log_dir)


def _alive(module: str, name: str) -> list[Any]:
    """The objects of a class that are alive; none where nothing has loaded its module."""
    kind = getattr(sys.modules.get(module), name, None)
    # Not isinstance: it asks the object, which may be a proxy that computes.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)] if isinstance(kind, type) else []


_INTO: dict[str, Callable[[Figures, int], str | None]] = {
    "wandb": _into_wandb,
    "mlflow": _into_mlflow,
    "tensorboard": _into_tensorboard,
}


# Into a run that is made for them.


def _own_wandb(figures: Figures, run: Run, directory: Path) -> str:
    wandb = importlib.import_module("wandb")
    project = os.environ.get("WANDB_PROJECT", "stepscope")
    with wandb.init(project=project, name=run.id, config=_described(run)) as tracked:
        tracked.log(dict(figures))
    return f"the run {run.id} of the project {project}"


def _own_mlflow(figures: Figures, run: Run, directory: Path) -> str:
    mlflow = importlib.import_module("mlflow")
    with mlflow.start_run(run_name=run.id):
        mlflow.log_params(_described(run))
        mlflow.log_metrics(dict(figures))
    return f"the run {run.id} at {mlflow.get_tracking_uri()}"


def _own_event_file(figures: Figures, run: Run, directory: Path, step: int = 0) -> str:
    with importlib.import_module("torch.utils.tensorboard").SummaryWriter(directory / FOLDER) as writer:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
    return str(directory / FOLDER)


def _described(run: Run) -> dict[str, str]:
    """What was measured, as the configuration of a tracker's run."""
    device = run.environment.device_name if run.environment is not None else ""
    return {"workload": cell_name(run.workload), "device": device, "tag": run.tag or ""}


_OWN: dict[str, Callable[[Figures, Run, Path], str]] = {
    "wandb": _own_wandb,
    "mlflow": _own_mlflow,
    "tensorboard": _own_event_file,
}
