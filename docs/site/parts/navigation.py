"""The pages that a folder's README lists are the folder's pages in the navigation: one that it leaves out fails."""

import re
from pathlib import PurePosixPath

from sphinx.application import Sphinx

LISTED = re.compile(r"\]\(([\w-]+)\.md\)")


def with_navigation(name: str, text: str) -> str:
    """The Markdown of a folder's README, with the pages beside it that it links to as a hidden table of contents."""
    page = PurePosixPath(name)
    if page.name != "README" or page.parent == PurePosixPath("."):
        return text
    listed = "\n".join(dict.fromkeys(LISTED.findall(text)))
    # The navigation names pages alone: without the depth every page's headings would be copied for every page.
    return f"{text}\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n\n{listed}\n```\n"


def _read(_app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = with_navigation(name, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
