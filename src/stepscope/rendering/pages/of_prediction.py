"""The page of a prediction of memory, from what `stepscope fit --json` wrote."""

import json
from collections.abc import Mapping
from typing import Any

from stepscope.core.answer import decode_answer
from stepscope.core.errors import InputError
from stepscope.core.page import Figure, Page
from stepscope.core.units import format_bytes
from stepscope.rendering.pages.of_answer import page_of_answer

_KEYS = frozenset({"peak_bytes", "estimate", "answer"})


def is_prediction(document: object) -> bool:
    """Whether a JSON document is a prediction, or several."""
    first = document[0] if isinstance(document, list) and document else document
    return isinstance(first, dict) and first.keys() >= _KEYS


def page_of_prediction(document: Any, source: str) -> Page:
    """The page of one prediction. Raises InputError for several, and for one that is no prediction inside."""
    if isinstance(document, list):
        raise InputError(
            f"{source} holds {len(document)} predictions: predict for one --memory, or one --device, and name that file"
        )
    answer = decode_answer(json.dumps(document["answer"]).encode(), source)
    try:
        figures = tuple(_figures(document))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{source} is no whole prediction ({error}): write it anew by stepscope fit --json") from None
    # The verdict is the first sentence under a table, where the others say how it came to be.
    sentence = next((line.text for table in answer.tables for line in table.notes), "")
    return page_of_answer(answer, "prediction", sentence=sentence, figures=figures)


def _figures(document: Mapping[str, Any]) -> list[Figure]:
    fits, margin, estimate = document["fits"], document["margin_bytes"], document["estimate"]
    figures = [
        Figure(name="peak", value=format_bytes(document["peak_bytes"]), note="predicted, by PyTorch's allocator"),
    ]
    if fits is not None:
        figures += [
            Figure(name="fits", value="yes" if fits else "no", note=str(document["budget"]["said"])),
            Figure(name="left" if margin >= 0 else "missing", value=format_bytes(abs(margin))),
        ]
    largest = max(document["categories"].items(), key=lambda one: one[1])
    figures.append(Figure(name="most of it", value=str(largest[0]), note=format_bytes(largest[1])))
    saved = estimate.get("saved_for_backward")
    if saved:
        figures.append(Figure(name="saved for backward", value=format_bytes(saved), note="when forward ends"))
    return figures
