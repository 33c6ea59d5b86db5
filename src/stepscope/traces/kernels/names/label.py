"""A kernel's name in short: what tells it apart, without namespaces and parameter lists."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from stepscope.core.shown_text import middle_cut, name_shown
from stepscope.traces.kernels.names.decoding import decode
from stepscope.traces.kernels.names.name import NAME_LIMIT

_FUNCTORS = re.compile(r"\b\w*(?:Functor\w*|_kernel_cuda\w*|_kernel_impl|_kernel|Ops|_functor)\b")
_PLUMBING = re.compile(r"gpu_kernel_impl\w*|func_wrapper\w*|ReduceOp|elementwise_kernel|vectorized_\w+|unrolled_\w+")
"""Wrappers that every pointwise kernel has; they tell nothing apart."""
_NOT_CPP = re.compile(r"\[(?!clone|with|abi:)")
"""A bracket that no C++ name has: markup, or an escape sequence. Such a name is text, of which nothing is left out."""
_NAMELESS = "(no name)"
_LEXEMES, _LEXEMES_OF_MANGLED = re.compile(r"\w+|[^\w\s]"), re.compile(r"\d+|[^\W\d]+|[^\w\s]")
_LONGEST_DIFFERENCE = 40
"""Characters of what tells kernels of one label apart."""


def kernel_label(name: str) -> str:
    """What runs, and the functors that it applies: `elementwise_kernel BinaryFunctor MulFunctor`."""
    if not name.strip():
        return _NAMELESS
    if not name.isprintable() or _NOT_CPP.search(name.partition("<")[0].partition("(")[0]):
        return name
    decoded = decode(name)
    base = decoded.operation or decoded.function
    if decoded.library == "ATen" and decoded.arguments:
        found = dict.fromkeys(token for token in _FUNCTORS.findall(decoded.arguments) if not _PLUMBING.fullmatch(token))
        base = " ".join([base, *list(found)[:2]])
    return base


def kernel_labels(names: Iterable[str]) -> dict[str, str]:
    """A label for each name, ready to be shown. Names that share a label get what differs, or a number, behind it."""
    by_label: defaultdict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        by_label[name_shown(kernel_label(name))].append(name)
    labels: dict[str, str] = {}
    for label, sharing in by_label.items():
        labels |= {sharing[0]: label} if len(sharing) == 1 else _told_apart(label, sharing)
    taken = Counter(labels.values())
    return {name: label if taken[label] == 1 else name_shown(f"{label} {name}") for name, label in labels.items()}


def _told_apart(label: str, names: list[str]) -> dict[str, str]:
    """The label with what each of the names has between the text that all begin and that all end with."""
    pattern = _LEXEMES_OF_MANGLED if all(name.startswith("_Z") for name in names) else _LEXEMES
    lexemes = [pattern.findall(name[:NAME_LIMIT]) for name in names]
    begin, end = _shared(lexemes), _shared([each[::-1] for each in lexemes])
    told: dict[str, str] = {}
    for number, (name, each) in enumerate(zip(names, lexemes, strict=True), 1):
        between = " ".join(each[begin : max(begin, len(each) - end)])
        difference = name_shown(middle_cut(_spaced(between), _LONGEST_DIFFERENCE))
        longer = f"{label} <{difference}>" if difference else label
        told[name] = longer if longer not in told.values() and difference else f"{longer} ({number})"
    return told


def _shared(rows: list[list[str]]) -> int:
    """How many lexemes from the front all rows share."""
    return next((i for i, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1), min(map(len, rows)))


def _spaced(text: str) -> str:
    """Lexemes as C++ writes them: a space behind a comma alone."""
    return re.sub(r"(?<!,) (?=\W)|(?<=[^\w,]) ", "", text)
