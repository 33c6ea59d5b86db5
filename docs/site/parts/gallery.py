"""The gallery: pages that `stepscope report` makes of what results/ keeps, made anew with the site.

Each is its title, what it shows, and what follows `stepscope report`. The directive `gallery` lists them.
"""

import contextlib
import importlib
import io
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from stepscope.app.cli.app import app as verbs
from stepscope.core.errors import StepscopeError

ROOT = Path(__file__).parents[3]


class Shown(NamedTuple):
    """A page of the gallery."""

    file: str
    title: str
    what: str
    of: str
    """The arguments of `stepscope report`, from the root of the repository."""


GALLERY = (
    Shown("run", "A run", "One training step of small at sequence 512 in fp32 on an H200.", "results/h200/first"),
    Shown("script", "A script that was watched", "A small GPT in one file, and the trace of its steps.",
          "results/h200/loops/20261123T022831.717-GPT-b16-s64-fp32-train-AdamW-accumulate-2-daa14c68"),
    Shown("sweep", "A sweep", "Five models at four lengths within 80 GiB; cells that run out of memory say so.",
          "results/h200/limit-80GiB"),
    Shown("comparison", "A comparison", "Eager beside compiled: small and large, in fp32 and bf16.",
          "--compare --across compile results/h200/compile:compile=eager results/h200/compile:compile=default"),
    Shown("memory", "A memory snapshot", "Every allocation of a step of small in bf16, and its peak explained.",
          "results/h200/memory-recorded/20261121T102244.165-small-b4-s512-bf16-train-31a5933d"),
    Shown("leak", "Memory that grows", "A training loop that keeps its outputs, and the line that does so.",
          "results/h200/leak/20261123T023006.202-Sequential-b32-fp32-train-AdamW-4c4cb6c4"),
    Shown("trace", "A trace file", "A capture of torch.profiler, read from its file alone.",
          "tests/data/kineto_train.json.gz"),
    Shown("ranks", "Two ranks", "A job on two GPUs of which one is late.", "results/h200-x2/ranks/late-5"),
    Shown("study", "A study", "Does a model train as well in lower precision? Every variant beside fp32.",
          "results/h200/precision/quality.json"),
)  # fmt: skip


def can_report() -> bool:
    """Whether this stepscope has the verb."""
    return "report" in getattr(verbs, "commands", {})


def make(shown: Shown, folder: Path) -> Path:
    """Write a page into the folder, and return where it is."""
    page = folder.resolve() / f"{shown.file}.html"
    said = io.StringIO()
    try:
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = verbs(["report", *shown.of.split(), "-o", str(page)], standalone_mode=False)
    except StepscopeError as error:
        raise ExtensionError(f"stepscope report {shown.of}: {error}") from error
    if code or not page.is_file():
        raise ExtensionError(f"stepscope report {shown.of}: {said.getvalue().strip()}")
    return page


def _make_all(app: Sphinx) -> None:
    if app.builder.name == "html" and can_report():
        folder = Path(app.outdir) / "gallery"
        folder.mkdir(parents=True, exist_ok=True)
        importlib.import_module("stepscope.rendering.plots")  # drawn here: no page starts a process that imports it
        for shown in GALLERY:
            make(shown, folder)


class Gallery(SphinxDirective):
    """The list of the pages, each with a link to it, what it shows, and its command."""

    def run(self) -> list[nodes.Node]:
        made = can_report()
        listed = nodes.definition_list(classes=["gallery"])
        for shown in GALLERY:
            title = nodes.term()
            link = nodes.reference("", shown.title, refuri=f"../gallery/{shown.file}.html", internal=True)
            title += link if made else nodes.Text(shown.title)
            said = nodes.definition("", nodes.paragraph("", shown.what))
            text = f"stepscope report {shown.of}"
            said += nodes.literal_block(text, text, language="sh")
            listed += nodes.definition_list_item("", title, said)
        missing = "This version of stepscope has no report yet: the pages come with it."
        return [listed] if made else [nodes.paragraph("", missing), listed]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("gallery", Gallery)
    app.connect("builder-inited", _make_all)
    return {"parallel_read_safe": True}
