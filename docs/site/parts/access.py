"""What a keyboard and a screen reader need: boxes that scroll take the focus, and lists are lists of something."""

import re
from typing import Any

from sphinx.application import Sphinx

SCROLLS = ("<pre", '<div class="table-wrapper')
"""How elements begin that scroll sideways where they are wider than the page."""
SIGNATURE = re.compile(r'<dt class="sig.*?</dt>', re.DOTALL)
PLAIN = (("<dl>", '<span class="sig-lines">'), ("</dl>", "</span>"), ("<dd>", "<span>"), ("</dd>", "</span>"))
"""Sphinx sets the arguments of a long signature as definitions of nothing."""


def accessible(body: str) -> str:
    """The HTML of a page, with what Sphinx leaves out."""
    for start in SCROLLS:
        tag, space, rest = start.partition(" ")
        body = body.replace(start, f'{tag} tabindex="0"{space}{rest}')
    return SIGNATURE.sub(_plain, body)


def _plain(signature: re.Match[str]) -> str:
    text = signature[0]
    for of_a_list, plain in PLAIN:
        text = text.replace(of_a_list, plain)
    return text


def _open(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: object) -> None:
    context["body"] = accessible(context.get("body", ""))
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", _open, priority=900)  # after Furo, which makes the tree
    return {"parallel_read_safe": True}
