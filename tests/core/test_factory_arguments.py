"""Arguments of a user's factory as they are written, and the digest of its file."""

import sys
from pathlib import Path

import pytest

from stepscope.core.errors import InputError
from stepscope.core.user_model import code_digest, code_folder, file_of, parse_arguments


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ("n=3", (3,)),
        ("x=0.5", (0.5,)),
        ("on=true", (True,)),
        ("on=False", (False,)),
        ("none=null", (None,)),
        ("name=tiny", ("tiny",)),
        ("name=", ("",)),
        ("widths=64,128", (64, 128)),
        ("names=a,b", ("a", "b")),
        ("mixed=1,x,null", (1, "x", None)),
        ("sizes=[1,2]", ([1, 2],)),
        ("quoted=\"a,b\"", ("a,b",)),
        ("object={}", ("{}",)),
        ("nan=NaN", ("NaN",)),
        ("url=a=b", ("a=b",)),
    ],
)  # fmt: skip
def test_a_value_is_what_json_makes_of_it_or_text(written: str, values: tuple[object, ...]):
    (found,) = parse_arguments([written]).values()
    assert found == values and [type(v) for v in found] == [type(v) for v in values]


@pytest.mark.parametrize("written", ["width=16,depth=2", "width=16, depth=2", "names=a,b,c_1=d"])
def test_a_second_argument_behind_a_comma_is_refused_and_no_value_of_the_first(written: str):
    with pytest.raises(InputError, match=r"is another argument: write --arg"):
        parse_arguments([written])
    name, _, value = written.partition("=")
    assert parse_arguments([f'{name}="{value}"']) == {name: (value,)}


@pytest.mark.parametrize("written", ["width", "=3", "2x=1", "a b=1", "-x=1"])
def test_what_is_no_argument_is_refused(written: str):
    with pytest.raises(InputError, match="write name=value"):
        parse_arguments([written])


def test_an_argument_that_is_given_twice_is_refused():
    with pytest.raises(InputError, match="twice"):
        parse_arguments(["a=1", "a=2"])


def test_the_digest_follows_the_file_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "digested"
    package.mkdir()
    for file in (package / "__init__.py", package / "model.py", tmp_path / "single.py"):
        file.write_text("raise SystemExit('imported')\n")
    digests = [code_digest(name) for name in ("digested.model:make", "digested:make", "single:make", "single.py:make")]
    assert all(digests) and len(set(digests)) == 1
    (package / "model.py").write_text("x = 1\n")
    assert code_digest("digested.model:make") != digests[0] == code_digest("digested:make")
    for nothing in ("digested.other:make", "nowhere:make", "absent.py:make", "", ":make", "single.py"):
        assert code_digest(nothing) == ""


def test_the_folder_of_a_users_code_is_that_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And not where the user stands; there where there is no file of theirs, as in a notebook or with a command."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (script := elsewhere / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert code_folder(script) == elsewhere == code_folder(file_of("elsewhere/train.py:make"))
    for file in (None, Path(sys.executable), tmp_path / "gone.py"):
        assert code_folder(file) == tmp_path
