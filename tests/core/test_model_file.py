"""What a model's config.json asks for and a step does not do: each of it is a sentence, and nothing else is."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.core.errors import InputError
from stepscope.core.evidence import Evidence
from stepscope.core.user_model import configuration_named, unmet, without_options
from stepscope.core.workloads import FactoryWorkload, UserModel
from stepscope.engine.workload_options import any_model_names, of_factory
from stepscope.runs.checks import check_run
from tests.command import stepscope
from tests.conftest import make_run

TEXT = {
    "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 67, "max_position_embeddings": 64,
    "use_cache": True, "tie_word_embeddings": False, "sliding_window": 32,
}  # fmt: skip


def workload(folder: Path, fields: dict[str, Any], dtype: Any = "fp32") -> FactoryWorkload:
    file = folder / "config.json"
    file.write_text(json.dumps(fields))
    return FactoryWorkload(model=UserModel(name=""), factory=str(file), dtype=dtype)


MADE = "is not followed: parameters are made in"


@pytest.mark.parametrize(
    ("fields", "dtype", "said"),
    [
        ({}, "fp32", []),
        ({"dtype": "float32", "quantization_config": None, "gradient_checkpointing": False}, "fp32", []),
        ({"dtype": None}, "fp32", []),
        ({"torch_dtype": "auto"}, "bf16", []),
        ({"dtype": "bfloat16"}, "fp32", [f"dtype bfloat16 {MADE} float32; --dtype bf16-pure makes them bfloat16"]),
        ({"torch_dtype": "torch.bfloat16"}, "bf16", [f"torch_dtype torch.bfloat16 {MADE} float32; --dtype bf16-pure"]),
        ({"dtype": "bfloat16"}, "bf16-pure", []),
        ({"dtype": "bfloat16"}, "bf16-master", []),
        ({"dtype": "float32"}, "bf16-pure", [f"dtype float32 {MADE} bfloat16; --dtype fp32 keeps them"]),
        ({"dtype": "float16"}, "fp16", [f"dtype float16 {MADE} float32; no option makes them float16, and --dtype"]),
        ({"dtype": "float64"}, "fp32", [f"dtype float64 {MADE} float32; no option makes them so"]),
        (
            {"text_config": {"dtype": "bfloat16"}, "vision_config": {"torch_dtype": "float16"}}, "fp32",
            [f"text_config.dtype bfloat16 {MADE}", f"vision_config.torch_dtype float16 {MADE}"],
        ),
        (
            {"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4", "dtype": "float16"}}, "bf16-pure",
            [f"quantization_config mxfp4 {MADE} bfloat16, not quantised"],
        ),
        ({"dtype": "float", "torch_dtype": ""}, "bf16", []),
        ({"dtype": "half"}, "fp32", [f"dtype half {MADE} float32; no option makes them float16, and --dtype fp16"]),
        ({"dtype": "bfloat16"}, "fp8", []),
        ({"dtype": "float32"}, "fp8-row", [f"dtype float32 {MADE} bfloat16"]),
        (
            {"dtype": "bfloat16", "text_config": {"dtype": "torch.bfloat16"}}, "fp32",
            [f"dtype bfloat16 and text_config.dtype torch.bfloat16 are{MADE[2:]} float32; --dtype bf16-pure makes"],
        ),
        (
            {"dtype": {"": "float32", "text_config": "bfloat16", "vision_config": "float16"}}, "bf16-pure",
            [f"dtype float32 {MADE} bfloat16; --dtype fp32", f"dtype.vision_config float16 {MADE} bfloat16; no option"],
        ),
        ({"dtype": "bf16\n\x1b[31m"}, "fp32", [rf"dtype bf16 \u001b[31m {MADE}"]),
        ({"vocabulary_map": {"dtype": 4}, "label2id": {"torch_dtype": 0}}, "fp32", []),
        ({"compression_config": {"quant_method": "awq"}}, "fp32", [f"compression_config awq {MADE} float32, not"]),
        ({"gradient_checkpointing": True}, "fp32", ["gradient_checkpointing is not followed: --checkpointing every-1"]),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_said(tmp_path: Path, fields: dict[str, Any], dtype: str, said: list[str]):
    found = unmet(workload(tmp_path, {**TEXT, **fields}, dtype))
    assert len(found) == len(said)
    assert all(sentence.startswith(start) for sentence, start in zip(found, said, strict=True)), found


def test_what_is_passed_over_is_what_is_said(tmp_path: Path):
    tokens = {"vocabulary_map": {"dtype": 4}}  # as of Emu3, whose tokens are words
    fields = {
        **TEXT,
        **tokens,
        "dtype": "bfloat16",
        "text_config": {"torch_dtype": "float16", "layers": [{"dtype": 1}]},
    }
    assert without_options(fields) == {**TEXT, **tokens, "text_config": {"layers": [{"dtype": 1}]}}


def test_an_argument_in_place_of_a_field_is_not_passed_over_either(tmp_path: Path):
    asked = workload(tmp_path, {**TEXT, "text_config": {"dtype": "float16"}})
    asked = msgspec.structs.replace(asked, arguments={"text_config": {"dtype": "bfloat16"}})
    assert [sentence[:26] for sentence in unmet(asked)] == ["text_config.dtype bfloat16"]


@pytest.mark.parametrize("text", ["", "[1]", "{", "null"])
def test_a_file_that_is_no_configuration_is_another_s_to_refuse(tmp_path: Path, text: str):
    asked = workload(tmp_path, {})
    (tmp_path / "config.json").write_text(text)
    assert unmet(asked) == ()
    (tmp_path / "config.json").unlink()
    assert unmet(asked) == () == unmet(FactoryWorkload(model=UserModel(name=""), factory="train.py:make"))


def test_a_run_has_it_as_a_finding_and_python_as_a_warning(tmp_path: Path):
    asked = workload(tmp_path, {**TEXT, "dtype": "bfloat16"})
    run = make_run(step=[1.0] * 9, evidence=Evidence(unmet=unmet(asked)))
    (found,) = (each for each in check_run(run) if each.kind == "config-not-followed")
    assert found.severity == "warning" and "dtype bfloat16 is not followed: parameters are made" in found.sentence
    with pytest.warns(UserWarning, match=r"config.json: dtype bfloat16 is not followed"):
        of_factory(asked.factory, None, {})


def test_a_name_of_the_hub_is_its_file_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--toy-1.5"
    for revision in ("aaa", "bbb"):
        (folder / "snapshots" / revision).mkdir(parents=True)
        workload(folder / "snapshots" / revision, TEXT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("aaa")
    config = str(folder / "snapshots" / "aaa" / "config.json")
    assert any_model_names("org/toy-1.5,tiny,some/config.json") == f"{config},tiny,some/config.json"
    assert of_factory("org/toy-1.5", None, {"seq_len": 16}) == of_factory(config, {"seq_len": 16}, {})
    assert configuration_named("a.py:make") == "a.py:make" and configuration_named("gpt2") == "gpt2"
    with pytest.raises(InputError, match=r"org/other is not in the Hugging Face cache .*: get its configuration with"):
        any_model_names("org/other")


@pytest.mark.slow
def test_the_command_says_it_and_keeps_it(tmp_path: Path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    workload(tmp_path, {**TEXT, "dtype": "bfloat16"})
    words = ("--model", "config.json", "--batch-size", 2, "--seq-len", 16)
    said = "stepscope: --model config.json: dtype bfloat16 is not followed: parameters are made in float32; --dtype b"
    fit = stepscope("fit", *words, cwd=tmp_path)
    assert fit.stderr.count(said) == 1, fit.stderr
    quick = ("--warmup", 1, "--steps", 2, "--device", "cpu", "--no-profile")
    done = stepscope("run", *words, *quick, "--json", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.count(said) == 1, done.stderr
    run = json.loads(done.stdout)
    assert len(run["evidence"]["unmet"]) == 1
    assert "config-not-followed" in [finding["kind"] for finding in run["findings"]]
    pure = stepscope("run", *words, *quick, "--dtype", "bf16-pure", "--json", cwd=tmp_path)
    assert "is not followed" not in pure.stderr and not json.loads(pure.stdout)["evidence"]["unmet"]
