"""The panels of an answer as one picture, and those of a page as a file each."""

import contextlib
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from stepscope.core.answer import Answer, Panel
from stepscope.core.errors import InputError
from stepscope.rendering.cells import where_of
from stepscope.rendering.pages import Page


def draw_svg(answer: Answer) -> str:
    """Its panels as SVG; empty where they cannot be drawn, since too much would have to be told apart."""
    from stepscope.rendering.plots import plot_spec, plot_svg  # noqa: PLC0415

    try:
        chart = draw_answer(answer)
    except InputError:
        return ""
    return plot_svg(plot_spec(chart))


def draw_all(answers: Sequence[Answer]) -> list[str]:
    """Each of several answers as SVG, drawn in this process."""
    return list(map(draw_svg, answers))


def draw_answer(answer: Answer, *, interactive: bool = False) -> dict[str, Any]:
    """Its panels, one below the other; curves over one axis stand side by side and share their colours.

    The picture says what was asked, on which device, when, and with which versions. interactive: areas answer to the
    pointer. Raises InputError where the answer has no panels.
    """
    from stepscope.rendering import charts  # noqa: PLC0415

    if not answer.panels:
        raise InputError(f"{answer.study} has no curves: leave out --save")
    doubted = any(point.doubted for panel in answer.panels for point in panel.points)
    notes = dict.fromkeys(panel.frame.note for panel in answer.panels)
    subtitle = "; ".join(part for part in (where_of(answer), *notes, charts.HOLLOW if doubted else "") if part)
    abreast = {"curves": charts.draw_series, "points": charts.draw_points}
    alone = {"icicle": charts.draw_icicle, "timeline": charts.draw_timeline, "heat": charts.draw_heat}
    rows: list[dict[str, Any]] = []
    for panels in rows_of(answer.panels):
        first = panels[0]
        titles = {"title": "", "subtitle": ""}
        if not rows:
            titles = {"title": first.frame.heading or answer.question, "subtitle": subtitle}
        if first.kind in abreast:
            rows.append(abreast[first.kind](panels, **titles))
        elif first.kind == "areas":
            rows.append(charts.draw_areas(first, **titles, interactive=interactive))
        else:
            rows.append(alone.get(first.kind, charts.draw_bars)(first, **titles))
    if len(rows) == 1:
        return rows[0]
    return {"vconcat": rows, "resolve": {"scale": {"color": "independent", "fill": "independent"}}}


def draw_panels(page: Page, folder: Path, suffix: str) -> int:
    """Write each plot of a page into a file of its own, named by its section; their number. One that cannot be drawn,
    since it holds more than can be told apart, is left out."""
    from stepscope.rendering.plots import save_plot  # noqa: PLC0415

    written = 0
    for section in page.sections:
        for panel in section.answer.panels:
            answer = msgspec.structs.replace(section.answer, question=section.title, panels=(panel,))
            name = re.sub("[^a-z0-9]+", "-", (panel.frame.heading or section.title).casefold()).strip("-")
            try:
                chart = draw_answer(answer)
            except InputError:
                continue
            written += 1
            save_plot(chart, folder / f"{written:02}-{name or panel.kind}.{suffix}")
    return written


def rows_of(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Panels in the rows that they are drawn in. Where nothing was measured there is no row, unless nothing was
    measured anywhere."""
    over: dict[tuple[object, ...], list[Panel]] = {}
    for i, panel in enumerate(panels):
        over.setdefault(_row_of(panel, i), []).append(panel)
    rows = list(over.values())
    return [row for row in rows if any(panel.points or panel.nodes or panel.slices for panel in row)] or rows


def _row_of(panel: Panel, place: int) -> tuple[object, ...]:
    """Panels of one key share a row: curves over the same axes, points over the same x. Bars and areas stand alone."""
    match panel.kind:
        case "curves":
            return panel.kind, panel.x_title, panel.x_log, panel.y_log
        case "points":
            return panel.kind, panel.x_title, panel.x_log
        case _:
            return panel.kind, place


# A process that draws the plots of a page: it starts what draws, which takes a second, while this one reads.
#
# Its stdin and stdout carry frames, each a length of four bytes and that much MessagePack: an Answer, and its SVG.


_LENGTH_BYTES = 4


class Drawer:
    """The process. It ends when `close` is called, or when the process that started it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: list[bytes] = []
        self._drawn: dict[bytes, str] = {}
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        with contextlib.suppress(OSError):  # without it, plots are drawn here
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stepscope.rendering.picture"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            # A thread writes, since the process reads late at first, and later only once it could write.
            threading.Thread(target=_write_all, args=(self._process.stdin, self._queue), daemon=True).start()

    def ask(self, answer: Answer) -> None:
        """Have the panels of an answer drawn, which `draw` will want."""
        request = msgspec.msgpack.encode(answer)
        if request not in self._requests:
            self._requests.append(request)
            self._queue.put(request)

    def draw(self, answers: Sequence[Answer]) -> list[str]:
        """The panels of each answer as SVG, as `picture.draw_svg` makes it; drawn here where the process is gone."""
        for answer in answers:
            self.ask(answer)
        if self._process is not None and self._process.stdout is not None:
            for request in self._requests[len(self._drawn) :]:
                data = _read(self._process.stdout)
                if data is None:
                    break
                self._drawn[request] = msgspec.msgpack.decode(data, type=str)
        pictures = [self._drawn.get(msgspec.msgpack.encode(answer)) for answer in answers]
        return [draw_svg(answer) if svg is None else svg for answer, svg in zip(answers, pictures, strict=True)]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _write_all(stream: IO[bytes], requests: "queue.SimpleQueue[bytes]") -> None:
    with contextlib.suppress(OSError, ValueError):  # it is gone: the reader notices
        while True:
            _write(stream, requests.get())


def _write(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    """The next frame; None at the end."""
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "big")
    data = stream.read(length)
    return data if len(data) == length else None


def _serve() -> None:
    """Draw what comes in until it ends."""
    from stepscope.rendering.plots import plot_spec, plot_svg  # noqa: PLC0415

    # A first plot takes half a second more: it is drawn while the other process still reads.
    plot_svg(plot_spec({"data": {"values": [{"x": 0}]}, "mark": "point", "encoding": {}}))
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        while (data := _read(sys.stdin.buffer)) is not None:
            _write(sys.stdout.buffer, msgspec.msgpack.encode(draw_svg(msgspec.msgpack.decode(data, type=Answer))))


if __name__ == "__main__":
    _serve()
