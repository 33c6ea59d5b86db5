"""Captions of commands: `sh measured=PATH` in the Markdown says where the repository keeps what they measured."""

import re

from sphinx.application import Sphinx

MEASURED = re.compile(r"^```sh measured=(?P<where>\S+)$", re.MULTILINE)


def captioned(text: str) -> str:
    """The Markdown, with the marks of measured commands as captions."""
    return MEASURED.sub(r"```{code-block} sh\n:caption: Measured once; kept in \g<where>", text)


def _read(_app: Sphinx, _name: str, source: list[str]) -> None:
    source[0] = captioned(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
