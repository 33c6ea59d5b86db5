"""The sizes of a decoder-only transformer, and the presets by name."""

import difflib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack, get_args, get_type_hints

import msgspec

from stepscope.core.errors import InputError, choose
from stepscope.core.files import identity_of
from stepscope.core.options import MODEL, Option

_FIRST_FIELDS = ("name", "d_model", "d_ff", "layers", "heads", "vocabulary")
"""The fields that every digest has, see core/files.py. Do not add to it."""
LARGEST = 2**40
"""The most tokens in a step, and the largest seed, that are accepted; more is a typing error."""


def whole_number(value: object, what: str, least: int, most: int) -> None:
    """Raise InputError unless `value` is an int between the bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InputError(f"{what} is {value!r}: it must be a whole number of at least {least}, at most {most}")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of a decoder-only transformer: pre-norm blocks, RoPE, SwiGLU, no biases.

    A preset's name stays only while its sizes do: `configure` renames
    an overridden one, `small` with d_ff 4096 to `small+d_ff4096`.
    """

    name: str
    d_model: int
    d_ff: int
    layers: int
    heads: int
    vocabulary: int = 10_000
    kv_heads: int | None = None
    """Heads of keys and values, each shared by as many heads of queries (grouped-query attention, Ainslie et al. 2023);
    None: one for each."""
    tied: bool = False
    """Whether the output head is the embedding's weight (Press and Wolf 2017)."""
    window: int | None = None
    """How many keys a query sees in each layer: its own and those before it (sliding window, Beltagy et al. 2020);
    None: all of them."""
    softcap: float | None = None
    """The most that a score is, above or below zero: scores s are softcap tanh(s / softcap) (Gemma 2,
    arXiv:2408.00118); None: as they are."""
    sinks: bool = False
    """Whether each head has a trained score that takes weight and has no value (Xiao 2023, arXiv:2309.17453), in fp32,
    zero at first."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.+-]{1,100}", self.name):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"the model's name is {self.name!r}: use up to 100 letters, digits and . + - _")
        for field in _FIRST_FIELDS[1:]:
            whole_number(getattr(self, field), field, 1, 2**24)
        if self.d_model % self.heads:
            near = range(max(1, self.heads - 4096), min(self.d_model // 2, self.heads + 4096) + 1)
            divisors = [h for h in near if self.d_model % h == 0 and (self.d_model // h) % 2 == 0] or [1]
            nearest = sorted(sorted(divisors, key=lambda h: abs(h - self.heads))[:4])  # which leave an even head_dim
            raise InputError(
                f"heads {self.heads} do not divide d_model {self.d_model}: choose one of {', '.join(map(str, nearest))}"
            )
        if self.head_dim % 2:
            raise InputError(
                f"head_dim is {self.head_dim} (d_model {self.d_model} / heads {self.heads}): "
                "rotary embedding rotates pairs, so it must be even"
            )
        kv_heads = self.kv_heads
        if kv_heads is not None:
            whole_number(kv_heads, "kv_heads", 1, 2**24)
            if self.heads % kv_heads:
                raise InputError(
                    f"kv_heads {kv_heads} do not divide heads {self.heads}: "
                    f"choose one of {', '.join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)}"
                )
            if kv_heads == self.heads:
                msgspec.structs.force_setattr(self, "kv_heads", None)  # one experiment has one key
        if self.window is not None:
            whole_number(self.window, "window", 1, LARGEST)
        if self.softcap is not None:
            softcap = self.softcap
            if isinstance(softcap, bool) or not isinstance(softcap, (int, float)) or not 0 < softcap < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InputError(f"softcap is {softcap!r}: it must be a number above zero")
            msgspec.structs.force_setattr(self, "softcap", float(softcap))
        for field in ("tied", "sinks"):
            if not isinstance(getattr(self, field), bool):
                raise InputError(f"{field} is {getattr(self, field)!r}: it must be true or false")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def key_width(self) -> int:
        """Width of all heads of keys together; d_model unless they are shared."""
        return self.key_heads * self.head_dim

    @property
    def identity(self) -> dict[str, object]:
        """What digests are made of."""
        return identity_of(self, _FIRST_FIELDS)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by field name, without optional ones at their default."""
        sizes = {option.name: getattr(self, option.name) for option in MODEL_OPTIONS if option.takes is int}
        return {field: size for field, size in sizes.items() if size is not None}


class ModelOptions(TypedDict, total=False):
    """What a caller or a command line may say of the textbook's model in place of the preset's own, with the help of
    each; None leaves it to the preset."""

    d_model: Annotated[int | None, Option("Width of the model, in place of the preset's.", MODEL, takes=int)]
    d_ff: Annotated[
        int | None, Option("Width inside the feed-forward network, in place of the preset's.", MODEL, takes=int)
    ]
    layers: Annotated[int | None, Option("Blocks, in place of the preset's.", MODEL, takes=int)]
    heads: Annotated[int | None, Option("Heads of attention, in place of the preset's.", MODEL, takes=int)]
    kv_heads: Annotated[
        int | None, Option("Heads of keys and values, each shared by several heads of queries.", MODEL, takes=int)
    ]
    vocabulary: Annotated[int | None, Option("Tokens in the vocabulary, in place of the preset's.", MODEL, takes=int)]
    tied: Annotated[bool | None, Option("Let the output head be the embedding's weight.", MODEL, takes=bool)]
    window: Annotated[
        int | None, Option("Keys that a query sees, its own and those before it: a sliding window.", MODEL, takes=int)
    ]
    softcap: Annotated[float | None, Option("The most that tanh lets a score of attention be.", MODEL, takes=float)]
    sinks: Annotated[
        bool | None, Option("Give each head a trained score that takes weight and has no value.", MODEL, takes=bool)
    ]


