"""The questions of an assignment, each with its Answer or with the reason why there is none."""

from dataclasses import dataclass
from pathlib import Path

from stepscope.core.answer import Answer
from stepscope.core.errors import InputError
from stepscope.rendering.writeup.material import Material
from stepscope.rendering.writeup.question import Assignment, Measure, Question


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A question, and what the material says."""

    question: Question
    answer: Answer | None = None
    why: str = ""
    """Why there is no answer, where that is more than missing data."""


@dataclass(frozen=True, kw_only=True)
class WriteUp:
    """The whole write-up."""

    assignment: Assignment
    answered: tuple[Answered, ...]
    faults: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    """Where the material disagrees with itself, in sentences."""

    @property
    def count(self) -> int:
        """How many questions have their answer."""
        return sum(one.answer is not None for one in self.answered)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices on which the answers were measured."""
        named = (one.answer.device for one in self.answered if one.answer is not None)
        return tuple(dict.fromkeys(device for device in named if device))

    def missing(self, store: Path) -> tuple[Measure, ...]:
        """What is to be measured, the cheapest first, each once: for questions without an answer, and what was
        interrupted in this store."""
        measures = [(one, one.question.measure) for one in self.answered if one.question.measure is not None]
        wanted = {
            measure.name: measure for one, measure in measures if one.answer is None or measure.mark(store).exists()
        }
        return tuple(sorted(wanted.values(), key=lambda measure: measure.cost))

    def of(self, question: Question) -> Answered:
        """This question with its answer."""
        return next(one for one in self.answered if one.question is question)


def write_up(assignment: Assignment, material: Material) -> WriteUp:
    """Each question answered from the material."""
    found = tuple(_answered(question, material) for question in assignment.questions)
    return WriteUp(assignment=assignment, answered=found, faults=material.faults, doubts=material.doubts)


def _answered(question: Question, material: Material) -> Answered:
    try:
        answer = question.source(material) if question.source is not None else None
    except InputError as error:
        return Answered(question=question, why=str(error))
    if answer is not None and not any(table.rows for table in answer.tables):
        answer = None
    return Answered(question=question, answer=answer, why=question.later)
