"""Links that leave docs/: the site has pages of its own for some files, takes the others along, and names folders.

In the Markdown every link leads to a file of the repository, so that it holds on a code host, too.
"""

import re
from os.path import relpath
from pathlib import Path

from sphinx.application import Sphinx

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "site/contributing.md", "CHANGELOG.md": "site/changelog.md"}
"""Files beside docs/, each with the page of the site that stands for it, from docs/."""
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!https?://)(?P<target>[^)#\s]+)(?P<anchor>#[^)]*)?\)")


def linked(text: str, page: Path, docs: Path) -> str:
    """The Markdown of a page of docs/, with its links that leave docs/ as the site has them."""

    def changed(link: re.Match[str]) -> str:
        target = (page.parent / link["target"]).resolve()
        if target.is_dir():
            return f"{link['text']} (`{target.relative_to(docs.parent)}`)"
        stand_in = PAGES.get(str(target.relative_to(docs.parent))) if target.is_relative_to(docs.parent) else None
        if stand_in is None:
            return link[0]
        return f"[{link['text']}]({relpath(docs / stand_in, page.parent)}{link['anchor'] or ''})"

    return LINK.sub(changed, text)


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = linked(source[0], Path(app.env.doc2path(name)).resolve(), Path(app.srcdir).resolve())


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
