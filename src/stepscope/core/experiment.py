"""Former names of core/answer.py."""

from stepscope.core.answer import Answer as Experiment
from stepscope.core.answer import Cell, Panel, Point, Table, known_columns, measured_answer
from stepscope.core.answer import decode_answer as decode_experiment
from stepscope.core.answer import encode_answer as encode_experiment

__all__ = [
    "Cell", "Experiment", "Panel", "Point", "Table", "decode_experiment", "encode_experiment", "known_columns",
    "measured_answer",
]  # fmt: skip
