"""Plots that another process draws: the same as those drawn here, also where that process is gone."""

from stepscope.core.answer import Answer, Panel, Point
from stepscope.rendering.picture import Drawer, draw_svg


def answer(name: str, points: int = 3) -> Answer:
    bars = tuple(Point(line="median", name=f"{name}{place}", y=place + 0.1) for place in range(points))
    return Answer(study="s", question="", panels=(Panel(x_title="", y_title="ms", points=bars, kind="bars"),))


def test_another_process_draws_the_same():
    drawer = Drawer()
    try:
        first, second = answer("a"), answer("b")
        drawer.ask(second)
        assert drawer.draw([first, second, first]) == [draw_svg(first), draw_svg(second), draw_svg(first)]
        assert drawer.draw([]) == []
    finally:
        drawer.close()


def test_plots_are_drawn_here_where_the_other_process_is_gone():
    drawer = Drawer()
    drawer.ask(answer("a"))
    drawer.close()
    assert drawer.draw([answer("a")]) == [draw_svg(answer("a"))]
