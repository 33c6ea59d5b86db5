"""A process that draws the plots of a page: it starts what draws, which takes a second, while this one reads.

Its stdin and stdout carry frames, each a length of four bytes and that much MessagePack: an Answer, and its SVG.
"""

import contextlib
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

import msgspec

from stepscope.core.answer import Answer

_LENGTH_BYTES = 4


class Drawer:
    """The process. It ends when `close` is called, or when the process that started it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: list[bytes] = []
        self._drawn: dict[bytes, str] = {}
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        with contextlib.suppress(OSError):  # without it, plots are drawn here
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stepscope.rendering.aside"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            # A thread writes, since the process reads late at first, and later only once it could write.
            threading.Thread(target=_write_all, args=(self._process.stdin, self._queue), daemon=True).start()

    def ask(self, answer: Answer) -> None:
        """Have the panels of an answer drawn, which `draw` will want."""
        asked = msgspec.msgpack.encode(answer)
        if asked not in self._asked:
            self._asked.append(asked)
            self._queue.put(asked)

    def draw(self, answers: Sequence[Answer]) -> list[str]:
        """The panels of each answer as SVG, as `picture.draw_svg` makes it; drawn here where the process is gone."""
        from stepscope.rendering.picture import draw_svg  # noqa: PLC0415

        for answer in answers:
            self.ask(answer)
        if self._process is not None and self._process.stdout is not None:
            for asked in self._asked[len(self._drawn) :]:
                data = _read(self._process.stdout)
                if data is None:
                    break
                self._drawn[asked] = msgspec.msgpack.decode(data, type=str)
        found = [self._drawn.get(msgspec.msgpack.encode(answer)) for answer in answers]
        return [draw_svg(answer) if svg is None else svg for answer, svg in zip(answers, found, strict=True)]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _write_all(stream: IO[bytes], asked: "queue.SimpleQueue[bytes]") -> None:
    with contextlib.suppress(OSError, ValueError):  # it is gone: the reader notices
        while True:
            _write(stream, asked.get())


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
    from stepscope.rendering.picture import draw_svg  # noqa: PLC0415
    from stepscope.rendering.plots.save import get_ready  # noqa: PLC0415

    get_ready()
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        while (data := _read(sys.stdin.buffer)) is not None:
            _write(sys.stdout.buffer, msgspec.msgpack.encode(draw_svg(msgspec.msgpack.decode(data, type=Answer))))


if __name__ == "__main__":
    _serve()
