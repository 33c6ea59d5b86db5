"""An answer as bars and sparklines in text of 80 columns, without colour: for a quick look, also through a pipe.

Where stdout cannot say block characters, the same in ASCII.
"""

import re
import sys

from rich.text import Text

from stepscope.core.answer import MEASURED_STEP, Answer, Panel, Point
from stepscope.core.errors import printable
from stepscope.core.units import figure_text
from stepscope.rendering.cells import sentences_of, where_of

WIDTH = 80
_WIDEST_NAME = 28
_FIGURE = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_LEVELS_ASCII = "_.-=+*#@"


def render(answer: Answer) -> str:
    """Every panel as bars, or as a sparkline a line; then the sentences. Figures stand beside what is drawn."""
    blocks = says_blocks()
    heading = [line.text for line in answer.lead] or [answer.question, where_of(answer)]
    parts = [printable(line) for line in heading if line]
    for panel in answer.panels:
        drawn = _bars(panel, blocks) if panel.kind in ("bars", "stack") else _sparklines(panel, blocks)
        parts += ["", printable(panel.frame.heading or panel.y_title), *drawn] if drawn else []
    if not answer.panels:
        parts += ["", "Nothing here is drawn: leave out --style bars to see the tables."]
    return "\n".join([*parts, "", *(line.text for line in sentences_of(answer))]) + "\n"


_COLOURS = {"forward": "cyan", "backward": "blue", "optimizer": "magenta", "error": "bold red", "warning": "yellow"}
_DRAWN = re.compile(r"[▁-█▉▊▋▌▍▎▏]+|(?<=  )#+(?=$| \*)")


def coloured(answer: Answer) -> Text:
    """The same for a terminal that has colours: a phase has its own, a doubted bar is yellow as its mark says, and a
    missing one is red. No colour says what the text does not."""
    text = Text(render(answer))
    begin = 0
    for line in text.plain.splitlines(keepends=True):
        first = line.partition(" ")[0]
        drawn = _DRAWN.search(line)
        if drawn is not None:
            style = "yellow" if line.rstrip().endswith(" *") else _COLOURS.get(first, "green")
            text.stylize(style, begin + drawn.start(), begin + drawn.end())
        elif first in ("error", "warning"):
            text.stylize(_COLOURS[first], begin, begin + len(first))
        elif line.rstrip().endswith("OOM"):
            text.stylize("red", begin, begin + len(line))
        begin += len(line)
    return text


def step_by_step(answer: Answer) -> list[str]:
    """The time of every measured step of a run, a sparkline a part; nothing for an answer without such a curve."""
    panels = [panel for panel in answer.panels if panel.kind == "curves" and panel.x_title == MEASURED_STEP]
    return [line for panel in panels for line in (f"{panel.frame.heading}, ms", *_sparklines(panel, says_blocks()))]


def bar_of(share: float, width: int, *, blocks: bool) -> str:
    """A bar of a share of the width: to an eighth of a character in blocks, to a whole one in ASCII."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if not blocks:
        return "#" * (eighths // 8 or (1 if eighths else 0))
    return _EIGHTHS[8] * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def sparkline(values: list[float], width: int, *, blocks: bool) -> str:
    """A character for each value, or for the mean of neighbours where they are more than the width."""
    count = min(len(values), width)
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    levels = _LEVELS if blocks else _LEVELS_ASCII
    low, high = min(means, default=0.0), max(means, default=0.0)
    if high == low:
        return levels[0] * count
    return "".join(levels[round((mean - low) / (high - low) * (len(levels) - 1))] for mean in means)


def _bars(panel: Panel, blocks: bool) -> list[str]:
    several = len({point.line for point in panel.points}) > 1
    names = [_name(f"{point.name} {point.line}" if several else point.name) for point in panel.points]
    longest = max((len(name) for name in names), default=0)
    most = max((point.y for point in panel.points if point.is_drawn), default=0.0)
    room = WIDTH - longest - _FIGURE - 4
    lines: list[str] = []
    for name, point in zip(names, panel.points, strict=True):
        if not point.is_drawn:
            lines.append(f"{name:{longest}}  {printable(point.missing) or 'nan':>{_FIGURE}}")
            continue
        mark = " *" if point.doubted else ""
        bar = bar_of(point.y / most if most else 0.0, room, blocks=blocks)
        lines.append(f"{name:{longest}}  {figure_text(point.y, '.4g'):>{_FIGURE}}  {bar}{mark}".rstrip())
    return lines


def _sparklines(panel: Panel, blocks: bool) -> list[str]:
    by_line: dict[str, list[Point]] = {}
    for point in panel.points:
        if point.is_drawn:
            by_line.setdefault(f"{point.line} {point.style}".strip(), []).append(point)
    longest = max((len(_name(name)) for name in by_line), default=0)
    ends = 2 * _FIGURE + 4
    return [
        f"{_name(name):{longest}}  {figure_text(min(point.y for point in points), '.4g'):>{_FIGURE}} to "
        f"{figure_text(max(point.y for point in points), '.4g'):<{_FIGURE}}  "
        + sparkline(
            [point.y for point in sorted(points, key=lambda point: point.x)], WIDTH - longest - ends - 4, blocks=blocks
        )
        for name, points in by_line.items()
    ]


def _name(text: str) -> str:
    return printable(text, _WIDEST_NAME)


def says_blocks() -> bool:
    """Whether stdout can say block characters."""
    try:
        (_EIGHTHS + _LEVELS).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
