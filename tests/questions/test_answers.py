"""Tables by two keys, and curves that end before their line does."""

import math

from stepscope.core.answer import Point
from stepscope.questions.answers import curves, pivot


def test_a_pivot_keeps_the_order_in_which_rows_and_columns_come():
    cells = [(("b",), 2.0, 1), (("a",), 1e-5, 2), (("b",), 1e-5, 3)]
    table = pivot("T", ("name",), cells)
    assert table.columns == ("name", "2", "1e-05")
    assert table.rows == (("b", 1, 3), ("a", None, 2))


def test_a_line_that_ends_is_marked_where_it_ends_and_a_gap_is_not():
    points = [
        ("ends", 1.0, 5.0), ("ends", 2.0, math.inf), ("ends", 3.0, math.nan),
        ("gap", 1.0, 1.0), ("gap", 2.0, math.nan), ("gap", 3.0, 2.0),
        ("word", 1.0, "input overflows"),
    ]  # fmt: skip
    panel = curves(points, x_title="x", y_title="y")
    finite = (Point(line="ends", x=1, y=5), Point(line="gap", x=1, y=1), Point(line="gap", x=3, y=2))
    assert panel.points == (
        *finite,
        Point(line="ends", x=2, y=0, missing="inf"),
        Point(line="word", x=1, y=0, missing="input overflows"),
    )
    assert (panel.x_log, panel.y_log) == (False, False)


def test_a_logarithmic_scale_has_no_zero():
    panel = curves([("a", 1.0, 0.0), ("a", 2.0, 1.0)], x_title="x", y_title="y", y_log=True)
    assert panel.points == (Point(line="a", x=2, y=1),)
