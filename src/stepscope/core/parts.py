"""One record for each part of the textbook's transformer and each way to compute it. This file does not need torch.

The parts are `norm` (RMSNorm with the residual sum before it), `rope` (rotary embedding of queries and keys), `mlp`
(silu(gate) * up), and `loss` (output head and cross-entropy). `reference` is the textbook's own code, in
training/transformer.py and training/training_step.py. Attention has records of its own in core/attentions.py.
"""

import importlib.util
import os
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from stepscope.core.attentions import TensorDtype
from stepscope.core.errors import InputError, choose

Part = Literal["norm", "rope", "mlp", "loss"]
Kernels = str
"""The name of a way to compute parts: `reference`, `compiled`, `fused`, `liger`, `quack`."""

PART_WORDS: dict[Part, str] = {
    "norm": "RMSNorm, with the sum before it,",
    "rope": "the rotation of queries and keys",
    "mlp": "SwiGLU's product",
    "loss": "the cross-entropy, with the output head,",
}
"""What each part is, as words of a sentence."""

REFERENCE: Kernels = "reference"

NO_MODULES: dict[Part, str] = {
    "rope": "a function turns queries and keys inside attention's forward, which no module can replace",
}
"""Parts that are no modules in a model that is not ours, so that no other kernels can compute them there, and why."""

LOSS_CHUNK_BYTES = 64 << 20
"""The bytes of logits that the fused loss has in memory at a time, where that is LOSS_LEAST_ROWS or more."""
LOSS_LEAST_ROWS = 2048
"""The fewest rows of a chunk. Each chunk adds to the weight's gradient in fp32: 8 bytes a number, against 6 FLOPs for
each row. At 700 TFLOP/s and 4.3 TB/s that is as long as the products of 217 rows."""

_16_BITS: tuple[TensorDtype, ...] = ("bf16", "fp16")
_FUSED: tuple[TensorDtype, ...] = ("fp32", *_16_BITS)


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How one part is computed: where that runs, what it takes and keeps, and how a trace shows it."""

    function: str
    """The location of what computes it, as `module:name`; empty for the textbook's own code."""
    device_types: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[TensorDtype, ...] = ("fp64", *_FUSED)
    largest_width: int | None = None
    """The longest row that it takes: d_model of a norm, head_dim of rope, vocabulary of a loss; None where there is no
    limit."""
    multiples: tuple[int, int] = (1, 1)
    """What the length of a row divides by, in 32 bits and in 16."""
    package: str = ""
    """The package that it needs besides PyTorch."""
    installs: str = ""
    """What pip calls that package, where it is another's."""
    interpreted: bool = False
    """Whether it runs on a CPU in Triton's interpreter."""
    saves: str
    """What autograd keeps for its backward. R rows, M d_model, F d_ff, D head_dim, V vocabulary, S sequence."""
    predicted: bool = False
    """Whether the memory of an eager step with it is predicted. That of the reference is in every step."""
    repeats: bool = True
    """Whether the same input gives the same bits again, on one device."""
    overwrites: bool = False
    """Whether backward writes its gradients over the inputs: a second backward of one graph is wrong, and so is what
    anybody else reads there."""
    signs: str = ""
    """A pattern of the names of its operators and of its kernels; empty where they are PyTorch's own."""
    compiled: bool = False
    """Whether PyTorch's compiler makes its kernels, at the first call of a shape. They have no names of their own."""
    operators: bool = False
    """Whether it is operators that a step's count sees. What launches its kernels by itself shows in a trace alone."""

    def fault(self, device_type: str, dtype: TensorDtype, width: int | None = None) -> str | None:
        """Why it does not run this on this machine, in words that follow its name; None where it does."""
        if device_type not in self.device_types:
            return f"runs on {' and '.join(self.device_types)}, not on {device_type}"
        if dtype not in self.dtypes:
            return f"takes {', '.join(self.dtypes)}, not {dtype}"
        if width is not None and (unfit := self._unfit(width, dtype)):
            return unfit
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"needs {self.package}, which is not installed: pip install {self.installs or self.package}"
        if device_type != "cuda" and self.interpreted and os.environ.get(INTERPRETER) != "1":
            return f"runs on {device_type} in Triton's interpreter only, with {INTERPRETER}=1 in the environment"
        return None

    def _unfit(self, width: int, dtype: TensorDtype) -> str:
        if self.largest_width is not None and width > self.largest_width:
            return f"takes rows of up to {self.largest_width} numbers, not {width}"
        multiple = self.multiples[dtype in _16_BITS]
        return f"takes rows of a multiple of {multiple} numbers in {dtype}, not {width}" if width % multiple else ""


