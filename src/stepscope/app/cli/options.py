"""Options that several verbs share.

A parameter of a verb that states no Option takes the line of its name here, or in `engine/workload_options.py`, which
has those of a workload.
"""

from functools import partial
from pathlib import Path
from typing import Any

from stepscope.core.errors import InputError
from stepscope.core.options import (
    BUDGET,
    DEVICES,
    MEASURING,
    NUMBERS,
    OUTPUT,
    QUESTION,
    RECORDING,
    STORED,
    Option,
    completed,
    positive_numbers,
)
from stepscope.core.units import parse_bytes, parse_flops_per_s
from stepscope.rendering.renderers import STYLES

# What a shell offers after an option: names of runs and devices.


def run_names(ctx: Any, _: object, incomplete: str) -> list[str]:
    """The runs under --runs, the newest first, and `last`. A part of a name is enough, from wherever it begins."""
    from stepscope.core.run_directory import find_run_files

    files = list(find_run_files(Path(ctx.params.get("runs") or "runs")))
    names = ("last", *(file.parent.name for file in reversed(files)))
    return [name[name.index(incomplete) :] for name in names if incomplete in name]


def device_names(incomplete: str) -> list[str]:
    """The devices whose datasheets are known, each by the word of its name that has a number and is no memory."""
    from stepscope.core.device_spec import DATASHEET

    names = dict.fromkeys(
        word for name in DATASHEET for word in name.split() if any(map(str.isdigit, word)) and not word.endswith("GB")
    )
    return completed(*names)(incomplete)


# The options, by the names of the parameters that take them.


def _tag(text: str) -> str:
    if not text.isprintable() or not 0 < len(text) <= 100:
        raise InputError(f"the tag is {text[:40]!a}: use 1 to 100 printable characters")
    return text


def _picture(text: str) -> Path:
    """The path, where a picture can be written under such a name. Raises InputError before anything is measured."""
    from stepscope.rendering.plots import check_target

    target = Path(text)
    check_target(target)
    return target


def _tracker(text: str) -> str:
    from stepscope.engine.trackers import trackers_named

    return trackers_named(text)[0]


_TRACKERS = completed("wandb", "mlflow", "tensorboard")

OPTIONS = (
    Option("auto, cpu, cuda or cuda:N.", MEASURING, "device", str, "auto", complete=DEVICES),
    Option("Exactly this many warm-up steps (default: until steady).", MEASURING, "warmup", int, least=0),
    Option("Exactly this many measured steps (default: 10 to 100).", MEASURING, "steps", int, least=1),
    Option("Measure for about this long.", MEASURING, "seconds", float, 5.0, least=0),
    Option("Measure for about this long. Where it is given, the whole run ends soon after, and says what it left out.",
           MEASURING, "seconds", float, 5.0, least=0, verbs=("run",)),
    Option("Measure in so many processes, each started afresh: five or more tell how far processes differ.", MEASURING,
           "repeat", int, 1, least=1, metavar="N"),
    Option("The device's peak for this dtype, as in 989T, if unknown.", MEASURING, "peak_flops", parse_flops_per_s,
           metavar="RATE"),
    Option("Write each capture's tables beside its run, as trace-TOOL.json.", RECORDING, "keep_digests", bool, False),
    Option("Processes that judge, or compile ahead (on a GPU).", MEASURING, "workers", int, least=0),
    Option("Standard deviations of the input, as in 0.1,10,300.", NUMBERS, "scales",
           partial(positive_numbers, option="--scales")),
    Option("Fields in which the workloads may differ, as in dtype,compile: else only the same is compared.", QUESTION,
           "across", str, metavar="FIELD"),
    Option("Keep runs with field=value[,value][,field=value].", STORED, "where", str, metavar="FIELD=VALUE",
           repeated=True),
    Option("Keep the figures in this file, as they come; --from shows it.", OUTPUT, "figures", Path, metavar="FILE"),
    Option("How much PyTorch may allocate, as in 80GiB, so that a GPU stands for a smaller one.", BUDGET, "memory",
           parse_bytes, metavar="SIZE"),
    Option("Where runs lie.", STORED, "runs", Path, Path("runs"), metavar="DIR"),
    Option("Show an answer that --json wrote; nothing is run.", STORED, "from", Path, metavar="FILE"),
    Option("A word of your own to find the run by.", STORED, "tag", _tag),
    Option("Show the tables whose title contains this; `findings` for the sentences alone.", OUTPUT, "only", str),
    Option("At most ten lines: what matters, with its figures and remedies; with --json, too.", OUTPUT, "brief", bool,
           False),
    Option(f"{', '.join(STYLES)}; csv and jsonl with bare figures.", OUTPUT, "style", str, "terminal",
           complete=completed(*STYLES)),
    Option("Draw a plot into this file: .svg, .png, .html or .json.", OUTPUT, "save", _picture, metavar="FILE"),
    Option("wandb, mlflow or tensorboard, whose active run in the script gets the figures.", OUTPUT, "log", _tracker,
           (), metavar="NAME", complete=_TRACKERS, verbs=("watch",)),
    Option("wandb, mlflow or tensorboard, where a run gets the figures.", OUTPUT, "log", _tracker, (), metavar="NAME",
           complete=_TRACKERS),
    Option("Write the figures into this file as OpenMetrics, which Prometheus' collectors read.", OUTPUT, "metrics",
           Path, metavar="FILE"),
    Option("JSON on stdout, and nothing else there.", OUTPUT, "json", bool, False),
)  # fmt: skip
"""An option of a verb's own stands in its signature."""
