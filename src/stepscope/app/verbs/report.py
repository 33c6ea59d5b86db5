"""`stepscope report`: a run, or anything else that stepscope reads, as one HTML page."""

import contextlib
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stepscope.app.cli.output import emit
from stepscope.core.environment import give_pages_back, without_collector
from stepscope.core.errors import InputError, choose, warn
from stepscope.core.options import OUTPUT, Argument, Option, Rule, verb
from stepscope.core.run_directory import RUN_FILE, check_is_ours, write_atomically
from stepscope.rendering.pages import GENERATOR
from stepscope.rendering.picture import Drawer

if TYPE_CHECKING:
    from stepscope.rendering.pages import Page


Output = Annotated[
    Path | None,
    Option(
        "Write the page into this file (default: report.html in the run's folder, or NAME.report.html here).",
        OUTPUT,
        metavar="FILE",
        short="-o",
    ),
]
OpenPage = Annotated[bool, Option("Open the page in a browser.", OUTPUT, spelled="--open")]
Compare = Annotated[bool, Option("Two names are two sides: what changed, and how sure that is.", OUTPUT)]
Plots = Annotated[Path | None, Option("Also write each plot of the page into this folder.", OUTPUT, metavar="DIR")]
PlotsAs = Annotated[
    str | None, Option("The form of those plots, svg unless it is said.", OUTPUT, choices=("svg", "png"))
]
Redact = Annotated[bool, Option("Leave out hosts, paths, arguments, lines of source and commands.", OUTPUT)]


@verb(
    "report",
    "stepscope report last --open",
    "stepscope report results/h200/plain -o sweep.html --plots plots",
    conflicts=(
        Rule(
            "needs",
            ("--across", "--compare"),
            "--across belongs to --compare: it says in what the two sides may differ",
        ),
    ),
)
@without_collector()
def command(
    what: Annotated[
        list[str],
        Argument(
            "A run, `last`, a set, `runs` for the index of all runs, another folder of runs, a trace, the traces of "
            "several ranks, a memory snapshot, or an answer that --json wrote.",
            metavar="WHAT...",
            names_a_run=True,
        ),
    ],
    *,
    output: Output,
    open_page: OpenPage = False,
    compare: Compare = False,
    across: tuple[str, ...] = (),
    plots: Plots,
    plots_as: PlotsAs,
    redact: Redact = False,
    runs: Path,
) -> None:
    """Write one HTML page that needs nothing else: look at it, print it, send it."""
    give_pages_back()
    # A form that there is not is said first, whether or not there are plots.
    choose(plots_as or "svg", ("svg", "png"), "--plots-as")
    if plots_as is not None and plots is None:
        raise InputError("--plots-as belongs to --plots: name the folder for the plots, as in --plots plots")
    target = output or _target(what, runs)
    _check(target, plots)
    from stepscope.rendering.pages.index import is_index, page_of_index
    from stepscope.rendering.pages.named import page_named, page_of_comparison

    index = is_index(what, runs) and not compare
    with contextlib.ExitStack() as stack:
        drawers: list[Drawer] = []

        def will_draw() -> None:  # another process gets ready to draw while this one reads
            drawers.append(stack.enter_context(contextlib.closing(Drawer())))

        if index:
            page = page_of_index(Path(what[0]))
        elif compare:
            page = page_of_comparison(what, runs, across, warn)
        else:
            page = page_named(what, runs, warn, will_draw)
        if redact:
            from stepscope.rendering.pages.html import redacted

            page = redacted(page, what)
        from stepscope.rendering.pages.html import render_page

        text = render_page(page, drawers[0].draw if drawers else None)
    try:
        write_atomically(text.encode(errors="replace"), target)
    except OSError as error:
        raise InputError(f"cannot write the page {target}: {error.strerror or error}") from None
    if plots is not None:
        _plot(page, plots, plots_as or "svg")
    emit(f"{target}\n")
    if open_page:
        webbrowser.open(target.resolve().as_uri())


def _target(what: list[str], runs: Path) -> Path:
    """Where the page goes that nobody named a place for: beside a run, and for anything else into this folder."""
    from stepscope.core.run_directory import find_place

    if len(what) == 1:
        try:
            place = find_place(what[0], runs)
        except InputError:
            return Path(f"{Path(what[0]).name}.report.html")
        if place.is_dir() and (place / RUN_FILE).is_file():
            return place / "report.html"
        name = place.resolve().name
        return Path(f"{name.partition('.')[0] or name}.report.html")
    return Path("stepscope.report.html")


def _check(target: Path, plots: Path | None) -> None:
    """Raise InputError, before anything is read, where no page can be written there, or no plots."""
    if str(target) == "-":
        raise InputError("-o takes a file, and a page is not written to stdout: write -o page.html, say")
    if target.is_dir():
        raise InputError(f"cannot write the page {target}: it is a folder; name a file in it")
    if not target.parent.is_dir():
        raise InputError(f"cannot write the page {target}: there is no folder {target.parent}, make it first")
    check_is_ours(target, GENERATOR)
    if plots is not None and not plots.parent.is_dir():
        raise InputError(f"cannot write plots to {plots}: there is no folder {plots.parent}, make it first")


def _plot(page: "Page", folder: Path, suffix: str) -> None:
    from stepscope.rendering.picture import draw_panels

    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write plots to {folder}: {error.strerror or error}") from None
    written = draw_panels(page, folder, suffix)
    warn(f"{written} plots in {folder}")
