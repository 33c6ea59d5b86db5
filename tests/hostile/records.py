"""Changes what a trace recorded of its operators' arguments, and counts their work: no formula may fail on any of it.

    python -m tests.hostile.records --each 200 --seed 0 --out results/cpu/hostile/records.json

Shapes, dtypes, strides and values of every operator in the repository's own captures, in those that others published
where STEPSCOPE_PUBLIC_CAPTURES names their folder, and in the examples of the rules: left out, cut short, swapped, of
wrong types, empty, nested, and far too large. A record costs its own figure, never the reading.
"""

import copy
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from stepscope.core.formulas.operator_formulas import Unknown
from stepscope.core.formulas.operator_rules import (
    OPERATOR_WORK_RULES,
    RULE_OF,
    call_sight,
    call_work,
    recorded_call,
)
from stepscope.traces.readers.kineto import BY_VALUES, Arguments, Event, block_decoder
from stepscope.traces.roofline import shapes_label
from tests.hostile.campaign import conclude, generator, parser
from tests.hostile.captures import public
from tests.operator_examples import recorded

DATA = Path(__file__).parents[1] / "data"
FIELDS = DIMS, TYPES, VALUES, STRIDES = "Input Dims", "Input type", "Concrete Inputs", "Input Strides"

Record = tuple[str, dict[str, Any]]
"""An operator's name and the arguments of its event."""

_SIDES: tuple[Any, ...] = (0, 1, 2, 3, 7, -1, 2**31, 2**47, 2**62, 2**70, 1.5, "2", None, True, [], [3], {}, "")
_SHAPES: tuple[Any, ...] = (
    [], [0], [1], [4], [2, 3], [3, 2], [2, 3, 4], [1, 2, 3, 4], [2, 2, 2, 2, 2], [[]], [[2, 3]], [[2, 3], [3, 2]],
    [[[2]]], [[], []], [1] * 100, [-1], "x", None, 7, {"a": 1}, True,
)  # fmt: skip
_DTYPES: tuple[Any, ...] = (
    "", "float", "double", "c10::BFloat16", "c10::Float8_e4m3fn", "c10::Float4_e2m1fn_x2", "c10::complex<float>",
    "long int", "int", "bool", "unsigned char", "Scalar", "ScalarList", "TensorList", "GenericList", "nonsense", 7,
    None, [], {},
)  # fmt: skip
_TEXTS: tuple[Any, ...] = (
    "", "True", "False", "true", "None", "0", "1", "2", "-1", "128", "1.5", "nan", "1e400", "9" * 400, "[]", "[0]",
    "[1]", "[-1]", "[2, 2]", "[1, 1, 1]", "[True, False, True]", "[False, False, False]", "[[1]]",
    "[" * 500 + "]" * 500, "[1,", "]", "[9999999999999999999]", "[,]", 5, None, ["x"], {}, False,
)  # fmt: skip
_CHOICES = {DIMS: _SHAPES, TYPES: _DTYPES, VALUES: _TEXTS, STRIDES: _SHAPES}


