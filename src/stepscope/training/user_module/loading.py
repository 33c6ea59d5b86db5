"""Makes a user's own step, ready to be measured, from the name of its factory or of its model's configuration."""

import contextlib
import copy
import dataclasses
import hashlib
import importlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.core.errors import InputError, one_line
from stepscope.core.files import read_document
from stepscope.core.units import MIB
from stepscope.core.user_model import without_options
from stepscope.core.workloads import FactoryWorkload, UserModel, Workload, is_configuration
from stepscope.training.training_step import Batch, Share, Shared, StepParts
from stepscope.training.user_module.module_step import (
    ModuleStep,
    UserModule,
    UserStep,
    check_trained,
    parts_of,
    placed,
    understand,
)
from stepscope.training.user_module.user_code import (
    Factory,
    describe_module,
    find_factory,
    input_names,
    named_tensors,
    printed_to_stderr,
    user_errors,
)

# Makes a Hugging Face model from its configuration alone, with random weights and a random batch. Nothing is
# downloaded.
#
# The file names the `model_type` and, in `architectures`, the class. Without a class, the causal language model of this
# type is made.


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
    sizes = {key: arguments.get(key, usual) for key, usual in (("batch_size", BATCH_SIZE), ("seq_len", SEQ_LEN))}
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name}: {key} is {value!r}: give a whole number from 1 on")
    with printed_to_stderr():
        changes = {key: v for key, v in arguments.items() if key not in sizes}
        config = _config(fields, changes, name)
        with device or contextlib.nullcontext():
            model = _model(config, {**fields, **changes}.get("architectures"), name)
        length = sizes["seq_len"] if "seq_len" in arguments else min(SEQ_LEN, _positions(config) or SEQ_LEN)
        batches = [_batch(model, config, sizes["batch_size"], length, name) for _ in range(_BATCHES)]
    return UserModule(name=name, module=model, batches=batches)


def _transformers(name: str) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        return importlib.import_module("transformers")  # `import` takes a type checker ten seconds
    except ImportError as error:
        raise InputError(f"{name} needs transformers: pip install 'stepscope[transformers]'") from error


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
    for key in changes:
        if key in _SAID_ELSEWHERE:
            raise InputError(f"{name} does not take --arg {key}: {_SAID_ELSEWHERE[key]}")
    config_class = transformers.CONFIG_MAPPING[kind]
    with user_errors(f"{name} is no configuration of {kind}"):
        usual = config_class()
    changes = {_ATTENTION if key == _ATTENTION[1:] else key: value for key, value in changes.items()}
    for key in changes:
        if not hasattr(usual, key):
            raise InputError(f"{name} has no field {key!r}: --arg gives batch_size, seq_len or a field of the file")
    with user_errors(f"{name} is no configuration of {kind}"):
        config = config_class.from_dict(without_options({**fields, **changes}))
    config.use_cache = False
    return config


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
    with user_errors(f"{name} cannot be made{instead}"):
        return model_class(config)


def _batch(model: Any, config: Any, samples: int, length: int, name: str) -> dict[str, Tensor]:
    """Random inputs and labels, as the model's class takes them."""
    inputs = _INPUTS.get(model.main_input_name)
    if inputs is None:
        raise InputError(f"{name} reads {model.main_input_name}, for which no batch is known: write a factory")
    with user_errors(f"{name} has no size that its batch needs"):
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


def _pixels(config: Any, samples: int, _length: int) -> Tensor:
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(samples, getattr(config, "num_channels", 3), height, width)


def _classes(config: Any, samples: int, _length: int) -> dict[str, Tensor]:
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":  # each class is one of its own, and its loss takes floating numbers
        return {"labels": torch.randint(2, (samples, config.num_labels)).float()}
    if problem == "regression":
        return {"labels": torch.randn((samples, config.num_labels) if config.num_labels > 1 else (samples,))}
    return {"labels": torch.randint(config.num_labels, (samples,))}


_INPUTS: dict[str, Callable[[Any, int, int], Tensor]] = {
    "input_ids": lambda config, samples, length: torch.randint(
        config.get_text_config(decoder=True).vocab_size, (samples, length)
    ),
    "pixel_values": _pixels,
    "input_features": lambda config, samples, _length: torch.randn(
        samples, config.num_mel_bins, 2 * config.max_source_positions
    ),
    "input_values": lambda config, samples, length: (
        torch.randn(samples, config.max_length, config.num_mel_bins)  # a spectrogram
        if hasattr(config, "num_mel_bins")
        else torch.randn(samples, length)
    ),
}
"""What makes the input of a model, by the name of its main input."""

