"""Verbs of the precision lab as their user runs them: an answer with its plot, or one line that refuses."""

from pathlib import Path

from stepscope.core.answer import Answer, decode_answer
from tests.command import stepscope


def answered(study: str, *arguments: str, plot: Path) -> Answer:
    """The study's answer, read from its JSON, and drawn into `plot`."""
    done = stepscope("study", study, *arguments, "--json", "--save", str(plot))
    assert done.returncode == 0, done.stderr
    assert plot.stat().st_size > 1000
    return decode_answer(done.stdout.encode(), "stdout")


def refused(study: str, *arguments: object) -> str:
    """The one line that refuses these arguments."""
    done = stepscope("study", study, *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (arguments, done.stderr)
    return done.stderr