class PartFound(msgspec.Struct, frozen=True, kw_only=True):
    """Modules of one type in a user's model that compute a part, and whether they were replaced."""

    part: Part
    kernels: Kernels
    """What was to compute them."""
    type: str
    """The name of their class; empty where the model has none."""
    modules: int
    replaced: bool
    why: str = ""
    """Why they were left; empty where they were replaced."""
    where: str = ""
    """The path of the first."""

    def __str__(self) -> str:
        name = f"{self.part} {self.kernels}"
        if self.replaced:
            return f"{name}: {self.modules} {self.type} replaced"
        return f"{name}: {f'{self.modules} {self.type} left' if self.modules else 'none'}, {self.why}"


INTERPRETER = "TRITON_INTERPRET"
"""The environment variable that makes Triton run its kernels in Python, on tensors of the CPU."""


def _fused(function: str, saves: str, signs: str, largest_width: int | None = None) -> PartRecord:
    return PartRecord(
        function=f"stepscope.kernels.parts.{function}", dtypes=_FUSED, package="triton", interpreted=True,
        saves=saves, predicted=True, signs=rf"^(?:stepscope::)?(?:{signs})", operators=True,
        largest_width=largest_width,
    )  # fmt: skip


def _compiled(function: str, saves: str) -> PartRecord:
    return PartRecord(function=f"stepscope.training.parts.compiled:{function}", saves=saves, compiled=True)


def _liger(function: str, saves: str, signs: str, *, overwrites: bool = False) -> PartRecord:
    return PartRecord(
        function=f"stepscope.training.parts.liger:{function}", device_types=("cuda",), dtypes=_FUSED,
        package="liger_kernel", installs="liger-kernel", saves=saves, signs=signs, overwrites=overwrites,
    )  # fmt: skip


def _quack(
    function: str, saves: str, signs: str, *, multiples: tuple[int, int] = (1, 2), largest_width: int | None = None,
    dtypes: tuple[TensorDtype, ...] = _FUSED,
) -> PartRecord:  # fmt: skip
    return PartRecord(
        function=f"stepscope.training.parts.quack:{function}", device_types=("cuda",), dtypes=dtypes,
        package="quack", installs="quack-kernels", saves=saves, signs=signs, multiples=multiples,
        largest_width=largest_width,
    )  # fmt: skip


PARTS: dict[Part, dict[Kernels, PartRecord]] = {
    "norm": {
        "reference": PartRecord(function="", saves="x and x / rms in fp32, 2 R M; rms, R"),
        "compiled": _compiled("rms_norm", "what the compiler keeps: the sum, R M, and 1 / rms, R"),
        "fused": _fused(
            "norm:rms_norm", "the sum x + branch, R M, which the residual stream keeps anyway; 1 / rms in fp32, R",
            "rms_norm_(?:forward|backward|shares)$", largest_width=32768,
        ),
        "liger": _liger("rms_norm", "the sum, R M; 1 / rms, R", r"^_(?:block_)?rms_norm_(?:forward|backward)_kernel"),
        "quack": _quack("rms_norm", "the sum, R M; 1 / rms in fp32, R", "quack(?:::_?)?rmsnorm"),
    },
    "rope": {
        "reference": PartRecord(function="", saves="cos and sin, cast: 4 S D for each layer, in 16 bits"),
        "compiled": _compiled("rotated", "what the compiler keeps: cos and sin, S D each"),
        "fused": _fused("rope:rotated", "nothing: cos and sin are the model's", "rotate_halves$", largest_width=1024),
        "liger": _liger("rotated", "nothing: cos and sin are the model's", r"^_triton_rope"),
        "quack": _quack(
            "rotated", "nothing: cos and sin are the model's", "quack(?:::_)?rotary", multiples=(8, 8),
            largest_width=512,
        ),
    },
    "mlp": {
        "reference": PartRecord(function="", saves="gate, up, silu(gate): 3 R F"),
        "compiled": _compiled("silu_product", "what the compiler keeps: gate and up, 2 R F"),
        "fused": _fused("mlp:silu_product", "gate and up: 2 R F", "silu_product_(?:forward|backward)$"),
        "liger": _liger("silu_product", "gate and up: 2 R F", r"^_swiglu_(?:forward|backward)_kernel", overwrites=True),
    },
    "loss": {
        "reference": PartRecord(function="", saves="the hidden state, R M, and log-probabilities in fp32, R V"),
        "compiled": _compiled("linear_cross_entropy", "what the compiler keeps: hidden state and logits, R M and R V"),
        "fused": _fused(
            "loss:linear_cross_entropy", "its own gradients: of the hidden state, R M, and of the head in fp32, V M",
            "linear_cross_entropy_(?:forward|backward)$|cross_entropy_rows$|scaled_by$",
        ),
        "liger": _liger(
            "linear_cross_entropy", "its own gradients: of the hidden state, R M, and of the head, V M",
            r"^liger_cross_entropy_kernel",
        ),
        "quack": _quack(
            "linear_cross_entropy", "its own gradients: of the hidden state, R M, and of the head in fp32, V M",
            "quack(?:::_?)?(?:linear_)?(?:cross_entropy|lce)|^_lce_glue", dtypes=_16_BITS,
        ),
    },
}  # fmt: skip
"""Of each part, its implementations by name."""


