"""The text that comes with stepscope: what it is, that it is installed, and its unigram by hand."""

import math
from importlib.resources import files
from pathlib import Path

import pytest

from stepscope.questions.quality_training import WORKS, BundledText, bundled_text


def test_the_text_is_there_and_is_what_its_note_says():
    text = bundled_text()
    assert (len(text.train), len(text.held_out)) == (544_800, 60_532)
    assert text.train.lstrip().startswith(b"ALICE'S ADVENTURES IN WONDERLAND")
    assert b"Of Man's first disobedience" in text.train
    assert text.held_out.endswith(b"Through Eden took their solitary way.\n")
    assert max(text.train + text.held_out) < 128
    note = files("stepscope.questions").joinpath("text", "README.md").read_text()
    assert "148,476" in note and "456,856" in note and "public domain" in note and all(name in note for name in WORKS)


def test_the_text_goes_with_the_package():
    """Its files are package data: an installation that is not editable has them too."""
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["stepscope.questions"] == ["text/*"]


def test_a_unigram_by_hand():
    text = BundledText(train=b"aab", held_out=b"abc")
    total = 3 + 256
    assert text.unigram_loss == pytest.approx(-(math.log(3 / total) + math.log(2 / total) + math.log(1 / total)) / 3)
