"""Model configurations, workloads and their keys."""

import msgspec
import pytest

from stepscope.core.errors import InputError
from stepscope.core.model_config import PRESETS, ModelConfig, configure
from stepscope.core.workload import Workload
from stepscope.studies.grid import grid
from tests.conftest import workload


def test_an_overridden_preset_gets_a_name_of_its_own():
    assert configure("small") is PRESETS["small"]
    assert configure("small", d_ff=3072) is PRESETS["small"]
    changed = configure("small", d_ff=4096)
    assert changed.name == "small+d_ff4096"
    assert changed.d_ff == 4096 and changed.d_model == 768


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"heads": 7}, "heads 7 do not divide d_model 768"),
        ({"layers": 0}, "layers is 0"),
        ({"d_model": -5}, "d_model is -5"),
        ({"heads": 256}, "head_dim is 3"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], says: str):
    with pytest.raises(InputError, match=says):
        configure("small", **sizes)


def test_the_remedy_for_heads_really_divides():
    with pytest.raises(InputError) as caught:
        configure("small", heads=7)
    offered = [int(word) for word in str(caught.value).rpartition("one of ")[2].split(",")]
    assert offered and all(768 % h == 0 and (768 // h) % 2 == 0 for h in offered)


def test_unknown_model_lists_the_known():
    with pytest.raises(InputError, match=r"unknown model 'smal'.*small, medium"):
        configure("smal")


def test_equal_workloads_share_a_key_and_others_do_not():
    assert workload().key == workload().key
    keys = {w.key for w in grid(model=["tiny", "small"], seq_len=[16, 32], dtype=["fp32", "bf16"], seed=[0, 1])}
    assert len(keys) == 16
    assert workload().key.startswith("tiny-b2-s16-fp32-train-")


def test_the_optimizer_splits_no_cells_without_a_train_phase():
    a, b = (workload(phase="forward", optimizer=name) for name in ("adamw-loop", "adamw-fused"))
    assert a == b and a.key == b.key and a.optimizer is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq_len", 0), ("batch_size", -1), ("seq_len", "128"), ("dtype", "fp64"), ("phase", "backward"),
        ("attention", "flash"), ("compile", "fast"), ("optimizer", "sgd"),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused(field: str, value: object):
    with pytest.raises(InputError):
        workload(**{field: value})


def test_a_workload_survives_json():
    original = workload(dtype="bf16", attention="sdpa", compile="default")
    assert msgspec.json.decode(msgspec.json.encode(original), type=Workload) == original


def test_at_most_is_about_sizes_and_equal_choices():
    small, large = workload(seq_len=16), workload(seq_len=32)
    assert small.at_most(large) and small.at_most(small)
    assert not large.at_most(small)
    assert not small.at_most(workload(seq_len=32, dtype="bf16"))
    wide = ModelConfig(name="wide", d_model=256, d_ff=64, layers=4, heads=4)
    assert not small.at_most(workload(model=wide, seq_len=32))  # d_ff is smaller: nothing follows
