"""Describes what a run measured where the model is the user's: a factory's module, or a loop that was watched.

A Run's `workload` is one of three kinds. `textbook` is a Workload (`core/workload.py`), whose sizes are known before
anything runs. `own` is what a user's factory makes, and `watched` is what a user's loop did. Of both, only what was
found is known.
"""

import hashlib
import re
from typing import Any, Literal

import msgspec

from stepscope.core.errors import choose
from stepscope.core.model_config import LARGEST, whole_number
from stepscope.core.parts import REFERENCE, Kernels, Part, kernels_of
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.workload import OPTIMIZERS, StepChoices, Workload, part_words


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of the batch."""

    shape: tuple[int, ...]
    dtype: str
    """The dtype as PyTorch names it, without `torch.`: `int64`, `float32`."""

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class OwnModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A module that is not ours, as it was found."""

    name: str
    """The name of its class."""
    parameters: int | None = None
    """The number of its parameters; None until it is made."""
    inputs: dict[str, Input] = {}
    """The tensors of its batch, by their names or their places."""
    structure: str = ""
    """A digest of its submodules, parameters and buffers: names, classes, shapes and dtypes."""
    source: str = ""
    """A digest of the code that makes it. Changed code is another experiment."""

    @property
    def batch_size(self) -> int | None:
        """The first size of the first tensor of the batch; None where there is none."""
        return next((tensor.shape[0] for tensor in self.inputs.values() if tensor.shape), None)

    @property
    def seq_len(self) -> int | None:
        """The second size of the token ids, the first integers (B, S) in the batch; None where there are none."""
        return next(
            (t.shape[1] for t in self.inputs.values() if len(t.shape) == 2 and t.dtype in ("int64", "int32")), None
        )

    @property
    def tokens(self) -> int | None:
        """Tokens of the batch; None where it holds no token ids."""
        return self.batch_size * self.seq_len if self.batch_size and self.seq_len else None


_LATER: dict[str, object] = {
    "parallel": NOT_PARALLEL, "ranks": 1, "graph": "none", "clip": None, "norm": REFERENCE, "mlp": REFERENCE,
    "loss": REFERENCE,
}  # fmt: skip
"""Fields that came after the first results were stored, with their defaults: they count where they differ."""


def _without_defaults(fields: dict[str, object]) -> dict[str, object]:
    """The fields of a workload as a digest takes them: without what came later and says nothing."""
    return {name: value for name, value in fields.items() if name not in _LATER or value != _LATER[name]}


class _OwnStep(StepChoices, frozen=True, kw_only=True):
    """What a step of a module that is not ours has in common with the textbook's."""

    model: OwnModel

    @property
    def batch_size(self) -> int | None:
        """Samples in a step, whatever the accumulation."""
        return self.model.batch_size

    @property
    def seq_len(self) -> int | None:
        return self.model.seq_len

    @property
    def tokens(self) -> int | None:
        """Tokens in one step; None where its batch holds no token ids."""
        return self.model.tokens

    @property
    def identity(self) -> dict[str, object]:
        """What digests of an experiment are made of."""
        return _without_defaults(msgspec.to_builtins(self))

    @property
    def key(self) -> str:
        """A name of the cell, safe in file names, that ends in a digest of what tells it from others."""
        digest = hashlib.sha256(msgspec.json.encode(self.identity, order="sorted")).hexdigest()[:8]
        return "-".join([re.sub(r"[^\w.+-]+", "_", word)[:60] for word in self._key_words()] + [digest])

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.name

    def _key_words(self) -> list[str]:
        return self.words()

    def words(self, *without: str) -> list[str]:
        """The words of the key, without these fields."""
        said = {
            "model": self.name,
            "batch_size": f"b{self.batch_size}" if self.batch_size else "",
            "seq_len": f"s{self.seq_len}" if self.seq_len else "",
            "dtype": self.dtype,
            "phase": self.phase,
            **self.choice_words,
            **self._own_words(),
        }
        return [word for field, word in said.items() if word and field not in without]

    def _own_words(self) -> dict[str, str]:
        return {}


