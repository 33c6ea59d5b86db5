"""Makes a Hugging Face model from its configuration alone, with random weights and a random batch. Nothing is
downloaded.

The file names the `model_type` and, in `architectures`, the class. Without a class, the causal language model of this
type is made.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepscope.core.errors import InputError, one_line
from stepscope.core.files import read_document
from stepscope.core.model_file import without_options
from stepscope.training.user_module.module_step import UserModule
from stepscope.training.user_module.user_code import printed_to_stderr, said_of

BATCH_SIZE, SEQ_LEN = 4, 512
"""The size of a batch that no argument gives."""

_BATCHES = 4
_ATTENTION = "_attn_implementation"
"""What a configuration calls the attention that its model runs; its file may leave out the first character."""
_OF_DTYPE = "say --dtype, where bf16-pure has parameters in bfloat16"
_SAID_ELSEWHERE = {
    "dtype": _OF_DTYPE,
    "torch_dtype": _OF_DTYPE,
    "quantization_config": "its parameters are made anew, and not quantised",
    "gradient_checkpointing": "say --checkpointing",
    "compression_config": "its parameters are made anew, and not quantised",
    "use_cache": "in training no next token needs the keys and values",
    "model_type": "another type has fields of its own: write another file",
}
"""Fields that no argument changes, and why."""


def make_from_config(file: str, arguments: Mapping[str, Any], device: torch.device | None = None) -> UserModule:
    """The model of a configuration with random batches for it.

    arguments: `batch_size` and `seq_len`; any other replaces a field of the configuration. device: where the parameters
    are made. A CPU takes seconds to draw half a billion random numbers, once for each process that measures.
    """
    name = f"--model {file}"
    fields = _fields(Path(file), name)
    sizes = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN}
    sizes |= {key: arguments[key] for key in sizes if key in arguments}
    length_is_asked = "seq_len" in arguments
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name}: {key} is {value!r}: give a whole number from 1 on")
    with printed_to_stderr():
        changes = {key: v for key, v in arguments.items() if key not in sizes}
        config = _config(fields, changes, name)
        with device or contextlib.nullcontext():
            model = _model(config, {**fields, **changes}.get("architectures"), name)
        length = sizes["seq_len"] if length_is_asked else min(sizes["seq_len"], _positions(config) or SEQ_LEN)
        batches = [_batch(model, config, sizes["batch_size"], length, name) for _ in range(_BATCHES)]
    return UserModule(name=name, module=model, batches=batches)


def _transformers(name: str) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers  # noqa: PLC0415  (optional: `pip install 'stepscope[transformers]'`)
    except ImportError as error:
        raise InputError(f"{name} needs transformers: pip install 'stepscope[transformers]'") from error
    return transformers


def _fields(file: Path, name: str) -> dict[str, Any]:
    try:
        fields = json.loads(read_document(file))
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is no JSON: {one_line(error)}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise InputError(f"{name} has no model_type: give the config.json of a Hugging Face model")
    if fields.get("auto_map"):
        raise InputError(
            f"{name} names code of its own (auto_map), which is elsewhere: write a factory that imports it"
        )
    return fields


def _config(fields: dict[str, Any], changes: Mapping[str, Any], name: str) -> Any:
    transformers = _transformers(name)
    kind = fields["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise InputError(f"{name}: transformers {transformers.__version__} knows no model_type {kind!r}")
    _check_changes(changes, name)
    config_class = transformers.CONFIG_MAPPING[kind]
    with said_of(f"{name} is no configuration of {kind}"):
        usual = config_class()
    changes = {_ATTENTION if key == _ATTENTION[1:] else key: value for key, value in changes.items()}
    for key in changes:
        if not hasattr(usual, key):
            raise InputError(f"{name} has no field {key!r}: --arg gives batch_size, seq_len or a field of the file")
    with said_of(f"{name} is no configuration of {kind}"):
        config = config_class.from_dict(without_options({**fields, **changes}))
    config.use_cache = False
    return config


def _check_changes(changes: Mapping[str, Any], name: str) -> None:
    """Raise InputError for fields that options say."""
    for key in changes:
        if key in _SAID_ELSEWHERE:
            raise InputError(f"{name} does not take --arg {key}: {_SAID_ELSEWHERE[key]}")


def _model(config: Any, architectures: Any, name: str) -> Any:
    transformers = _transformers(name)
    named = architectures[0] if isinstance(architectures, list) and architectures else architectures or None
    if not isinstance(named, str | None):
        raise InputError(f"{name} has the architectures {architectures!r}: name one class")
    if named is None and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"{name} has no causal language model: name its class in `architectures`")
    model_class = transformers.AutoModelForCausalLM.from_config if named is None else getattr(transformers, named, None)
    if not callable(model_class):
        raise InputError(f"{name}: transformers {transformers.__version__} has no class {named!r}")
    attention = getattr(config, _ATTENTION, None)
    instead = f" with attn_implementation {attention} (--arg attn_implementation=sdpa is another)" if attention else ""
    with said_of(f"{name} cannot be made{instead}"):
        return model_class(config)


def _batch(model: Any, config: Any, samples: int, length: int, name: str) -> dict[str, Tensor]:
    """Random inputs and labels, as the model's class takes them."""
    inputs = _INPUTS.get(model.main_input_name)
    if inputs is None:
        raise InputError(f"{name} reads {model.main_input_name}, for which no batch is known: write a factory")
    with said_of(f"{name} has no size that its batch needs"):
        batch = {model.main_input_name: inputs(config, samples, length)}
        labels = next((make for suffix, make in _LABELS.items() if type(model).__name__.endswith(suffix)), None)
        if labels is None:
            raise InputError(
                f"{name}: {type(model).__name__} has no loss that is known: name another class in `architectures`, "
                "or write a factory"
            )
        longest = _positions(config)
        if longest is not None and model.main_input_name == "input_ids" and length > longest:
            raise InputError(f"{name} has {longest} positions, and seq_len is {length}: choose at most {longest}")
        return batch | labels(config, samples, min(length, longest) if longest else length)


