"""The JSON schema of a stored run, as it is published: STEPSCOPE_UPDATE_GOLDEN=1 writes it anew."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.core.run import Run
from stepscope.core.run_directory import encode_run
from tests.conftest import make_run

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs" / "site" / "static" / "run.schema.json"
LONGEST = 2
"""Elements of a list that are looked at: the others are of the same kind."""


def schema() -> dict[str, Any]:
    """The schema of run.json. The first runs were all of the textbook's model, and do not name its kind."""
    found = msgspec.json.schema(Run)
    found["$defs"]["TextbookWorkload"]["required"].remove("kind")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "run.json of stepscope", **found}


def shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shortened(each) for key, each in value.items()}
    return [shortened(each) for each in value[:LONGEST]] if isinstance(value, list) else value


def shape(value: Any) -> Any:
    """What of a document a schema can judge, but for words that must be one of several."""
    if isinstance(value, dict):
        return tuple((key, shape(value[key])) for key in sorted(value))
    return tuple(map(shape, value)) if isinstance(value, list) else type(value)


def test_the_published_schema_is_that_of_the_record():
    text = json.dumps(schema(), indent=1) + "\n"
    if os.environ.get("STEPSCOPE_UPDATE_GOLDEN"):
        PUBLISHED.write_text(text)
    assert PUBLISHED.read_text() == text


def test_every_stored_run_is_as_the_schema_says_and_a_wrong_one_is_not():
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: pip install 'stepscope[dev]'")
    published = json.loads(PUBLISHED.read_text())
    jsonschema.Draft202012Validator.check_schema(published)
    judge = jsonschema.Draft202012Validator(published)
    files = sorted((ROOT / "results").rglob("run.json"))
    assert len(files) > 400
    documents = {file: shortened(json.loads(file.read_bytes())) for file in files}
    of_a_shape = {(each["status"], shape(each)): file for file, each in documents.items()}
    assert len(of_a_shape) > 50
    for file in of_a_shape.values():
        assert judge.is_valid(documents[file]), file
    new = json.loads(encode_run(make_run(step=[0.5] * 5)))
    assert judge.is_valid(new)
    assert not judge.is_valid({**new, "status": "perhaps"})
    assert not judge.is_valid({key: value for key, value in new.items() if key != "workload"})
    new["samples"]["step"]["values_s"][1] = "fast"
    assert not judge.is_valid(new)