def kernels_of(part: Part) -> tuple[Kernels, ...]:
    """The names that a workload may give for a part."""
    return tuple(PARTS[part])


MODULE_PARTS: tuple[Part, ...] = tuple(part for part in PARTS if part not in NO_MODULES)
"""Parts that other kernels may compute in a model that is not ours."""

KERNELS: tuple[Kernels, ...] = tuple(dict.fromkeys(name for ways in PARTS.values() for name in ways))
"""The names that `--kernels` takes. Each is an implementation of every part, but `quack`, which has no `mlp`."""


def named_kernels(kernels: object) -> dict[Part, Kernels]:
    """The name of each part that `kernels` says: one name for all parts that have it, or a name by part. Raises
    InputError."""
    if isinstance(kernels, Mapping):
        said = {str(part): str(name) for part, name in kernels.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        strangers = [part for part in said if part not in PARTS]
        if strangers:
            raise InputError(f"kernels has the part {strangers[0]!r}: choose among {', '.join(PARTS)}")
        return {part: choose(said[part], kernels_of(part), part) for part in PARTS if part in said}
    name = choose(str(kernels), KERNELS, "kernels")
    return {part: name for part, ways in PARTS.items() if name in ways}


def own_kernels(kernels: object) -> dict[Part, Kernels]:
    """What `kernels` says of a model that is not ours: of the parts that are modules. Raises InputError where it names
    another by itself."""
    found = named_kernels(kernels)
    if isinstance(kernels, Mapping):
        check_modules(found)
    return {part: name for part, name in found.items() if part in MODULE_PARTS}


def check_modules(parts: Iterable[str]) -> None:
    """Raise InputError for a part that is no module in a model that is not ours."""
    for part, why in NO_MODULES.items():
        if part in parts:
            raise InputError(
                f"{part} is computed by other kernels in the textbook's model alone: in your own {why}; leave it out"
            )


def compiles(chosen: Mapping[Part, Kernels]) -> bool:
    """Whether PyTorch's compiler makes the kernels of a part."""
    return any(PARTS[part][name].compiled for part, name in chosen.items())


def calls_in_forward(part: Part, layers: int) -> int:
    """How often one forward of the textbook's model calls a part."""
    return {"norm": 2 * layers + 1, "rope": layers, "mlp": layers, "loss": 1}[part]


def norm_programs(rows: int, device_type: str) -> int:
    """How many programs share the rows of a norm's backward: some for each multiprocessor of a large GPU, and the same
    number on any, so that the same input gives the same bits there too."""
    return max(1, min(rows, 512 if device_type == "cuda" else 4))


def loss_chunk_rows(rows: int, vocabulary: int, itemsize: int) -> int:
    """How many rows of logits the fused loss makes at a time."""
    fitting = LOSS_CHUNK_BYTES // max(1, vocabulary * itemsize)
    return max(1, min(rows, max(fitting // 128 * 128, LOSS_LEAST_ROWS)))


def check_parts(
    chosen: Mapping[Part, Kernels], device_type: str, dtype: TensorDtype, widths: Mapping[Part, int]
) -> None:
    """Raise an InputError, one line, for a part that does not run here."""
    for part, name in chosen.items():
        fault = PARTS[part][name].fault(device_type, dtype, widths.get(part))
        if fault is not None:
            raise InputError(f"{part} {name} {fault}: choose --{part} {REFERENCE}")


def unpredicted_part(chosen: Mapping[Part, Kernels], *, eager: bool) -> Part | None:
    """The first part with which the memory of a step is not predicted; None where it is."""
    return next(
        (part for part, name in chosen.items() if name != REFERENCE and not (eager and PARTS[part][name].predicted)),
        None,
    )