def _positions(config: Any) -> int | None:
    """The longest sequence that the model has positions for; None where it says none."""
    text = config.get_text_config(decoder=True)
    return getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)


def _tokens(config: Any, samples: int, length: int) -> Tensor:
    return torch.randint(config.get_text_config(decoder=True).vocab_size, (samples, length))


def _pixels(config: Any, samples: int, _length: int) -> Tensor:
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(samples, getattr(config, "num_channels", 3), height, width)


def _spectrum(config: Any, samples: int, _length: int) -> Tensor:
    return torch.randn(samples, config.num_mel_bins, 2 * config.max_source_positions)


def _classes(config: Any, samples: int, _length: int) -> dict[str, Tensor]:
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":  # each class is one of its own, and its loss takes floating numbers
        return {"labels": torch.randint(2, (samples, config.num_labels)).float()}
    if problem == "regression":
        return {"labels": torch.randn((samples, config.num_labels) if config.num_labels > 1 else (samples,))}
    return {"labels": torch.randint(config.num_labels, (samples,))}


_INPUTS: dict[str, Callable[[Any, int, int], Tensor]] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_features": _spectrum,
    "input_values": lambda _config, samples, length: torch.randn(samples, length),
}
"""What makes the input of a model, by the name of its main input."""

_LABELS: dict[str, Callable[[Any, int, int], dict[str, Tensor]]] = {
    "ForCausalLM": lambda c, n, s: {"labels": _tokens(c, n, s)},
    "LMHeadModel": lambda c, n, s: {"labels": _tokens(c, n, s)},
    "ForMaskedLM": lambda c, n, s: {"labels": _tokens(c, n, s)},
    "ForConditionalGeneration": lambda c, n, s: {"labels": _tokens(c, n, s)},
    "ForTokenClassification": lambda c, n, s: {"labels": torch.randint(c.num_labels, (n, s))},
    "ForQuestionAnswering": lambda _c, n, s: {
        which: torch.randint(s, (n,)) for which in ("start_positions", "end_positions")
    },
    "ForSequenceClassification": _classes,
    "ForImageClassification": _classes,
    "ForAudioClassification": _classes,
}
"""What makes the labels, by the end of the class' name."""