class OwnWorkload(_OwnStep, frozen=True, kw_only=True, tag_field="kind", tag="own"):
    """A step of the module that a user's factory makes."""

    factory: str
    """The factory as the user named it: `package.module:factory`, `train.py:factory`, or a model's config.json."""
    arguments: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """The arguments that the factory is called with."""
    code: str = ""
    """A digest of the factory's own file, which is known before it is called."""
    norm: Kernels = REFERENCE
    mlp: Kernels = REFERENCE
    loss: Kernels = REFERENCE
    """How these parts are computed: the model's own code, or the kernels of core/parts.py, where a module computes the
    same (training/parts/replaced.py)."""
    seed: int = 0
    by_factory: tuple[str, ...] = ()
    """The choices that the factory made, in place of options: `optimizer`, `phases`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.seed, "seed", 0, LARGEST)
        if "optimizer" not in self.by_factory and self.phase == "train":
            choose(str(self.optimizer), OPTIMIZERS, "optimizer")
        for part, name in self.parts.items():
            choose(name, kernels_of(part), part)
        self.without_what_has_no_effect()

    @property
    def identity(self) -> dict[str, object]:
        """What digests of an experiment are made of: all that can be known before the factory is called."""
        return _without_defaults(msgspec.to_builtins(self.asked))

    @property
    def parts(self) -> dict[Part, Kernels]:
        """How each part that is a module is computed."""
        return {"norm": self.norm, "mlp": self.mlp, "loss": self.loss}

    @property
    def asked(self) -> "OwnWorkload":
        """The workload as it can be known before the factory is called."""
        optimizer = "adamw-foreach" if "optimizer" in self.by_factory else self.optimizer
        return msgspec.structs.replace(self, model=OwnModel(name=""), optimizer=optimizer, by_factory=())

    def _key_words(self) -> list[str]:
        # A run's directory is named before the factory is called.
        return self.asked.words()

    @property
    def name(self) -> str:
        """The model's name; until it is made, its factory's."""
        return self.model.name or re.split(r"[:/]", self.factory.removesuffix(".json"))[-1]

    def _own_words(self) -> dict[str, str]:
        said = {"batch_size": self.batch_size, "seq_len": self.seq_len}  # The key has these as b4 and s128 already.
        values = [f"{n}{value}" for n, value in self.arguments.items() if n not in said or said[n] != value]
        return {"arguments": "-".join(values), **part_words(self.parts)}


class WatchedWorkload(_OwnStep, frozen=True, kw_only=True, tag_field="kind", tag="watched"):
    """A step of a loop that is not ours, as it was seen."""

    program: str
    """The script and its arguments, without its folder; empty for a loop watched from inside."""
    rank: int | None = None
    """The number of this process among those that train together; None if it is alone."""
    world_size: int = 1

    def _own_words(self) -> dict[str, str]:
        return {"rank": f"rank{self.rank}" if self.rank is not None else ""}


DrivenWorkload = Workload | OwnWorkload
"""What stepscope can run itself."""

AnyWorkload = Workload | OwnWorkload | WatchedWorkload
"""What a Run measured, told apart by its `kind`."""

Kind = Literal["textbook", "own", "watched"]


def with_kind(workload: bytes) -> bytes:
    """The JSON of a workload with its kind. Workloads that were stored before there were several kinds do not have
    it."""
    if msgspec.json.decode(workload, type=_Kinded).kind is not msgspec.UNSET:
        return workload
    fields = workload.strip()[1:]
    return b'{"kind":"textbook"' + (b"" if fields.strip() == b"}" else b",") + fields


class _Kinded(msgspec.Struct):
    kind: str | msgspec.UnsetType = msgspec.UNSET