_LABELS: dict[str, Callable[[Any, int, int], dict[str, Tensor]]] = {
    **dict.fromkeys(
        ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration"),
        lambda c, n, s: {"labels": _INPUTS["input_ids"](c, n, s)},
    ),
    "ForTokenClassification": lambda c, n, s: {"labels": torch.randint(c.num_labels, (n, s))},
    "ForQuestionAnswering": lambda _c, n, s: {
        which: torch.randint(s, (n,)) for which in ("start_positions", "end_positions")
    },
    "ForSequenceClassification": _classes,
    "ForImageClassification": _classes,
    "ForAudioClassification": _classes,
    "ForCTC": lambda c, n, _s: {"labels": torch.randint(1, c.vocab_size, (n, 1))},
    "ViTMAEForPreTraining": lambda _c, _n, _s: {},  # whose loss is of its own input
    "ElectraForPreTraining": lambda _c, n, s: {"labels": torch.randint(2, (n, s))},
}
"""What makes the labels, by the end of the class' name."""


# Calls a user's factory with the arguments that were given.


def call_factory(factory: Factory, arguments: Mapping[str, Any]) -> Any:
    """What the factory returns. Raises InputError where it does not take these arguments, and where it fails."""
    if not factory.is_called:
        if arguments:
            kind = type(factory.target).__name__
            raise InputError(
                f"--module {factory.spelled} is {kind} already, which takes no --arg {next(iter(arguments))}"
            )
        return factory.target
    _check_arguments(factory, arguments)
    with printed_to_stderr(), user_errors(f"--module {factory.spelled} fails"):
        return factory.target(**arguments)