_STATED = get_type_hints(ModelOptions, include_extras=True)
MODEL_OPTIONS: tuple[Option, ...] = tuple(
    msgspec.structs.replace(get_args(_STATED[field])[1], name=field)
    for field in ModelConfig.__struct_fields__
    if field != "name"
)
"""The options of ModelOptions, in the order of the model's fields."""


def _shapes(
    table: dict[str, tuple[int, int, int, int]], vocabulary: int = 10_000, kv_heads: int | None = None
) -> dict[str, ModelConfig]:
    """Configurations by their names, from d_model, d_ff, layers and heads of each."""
    return {
        name: ModelConfig(
            name=name, d_model=d_model, d_ff=d_ff, layers=layers, heads=heads, vocabulary=vocabulary, kv_heads=kv_heads
        )
        for name, (d_model, d_ff, layers, heads) in table.items()
    }


PRESETS: dict[str, ModelConfig] = {
    **_shapes(
        {
            "tiny": (128, 512, 4, 4),
            "small": (768, 3072, 12, 12),
            "medium": (1024, 4096, 24, 16),
            "large": (1280, 5120, 36, 20),
            "xl": (1600, 6400, 48, 25),
            "2.7B": (2560, 10240, 32, 32),
        }
    ),
    **_shapes({"8B": (4096, 11008, 34, 32)}, vocabulary=151_936),
    **_shapes({"10B": (4608, 12288, 50, 36)}),
}

PUBLIC_SHAPES: dict[str, ModelConfig] = _shapes(
    {
        "llama3-8B": (4096, 14336, 32, 32),
        "llama3-70B": (8192, 28672, 80, 64),
        "llama3-405B": (16384, 53248, 126, 128),
    },
    vocabulary=128_256,
    kv_heads=8,
)
"""Sizes that others published (Llama 3: Grattafiori et al. 2024, table 3), by name. They are no presets: lists of what
is measured here leave them out."""

_SMALL_ONES = {name: name for name in ("small", "medium", "large")}
EDITIONS: dict[str, dict[str, str]] = {
    "cs336-2025": {**_SMALL_ONES, "xl": "xl", "2.7B": "2.7B"},
    "cs336-2026": {**_SMALL_ONES, "xl": "2.7B", "8B": "8B", "10B": "10B"},
}
"""Editions of Stanford CS336's assignment 2: the models of each by its own name, with the preset that they are here
(table 1 of the handouts 1.0.5 and 26.1.1; 8B is of the latter's section 9)."""


def of_edition(name: str) -> str:
    """The preset that an edition's model is, as 2.7B for `cs336-2026-xl`; any other name as it is. Raises InputError
    for a model that the edition does not have."""
    for edition, models in EDITIONS.items():
        if name.startswith(f"{edition}-"):
            return models[choose(name.removeprefix(f"{edition}-"), tuple(models), f"model of {edition}")]
    return name


def editions_apart(name: str) -> str:
    """Which model a preset's name means here, where an edition has another of that name, in a sentence; else empty."""
    presets = {edition: PRESETS[models[name]] for edition, models in EDITIONS.items() if name in models}
    if name not in PRESETS or all(preset.name == name for preset in presets.values()):
        return ""
    ours, *others = sorted(presets, key=lambda edition: presets[edition].name != name)
    sizes = {edition: f"{p.d_model} x {p.d_ff}, {p.layers} layers" for edition, p in presets.items()}
    other = "; ".join(f"that of {one} has {sizes[one]}: name it {one}-{name}" for one in others)
    return f"{name} is that of {ours} ({ours}-{name}), with {sizes[ours]}; {other}"


_OF_THE_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""A name as models have it on Hugging Face's hub."""


def choose_model(name: str, known: Sequence[str]) -> str:
    """The model of this name. Raises an InputError that lists those there are, and says how to name one of Hugging
    Face's where it may be one."""
    if name in known:
        return name
    other, file = "", Path(name, "config.json")
    if name and file.is_file():
        other = f"; for the model in that folder name its file, {file}"
    elif _OF_THE_HUB.fullmatch(name) and not difflib.get_close_matches(name, known, 1):
        other = (
            f"; nothing is downloaded: for a model of Hugging Face, `hf download {name} config.json` prints the path "
            "of a file that run, sweep, fit and tune take as --model"
        )
    raise InputError(f"unknown model {name!r}: choose one of {', '.join(known)}{other}")


def configure(preset: str, **overrides: Unpack[ModelOptions]) -> ModelConfig:
    """The preset, also by an edition's name of it, with the given sizes replaced; raises InputError on an unknown name
    or impossible sizes."""
    known = {**PRESETS, **PUBLIC_SHAPES}
    base = known[choose_model(of_edition(preset), tuple(known))]
    changed: dict[str, Any] = {
        field: size for field, size in overrides.items() if size is not None and size != getattr(base, field)
    }
    if changed.get("kv_heads") == changed.get("heads", base.heads):
        changed.pop("kv_heads")  # nothing is shared
    if not changed:
        return base
    said = ("" if value is True else f"{value:g}" if isinstance(value, float) else value for value in changed.values())
    name = "+".join([base.name, *map("{}{}".format, changed, said)])
    return msgspec.structs.replace(base, name=name, **changed)