def records(paths: list[Path]) -> Iterator[Record]:
    """Each distinct record of an operator in these traces."""
    seen: set[str] = set()
    for path in paths:
        trace = json.loads(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"), strict=False)
        for event in trace["traceEvents"] if isinstance(trace, dict) else trace:
            given = event.get("args")
            if event.get("ph") == "X" and isinstance(given, dict) and (DIMS in given or "Input dims" in given):
                kept = {field: given[field] for field in (*FIELDS, "Input dims") if field in given}
                key = json.dumps([event.get("name"), kept])
                if key not in seen:
                    seen.add(key)
                    yield str(event.get("name")), kept


def examples() -> Iterator[Record]:
    """The example of each rule, for each of its operators."""
    for rule in OPERATOR_WORK_RULES:
        example = recorded(rule.example)
        given = {DIMS: json.loads(example.shapes), TYPES: json.loads(example.dtypes)}
        if example.values is not None:
            given[VALUES] = json.loads(example.values)
        yield from ((name, given) for name in rule.operators)


def changed(given: dict[str, Any], dice: Random) -> dict[str, Any]:
    """The arguments with one to three changes."""
    made = copy.deepcopy(given)
    for _ in range(dice.randint(1, 3)):
        field = dice.choice([each for each in made if each in FIELDS] or [DIMS])
        old = made.get(field)
        if not isinstance(old, list) or dice.random() < 0.1:
            made[field] = copy.deepcopy(dice.choice(_CHOICES[field]))
            continue
        kind = dice.choice(("place", "place", "side", "cut", "cut all", "more", "swap", "drop"))
        place = dice.randrange(len(old)) if old else 0
        if kind == "place" and old:
            old[place] = copy.deepcopy(dice.choice(_CHOICES[field]))
        elif kind == "side" and old and isinstance(old[place], list) and old[place]:
            old[place][dice.randrange(len(old[place]))] = copy.deepcopy(dice.choice(_SIDES))
        elif kind == "cut":
            del old[place:]
        elif kind == "cut all":
            for each in FIELDS:
                if isinstance(made.get(each), list):
                    del made[each][place:]
        elif kind == "more":
            old.insert(place, copy.deepcopy(dice.choice(_CHOICES[field])))
        elif kind == "swap" and old:
            other = dice.randrange(len(old))
            old[place], old[other] = old[other], old[place]
        elif kind == "drop":
            del made[field]
    return made


def fault_of(name: str, given: dict[str, Any]) -> str | None:
    """What goes wrong where the work of this record is counted, and its label made; None where nothing does.

    Formulas are called without the net that is spread below them in a reading: they may say Unknown, and nothing else.
    """
    try:
        (event,) = block_decoder()(json.dumps([{"ph": "X", "name": name, "args": given}]).encode())
        shapes, dtypes, values = _texts(event)
        shapes_label(shapes)
        call = recorded_call(name, shapes, dtypes, values=values, list_element_bytes=4)
        rule = RULE_OF.get(name)
        if call is None or rule is None:
            return None
        for causal in ("half", "full"):
            work = rule.work(call, causal)
            counts = work.flops, work.bytes_read, work.bytes_written
            if not all(type(count) is int and count >= 0 for count in counts):
                return f"counts {counts}"
        if rule.attention is not None:
            rule.attention.sight(call)
        if call_work(call) is None or (call_sight(call) is None) != (rule.attention is None):
            return "what is counted is not what is read"
    except Unknown:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _texts(event: Event) -> tuple[str | None, str | None, str | None]:
    """Shapes, dtypes and values as the reader takes them from an event."""
    given = event.args or Arguments()
    values = bytes(given.values) if BY_VALUES.search(str(event.name)) else b""
    texts = (bytes(given.shapes) or bytes(given.shapes_old), bytes(given.dtypes), values)
    return tuple(text.decode("utf-8", "replace") or None for text in texts)  # type: ignore[return-value]


def campaign(originals: list[Record], each: int, seed: int) -> tuple[int, list[str]]:
    """How many records were tried, and the faults."""
    dice, tried, faults = generator(seed), 0, []
    for name, given in originals:
        for number in range(each):
            made = changed(given, dice) if number else given
            fault = fault_of(name, made)
            tried += 1
            if fault is not None:
                faults.append(f"{name} {json.dumps(made)[:300]}: {fault}")
    return tried, faults


def main() -> int:
    """Exit code 0 where no record makes a formula fail, 1 where one does."""
    given = parser(__doc__)
    given.add_argument("--each", type=int, default=200, help="changes of each record")
    asked = given.parse_args()
    paths = [*sorted(DATA.glob("*.json.gz")), *public("*.json.gz")]
    originals = [*records(paths), *examples()]
    tried, faults = campaign(originals, asked.each, asked.seed)
    result = {"captures": len(paths), "records": len(originals), "changed": tried, "seed": asked.seed}
    sentence = f"{tried} changed records of {len(originals)} calls in {len(paths)} captures"
    return conclude("records", result, faults[:100], sentence, asked.out)


if __name__ == "__main__":
    sys.exit(main())