def _check_arguments(factory: Factory, arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(factory.target)
    except (TypeError, ValueError):  # A class or a function written in C may not say.
        return
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = {name: p for name, p in signature.parameters.items() if p.kind in named}
    shown = [name if p.default is p.empty else f"{name}={p.default!r}"[:60] for name, p in takes.items()]
    takes_words = f"its parameters are {', '.join(shown)}" if takes else "it takes no arguments"
    anything = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in arguments:
        if name not in takes and not anything:
            raise InputError(f"--module {factory.spelled} has no parameter {name!r}: {takes_words}")
    missing = [name for name, p in takes.items() if p.default is p.empty and name not in arguments]
    if missing:
        options = " ".join(f"--arg {name}=VALUE" for name in missing)
        raise InputError(f"--module {factory.spelled} needs {', '.join(missing)}: give {options}; {takes_words}")
    unnamed = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if unnamed:
        raise InputError(f"--module {factory.spelled} takes {unnamed[0]} by its place only: give it a name")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a factory returned, and the file that defines the factory."""

    name: str
    """What names it in messages: `--module mine:make`."""
    user_module: UserModule | None
    """The module; None where the factory returned a step of its own."""
    step: Any = None
    """The step that the factory returned, if it did."""
    file: Path | None = None
    """The file that defines it."""


def load_factory(
    spelled: str, arguments: Mapping[str, Any] | None = None, *, seed: int = 0, device: torch.device | None = None
) -> Loaded:
    """Load what a factory returns, or a Hugging Face model by its configuration (`.json`).

    device: where a configuration's parameters are made; a factory decides for itself, and None is the CPU.
    """
    torch.manual_seed(seed)
    if is_configuration(spelled):
        user_module = make_from_config(spelled, arguments or {}, device)
        return Loaded(name=user_module.name, user_module=user_module, file=Path(spelled))
    factory = find_factory(spelled)
    returned = call_factory(factory, arguments or {})
    return dataclasses.replace(take_object(returned, f"--module {spelled}"), file=factory.file)


def load_module(spelled: str, arguments: Mapping[str, Any] | None = None, *, seed: int = 0) -> UserModule:
    """A user's module with its batches. Raises InputError where the factory returns a step instead."""
    loaded = load_factory(spelled, arguments, seed=seed)
    if loaded.user_module is None:
        raise InputError(f"{loaded.name} gave a step of its own: give its module and a batch")
    return loaded.user_module


LARGE = 4 * MIB
"""Bytes from which a tensor is not filled with random numbers."""

_aten = torch.ops.aten
_FILLS = (_aten.normal_, _aten.uniform_, _aten.erfinv_)


class UnfilledParameters(TorchDispatchMode):
    """A mode in which large tensors are not filled with random numbers, so that their pages are never touched."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _FILLS and args[0].nbytes >= LARGE:
            return args[0]
        return func(*args, **(kwargs or {}))


def default_of(factory: str, size: Literal["batch_size", "seq_len"]) -> int | None:
    """The value of a factory's argument of this name where none is given, 1 if it has no default; None for a factory
    without such an argument. A configuration has both."""
    if is_configuration(factory):
        return {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN}[size]
    try:
        argument = inspect.signature(find_factory(factory).target).parameters.get(size)
    except (TypeError, ValueError):
        return None
    if argument is None:
        return None
    return argument.default if isinstance(argument.default, int) else 1


def take_object(value: Any, name: str) -> Loaded:
    """Take an object that exists already, in any form that a factory may return. Raises InputError for any other."""
    if isinstance(value, torch.nn.Module) or not hasattr(value, "phases"):
        return Loaded(name=name, user_module=understand(value, name))
    return Loaded(name=name, user_module=None, step=value)


def copy_of(loaded: Loaded) -> Loaded:
    """A copy of the module with its batches, so that the steps do not train the original. A user's own step is not
    copied."""
    user_module = loaded.user_module
    if user_module is None:
        return loaded
    with user_errors(
        f"{loaded.name} cannot be copied, and measuring would train it: give a factory, module='FILE:FACTORY'"
    ):
        module, optimizer, loss = copy.deepcopy((user_module.module, user_module.optimizer, user_module.loss))
    return dataclasses.replace(
        loaded, user_module=dataclasses.replace(user_module, module=module, optimizer=optimizer, loss=loss)
    )


def code_of(loaded: Loaded) -> str:
    """A digest of a module that came from no factory's file: of its structure, its source and its batch."""
    user_module = loaded.user_module
    if user_module is None:
        return ""
    described = describe_module(
        user_module.module, named_tensors(user_module.batches[0], input_names(user_module.module)), []
    )
    return hashlib.sha256(msgspec.json.encode(described, order="sorted")).hexdigest()[:16]


def make_user_step(
    workload: Workload,
    device: torch.device,
    load: Callable[[], Loaded] | None = None,
    share: Share | None = None,
) -> tuple[ModuleStep | UserStep, Workload]:
    """The step on its device, and the workload with the model as it was found and the factory's own choices.

    load: an object that exists already, in place of what the workload's factory would return. share: spreads the step
    over several processes. Raises InputError for a step of the user's own that others should share.
    """
    loaded = load() if load else load_factory(workload.factory, workload.arguments, seed=workload.seed, device=device)
    if loaded.user_module is None and share is None:
        return _driven(loaded, workload, device)
    user_module = _shared_module(loaded)
    whole: list[Batch] = []  # of all ranks together, of which the step has a part

    def share_and_note(parts: StepParts, choices: Workload) -> Shared:
        assert share is not None
        whole.append(parts.batches[0])
        return share(parts, choices)

    step = ModuleStep(user_module, workload, device, share_and_note if share is not None else None)
    optimizer, by_factory = workload.optimizer, ()
    if user_module.optimizer is not None and step.optimizer is not None:
        optimizer, by_factory = type(step.optimizer).__name__, ("optimizer",)
    batch = whole[0] if whole else step.batches[0]
    model = describe_module(step.model, step.named_tensors(batch), [loaded.file])
    return step, msgspec.structs.replace(workload, model=model, optimizer=optimizer, by_factory=by_factory)


def user_parts(workload: Workload, device: torch.device, load: Callable[[], Loaded] | None = None) -> StepParts:
    """What the step of a user's module is assembled of, made anew. Raises InputError for a step of the user's own."""
    loaded = load() if load else load_factory(workload.factory, workload.arguments, seed=workload.seed, device=device)
    user_module = _shared_module(loaded)
    check_trained(user_module, workload)
    return parts_of(placed(user_module, workload, device), workload)


def _shared_module(loaded: Loaded) -> UserModule:
    if loaded.user_module is None:
        raise InputError(f"{loaded.name} gave a step of its own, which ranks cannot share: give a module, a batch")
    return loaded.user_module


def _driven(loaded: Loaded, workload: Workload, device: torch.device) -> tuple[UserStep, Workload]:
    usual = FactoryWorkload(model=UserModel(name=""), factory=workload.factory)
    for field in ("dtype", "phase", "compile", "clip", "checkpointing", "accumulation", "norm", "mlp"):
        if getattr(workload, field) != getattr(usual, field):
            raise InputError(
                f"{loaded.name} gave a step of its own, on which {field} {getattr(workload, field)} has no effect: "
                "leave it out, or give a module and a batch"
            )
    step = UserStep(loaded.step, loaded.name, device)
    tensors = step.named_tensors(step.batches[0]) if step.batches else []
    model: UserModel = describe_module(step.model, tensors, [loaded.file])
    if not step.model.state_dict() and type(step.model) is torch.nn.Module:
        model = msgspec.structs.replace(model, name=type(loaded.step).__name__)
    optimizer = type(step.optimizer).__name__ if step.optimizer is not None else None
    return step, msgspec.structs.replace(workload, model=model, optimizer=optimizer, by_factory=("optimizer", "phases"))
