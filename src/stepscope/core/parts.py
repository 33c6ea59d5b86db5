"""One record for each attention, and for each way to compute another part of the textbook's transformer.

The other parts are `norm` (RMSNorm with the residual sum before it), `rope` (rotary embedding of queries and keys),
`mlp` (silu(gate) * up), and `loss` (output head and cross-entropy). `reference` is the textbook's own code, in
training/transformer.py and training/training_step.py. This file does not need torch.

To add an attention, write its function in a file of training/attention/, its record in `ATTENTIONS`, and a test case.
"""

import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from stepscope.core.errors import InputError, choose
from stepscope.core.files import code_file, digest_with_imports

Attention = str
"""The name of an attention: one of `ATTENTIONS`, a function of a user's (`user_function`), or `auto`, which stands for
the first of `PREFERRED` that runs."""

AUTO: Attention = "auto"

TensorDtype = Literal["fp64", "fp32", "bf16", "fp16"]
"""The dtype of queries, keys and values."""

Compiler = Literal["triton", "inductor"]

Scores = Literal["whole", "pieces", "fused"]
"""How the scores are made. whole: by one matrix product. pieces: by products whose number depends on the sequence
length. fused: inside a kernel that never stores them."""

Memory = Literal["scores", "nothing", "tiled", "math", "efficient", "flash", "cudnn", "chosen", "fused", "hopper"]
"""The formulas for what autograd saves and what a step needs.

scores: the exponentials and their quotient. nothing: everything is recomputed. tiled: the output and the logsumexp,
with keys and values repeated for each head. math, efficient, flash, cudnn: as PyTorch's backend of that name. chosen:
as the backend that PyTorch chooses. fused: the output and the logsumexp. hopper: as fused, and the buffers of the
kernels for Hopper."""

_ALL: tuple[TensorDtype, ...] = ("fp64", "fp32", "bf16", "fp16")
_FUSED: tuple[TensorDtype, ...] = ("fp32", "bf16", "fp16")
_HALF: tuple[TensorDtype, ...] = ("bf16", "fp16")

LARGEST_EXPONENT: dict[TensorDtype, int] = {"fp64": 709, "fp32": 88, "bf16": 88, "fp16": 11}
"""The largest integer whose exp is finite, by dtype."""


class AttentionCall(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a call that decide which implementations can run it. Unknown lengths and heads are None."""

    device_type: str
    dtype: TensorDtype
    head_dim: int
    queries: int | None = None
    keys: int | None = None
    heads: int | None = None
    key_heads: int | None = None
    window: int | None = None
    documents: bool = False
    """Whether the rows hold several documents, and a query sees only keys of its own."""
    scoring: bool = False
    """Whether a softcap, sinks, ALiBi's slopes, a bias or dropout change the scores (`kernels/flash/tiles.py`)."""
    largest_score: float | None = None
    """The largest absolute score of a query and a key that it sees; None if the numbers are unknown."""
    backward: bool = True
    """Whether gradients are needed."""


class AttentionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of an attention: where it runs, what it keeps, how large its error may be, and how a trace shows it.

    Every attention takes the following, so no field says it: causal or not; any numbers of queries and keys from
    `shortest` on, also unequal ones; fewer heads of keys and values than of queries, if their number divides the
    queries'; non-contiguous tensors; any scale, also zero or negative.
    """

    function: str
    """The implementation's location, as `module:name`. The first call imports it."""

    # ---- where it runs

    device_types: tuple[str, ...] = ("cpu", "cuda")
    trains_on: tuple[str, ...] = ("cpu", "cuda")
    """The device types on which it has a backward pass."""
    capability: tuple[int, int] = (0, 0)
    """The compute capability that a GPU needs."""
    cuda_dtypes: tuple[TensorDtype, ...] = _ALL
    cpu_dtypes: tuple[TensorDtype, ...] = _ALL
    min_head_dim: int = 1
    max_head_dim: int | None = None
    """The largest head_dim on a GPU and in Triton's interpreter. Elsewhere there is no limit."""
    head_dim_multiple: int = 1
    shortest: int = 1
    """The smallest number of queries, and of keys, that it takes."""
    window: bool = True
    """Whether it takes a sliding window."""
    documents: bool = False
    """Whether it takes documents, as their bounds (kernels/documents.py): a keyword argument `bounds`."""
    scoring: bool = False
    """Whether it takes a softcap, sinks, slopes, a bias, dropout and seeds: keyword arguments of these names."""
    subtracts_maximum: bool = True
    """Whether it subtracts the row's maximum, which allows scores of any size. If not, their exp must be finite."""
    compiler: Compiler | None = None
    """The compiler of its kernels, which runs for each new shape. triton: it runs on a GPU, or anywhere in Triton's
    interpreter. inductor: it calls torch.compile itself."""
    kernel_by_length: bool = False
    """Whether long sequences run a different kernel."""
    proposed: bool = True
    """Whether it is proposed to a user. An attention that is only for the lab is not."""

    # ---- what it makes and keeps

    scores: Scores = "fused"
    repeats_keys: bool = False
    """Whether a fused attention copies shared keys and values for each head of queries."""
    memory: Memory | None = None
    """The formula for what it saves and needs; None where there is none."""
    predicted: Literal["always", "eager", "never"] = "never"
    """Which steps with it have a predicted memory: all, only eager ones, or none."""

    kept_operators: tuple[str, ...] = ()
    """Fused operators whose outputs checkpointing by operator keeps (core/checkpointing.py, `KEEPING`), as
    `namespace::name`. They do not run again."""

    in_fp32: bool = False
    """Whether even 16-bit tensors are multiplied in fp32."""

    # ---- how large its error may be

    rounds_scores: bool = False
    """Whether it rounds scores and weights to the tensors' dtype. In 16 bits its error may be twice the others'."""
    rounds_weights: str = ""
    """What is known of a fault: its backward rounds the weights to 16 bits before it makes the scores' gradient from
    them. Empty if it has no such fault."""

    # ---- how a trace shows it

    signs: str = ""
    """A pattern of names of host operators and of kernels. A replayed CUDA graph has only kernels. Empty if the
    attention is written out in operators that others use too."""
    signs_when_compiled: bool = False
    """Whether compiled code calls the same operators."""
    calls_softmax: bool = False
    """Whether an attention without signs calls PyTorch's softmax; others without signs call exp."""
    chooses_among: tuple[Attention, ...] = ()
    """The attentions that PyTorch may run in its place."""

    def fault(self, call: AttentionCall) -> str | None:
        """The reason why it cannot run this call, in words that follow its name; None if it can."""
        device, head_dim, largest = call.device_type, call.head_dim, self.max_head_dim
        limited = device != "cpu" or self.compiler == "triton"
        dtypes = self.cpu_dtypes if device == "cpu" else self.cuda_dtypes
        lengths = ((call.queries, "queries"), (call.keys, "keys"))
        faults = (
            (device not in self.device_types, f"does not run on {device}"),
            (call.backward and device not in self.trains_on, f"has no backward on {device}"),
            (call.dtype not in dtypes, f"does not run in {call.dtype} (it takes {', '.join(dtypes)})"),
            (limited and head_dim > (largest or head_dim), f"takes head_dim up to {largest}, not {head_dim}"),
            (limited and head_dim < self.min_head_dim, f"takes head_dim from {self.min_head_dim} on, not {head_dim}"),
            (
                limited and head_dim % self.head_dim_multiple != 0,
                f"takes head_dim in multiples of {self.head_dim_multiple}, not {head_dim}",
            ),
            *(
                (length is not None and length < self.shortest, f"takes {what} from {self.shortest} on, not {length}")
                for length, what in lengths
            ),
            (call.window is not None and not self.window, "takes no sliding window"),
            (call.documents and not self.documents, "takes no documents in one row"),
            (call.scoring and not self.scoring, "takes no softcap, sinks, slopes, bias or dropout"),
        )
        return next((why for is_one, why in faults if is_one), None) or self.fault_of_scores(call)

    def fault_of_scores(self, call: AttentionCall) -> str | None:
        """The reason why it does not take these numbers on any device, compiled or not; None if it does."""
        limit = LARGEST_EXPONENT[call.dtype]
        if self.subtracts_maximum or call.largest_score is None or call.largest_score <= limit:
            return None
        return f"subtracts no maximum: in {call.dtype} it takes scores up to {limit}"


INTERPRETER = "TRITON_INTERPRET"
"""The environment variable that makes Triton run its kernels in Python, on tensors of the CPU."""

Record = TypeVar("Record")


class Records(dict[str, Record]):
    """Records by name. Any function of a user's has the record `of_users`, and is not among the names."""

    def __init__(self, records: Mapping[str, Record], of_users: Record) -> None:
        super().__init__(records)
        self.of_users = of_users

    def __missing__(self, name: str) -> Record:
        if not is_users(name):
            raise KeyError(name)
        return self.of_users


def is_users(name: str) -> bool:
    """Whether this names a function of a user's: `path/file.py:name`, or `package.module:name`."""
    return ":" in name


CONVENTIONS: dict[str, str] = {
    "attention": "attention(q, k, v, causal), of q, k and v (batch, heads, length, head_dim), which are views and not "
    "contiguous, returns one like q; causal may be is_causal, and a function without it is causal",
    "norm": "norm(x, weight, eps), of x (..., width) and weight (width), returns RMSNorm in x's shape and dtype",
    "rope": "rope(q, k, cos, sin), of q and k (batch, heads, length, head_dim) and tables (length, head_dim), returns "
    "both turned by halves; or rope(x, cos, sin), of one of them",
    "mlp": "mlp(gate, up), of two (..., width), returns silu(gate) * up",
    "loss": "loss(logits, targets), of (tokens, vocabulary) and (tokens), returns the mean cross-entropy, where "
    "targets of -100 count for nothing; or loss(x, weight, targets), with the head's product inside",
}
"""How a user's function is called for each part, and what it returns."""

_USERS = re.compile(r"(?P<spelled>[^@]+:[^\W\d][\w.]*)(?:@(?P<digest>[0-9a-f]{8}))?")


def user_function(name: str) -> tuple[str, str]:
    """How a user spelled a function, and the digest of its file; the digest is empty where none is named."""
    parsed = _USERS.fullmatch(name)
    return (parsed["spelled"], parsed["digest"] or "") if parsed is not None else ("", "")


def choose_name(name: str, names: Iterable[str], what: str) -> str:
    """The one of `names` that this is; or a user's function, with a digest of its file: `mine.py:fn@3f2a91c0`. Raises
    InputError for any other."""
    names = tuple(names)
    if name in names:
        return name
    spelled, digest = user_function(name)
    if digest:
        return name
    remedy = f"{what} of your own is path/file.py:name or package.module:name"
    if name.endswith(".py"):
        raise InputError(f"{what} {name} names a file and no function in it: write {name}:NAME")
    if not is_users(name):
        raise InputError(f"unknown {what} {name!r}: choose one of {', '.join(names)}; {remedy}")
    file = code_file(spelled.rpartition(":")[0]) if spelled else None
    if file is None:
        raise InputError(f"{what} {name!r} names no function that can be found: {remedy}")
    if not file.is_file():
        raise InputError(f"{what} {name}: {file} {'is a directory' if file.is_dir() else 'is not there'}; {remedy}")
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault(INTERPRETER, "1")  # read when Triton is imported, which torch may do before the function
    return f"{spelled}@{digest_with_imports(file)[:8]}"


def name_word(name: str) -> str:
    """The name as a word of a key, safe in file names: of a user's function its own, and the digest."""
    return name.rpartition(":")[2].replace("@", "-") if is_users(name) else name


_WRITTEN_OUT = "stepscope.training.attention.written_out"
_PYTORCH = "stepscope.training.attention.pytorch"

ATTENTIONS: Records[AttentionRecord] = Records({
    # Written out: scores, mask, softmax with the maximum subtracted, weighted sum.
    "reference": AttentionRecord(
        function=f"{_WRITTEN_OUT}:reference", scores="whole", memory="scores", predicted="always", rounds_scores=True,
        documents=True, scoring=True,
    ),
    # PyTorch's scaled_dot_product_attention. PyTorch chooses the backend, and the run names it.
    "sdpa": AttentionRecord(
        function=f"{_PYTORCH}:sdpa", memory="chosen", predicted="always", documents=True,
        chooses_among=("sdpa-math", "sdpa-efficient", "sdpa-flash", "sdpa-cudnn"),
    ),
    # The next four run the backend of that name, or raise an error.
    "sdpa-math": AttentionRecord(
        function=f"{_PYTORCH}:sdpa_math", scores="whole", memory="math", predicted="always", in_fp32=True,
        documents=True,
        signs=r"^aten::_scaled_dot_product_attention_math",
    ),
    "sdpa-efficient": AttentionRecord(
        function=f"{_PYTORCH}:sdpa_efficient", memory="efficient", predicted="always", repeats_keys=True,
        documents=True,
        kept_operators=("aten::_scaled_dot_product_efficient_attention",),
        # It loads 16 bytes at a time (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
        device_types=("cuda",), cuda_dtypes=_FUSED, head_dim_multiple=8,
        rounds_weights="known of PyTorch's memory-efficient kernel, seen with PyTorch 2.11: its backward keeps the "
        "weights in 16 bits and makes dS = P (dP - D) of the rounded ones, one rounding more than FlashAttention "
        "(kernel_backward.h)",
        signs=r"_scaled_dot_product_efficient_attention|^fmha_cutlass[FB]_|PyTorchMemEffAttention",
        signs_when_compiled=True,
    ),
    "sdpa-flash": AttentionRecord(
        function=f"{_PYTORCH}:sdpa_flash", memory="flash", predicted="always",
        kept_operators=(
            "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
        ),
        cuda_dtypes=_HALF, max_head_dim=256, window=False,
        signs=r"_scaled_dot_product_flash_attention|pytorch_flash::flash_|FlashAttnFwdSm\d", signs_when_compiled=True,
    ),
    "sdpa-cudnn": AttentionRecord(
        function=f"{_PYTORCH}:sdpa_cudnn", memory="cudnn", predicted="always",
        kept_operators=("aten::_scaled_dot_product_cudnn_attention",),
        # Beyond 128, only cuDNN 9.22 or later has a backward, and only on some GPUs.
        device_types=("cuda",), cuda_dtypes=_HALF, max_head_dim=128, head_dim_multiple=8, shortest=2,
        documents=True,
        signs=r"_scaled_dot_product_cudnn_attention|^cudnn\w*_sdpa_", signs_when_compiled=True,
    ),
    # Written out, without the maximum that keeps exp from overflowing.
    "unsafe": AttentionRecord(
        function=f"{_WRITTEN_OUT}:unsafe", scores="whole", memory="scores", predicted="eager", rounds_scores=True,
        subtracts_maximum=False, proposed=False,
    ),
    # Written out for a chunk of queries at a time.
    "chunked": AttentionRecord(
        function=f"{_WRITTEN_OUT}:chunked", scores="pieces", memory="nothing", rounds_scores=True, calls_softmax=True,
    ),
    # PyTorch's FlexAttention, compiled.
    "flex": AttentionRecord(
        function="stepscope.training.attention.flex:flex", memory="fused", compiler="inductor",
        trains_on=("cuda",), cuda_dtypes=_FUSED, cpu_dtypes=_FUSED, min_head_dim=16, max_head_dim=256,
        documents=True,
        signs=r"flex_attention|FlexAttention",
    ),
    # FlashAttention-2 tile by tile in PyTorch.
    "flash-tiled": AttentionRecord(
        function="stepscope.kernels.flash.tiled:flash_tiled", scores="pieces", memory="tiled",
        signs=r"FlashAttentionTiled",
    ),
    # FlashAttention-2 in Triton. Ampere is the first to have bf16 and copies from memory during arithmetic.
    "flash": AttentionRecord(
        function="stepscope.kernels.flash.attention:flash_attention", memory="hopper", predicted="always",
        kept_operators=("stepscope::flash_attention_forward",), compiler="triton", kernel_by_length=True,
        capability=(8, 0), cuda_dtypes=_FUSED, cpu_dtypes=_FUSED, max_head_dim=256,
        documents=True, scoring=True,
        signs=r"^stepscope::flash_attention_forward|^flash_forward", signs_when_compiled=True,
    ),
}, of_users=AttentionRecord(function="", window=False, proposed=False, rounds_scores=True))  # fmt: skip

PREFERRED: dict[str, tuple[Attention, ...]] = {
    "cuda": ("flash", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "sdpa", "reference"),
}
PREFERRED_ELSEWHERE: tuple[Attention, ...] = ("sdpa", "reference")
"""Attentions that `auto` tries in this order without CUDA. `flash` is left out: Triton's interpreter is for testing."""


def scores_of(name: Attention) -> Scores:
    """How an attention makes its scores; `auto` picks a fused one."""
    return ATTENTIONS[name].scores if name != AUTO else "fused"


def is_kept(name: Attention) -> bool:
    """Whether an attention is an operator whose output checkpointing can keep; `auto` picks one that is."""
    if name == AUTO:
        return True
    record = ATTENTIONS[name]
    return bool(record.kept_operators) or any(map(is_kept, record.chooses_among))


def attention_names() -> tuple[Attention, ...]:
    """The names that a workload may ask for, with `auto` last."""
    return (*ATTENTIONS, AUTO)


Part = Literal["norm", "rope", "mlp", "loss"]
Kernels = str
"""The name of a way to compute parts: `reference`, `compiled`, `fused`, `liger`, `quack`, or a user's function."""

PART_WORDS: dict[Part, str] = {
    "norm": "RMSNorm, with the sum before it,",
    "rope": "the rotation of queries and keys",
    "mlp": "SwiGLU's product, or GELU of a linear layer,",
    "loss": "the cross-entropy, with the output head,",
}
"""What each part is, as words of a sentence."""

REFERENCE: Kernels = "reference"

LOSS_CHUNK_BYTES = 64 << 20
"""The bytes of logits that the fused loss has in memory at a time, where that is LOSS_LEAST_ROWS or more."""
FEW_LABELS_CHUNK_BYTES = 1 << 30
"""The bytes of logits in memory where few rows have labels: most are never touched, and one chunk needs no sum over
chunks."""
LOSS_LEAST_ROWS = 2048
"""The fewest rows of a chunk. Each chunk adds to the weight's gradient in fp32: 8 bytes a number, against 6 FLOPs for
each row. At 700 TFLOP/s and 4.3 TB/s that is as long as the products of 217 rows: a tenth of a chunk of 2,048, and a
fortieth of one of 8,192."""
LOSS_SUM_IN_CACHE_BYTES = 64 << 20
"""A gradient of a weight that is not larger stays in the cache of a large GPU, about, and adding to it is cheap."""
LOSS_WIDEST = 2048
"""The widest model that gets longer chunks. In wider ones the head is a small part of a step (7 % of the products of 8B
parameters, 21 % of 1.2B), and memory is shorter."""


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How one part is computed: where that runs, what it takes and keeps, and how a trace shows it."""

    function: str
    """The location of what computes it, as `module:name`; empty for the textbook's own code."""
    device_types: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[TensorDtype, ...] = _ALL
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
    few_labels: bool = False
    """Whether a loss takes a bias, and computes nothing of rows without a label: those of a masked language model."""
    gelu: bool = False
    """Whether an MLP's kernels compute GELU of a linear layer, too, in models of others."""
    layer_norm: bool = False
    """Whether a norm's kernels compute LayerNorm, too, in models of others."""
    own_gradients: bool = False
    """Whether nobody else holds the gradients that a loss gives, so that a tied embedding may add its own in place."""
    any_tables: bool = False
    """Whether rope takes tables of each sequence, and of a part of the width."""

    def fault(self, device_type: str, dtype: TensorDtype, width: int | None = None) -> str | None:
        """Why it does not run this on this machine, in words that follow its name; None where it does."""
        largest, multiple = self.largest_width, self.multiples[dtype in _HALF]
        needed = f"needs {self.package}, which is not installed: pip install {self.installs or self.package}"
        by_hand = f"runs on {device_type} in Triton's interpreter only, with {INTERPRETER}=1 in the environment"
        interprets = device_type != "cuda" and self.interpreted
        faults = (
            (device_type not in self.device_types, f"runs on {' and '.join(self.device_types)}, not on {device_type}"),
            (dtype not in self.dtypes, f"takes {', '.join(self.dtypes)}, not {dtype}"),
            (width is not None and width > (largest or width), f"takes rows of up to {largest} numbers, not {width}"),
            (
                width is not None and width % multiple != 0,
                f"takes rows of a multiple of {multiple} numbers in {dtype}, not {width}",
            ),
            (self.package != "" and importlib.util.find_spec(self.package) is None, needed),
            (interprets and os.environ.get(INTERPRETER) != "1", by_hand),
        )
        return next((why for is_one, why in faults if is_one), None)


class PartFound(msgspec.Struct, frozen=True, kw_only=True):
    """Modules of one type in a user's model that compute a part, and whether they were replaced."""

    part: Literal["norm", "rope", "mlp", "loss", "attention", "projections"]
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


def _fused(
    function: str, saves: str, signs: str, largest_width: int | None = None, *, of_models: bool = False
) -> PartRecord:
    return PartRecord(
        function=f"stepscope.kernels.parts.{function}", dtypes=_FUSED, package="triton", interpreted=True,
        saves=saves, predicted=True, signs=rf"^(?:stepscope::)?(?:{signs})", operators=True,
        largest_width=largest_width, few_labels=of_models, own_gradients=of_models, any_tables=of_models,
        gelu=of_models, layer_norm=of_models,
    )  # fmt: skip


def _compiled(function: str, saves: str) -> PartRecord:
    return PartRecord(function=f"stepscope.training.parts.formulas:compiled_{function}", saves=saves, compiled=True)


def _liger(function: str, saves: str, signs: str, *, overwrites: bool = False) -> PartRecord:
    return PartRecord(
        function=f"stepscope.training.parts.libraries:liger_{function}", device_types=("cuda",), dtypes=_FUSED,
        package="liger_kernel", installs="liger-kernel", saves=saves, signs=signs, overwrites=overwrites,
    )  # fmt: skip


def _quack(
    function: str, saves: str, signs: str, *, multiples: tuple[int, int] = (1, 2), largest_width: int | None = None,
    dtypes: tuple[TensorDtype, ...] = _FUSED,
) -> PartRecord:  # fmt: skip
    return PartRecord(
        function=f"stepscope.training.parts.libraries:quack_{function}", device_types=("cuda",), dtypes=dtypes,
        package="quack", installs="quack-kernels", saves=saves, signs=signs, multiples=multiples,
        largest_width=largest_width,
    )  # fmt: skip


_PARTS: dict[Part, dict[Kernels, PartRecord]] = {
    "norm": {
        "reference": PartRecord(function="", saves="x and x / rms in fp32, 2 R M; rms, R"),
        "compiled": _compiled("rms_norm", "what the compiler keeps: the sum, R M, and 1 / rms, R"),
        "fused": _fused(
            "norm:rms_norm",
            "the sum x + branch, R M, which the residual stream keeps anyway; 1 / rms in fp32, R; of LayerNorm the "
            "mean, too, R",
            "rms_norm_(?:forward|backward|shares)$|layer_norm_(?:forward|backward)$", largest_width=32768,
            of_models=True,
        ),
        "liger": _liger("rms_norm", "the sum, R M; 1 / rms, R", r"^_(?:block_)?rms_norm_(?:forward|backward)_kernel"),
        "quack": _quack("rms_norm", "the sum, R M; 1 / rms in fp32, R", "quack(?:::_?)?rmsnorm"),
    },
    "rope": {
        "reference": PartRecord(function="", saves="cos and sin, cast: 4 S D for each layer, in 16 bits"),
        "compiled": _compiled("rotated", "what the compiler keeps: cos and sin, S D each"),
        "fused": _fused(
            "rope:rotated", "nothing: cos and sin are the model's", "rotate_halves$", largest_width=1024,
            of_models=True,
        ),
        "liger": _liger("rotated", "nothing: cos and sin are the model's", r"^_triton_rope"),
        "quack": _quack(
            "rotated", "nothing: cos and sin are the model's", "quack(?:::_)?rotary", multiples=(8, 8),
            largest_width=512,
        ),
    },
    "mlp": {
        "reference": PartRecord(function="", saves="gate, up, silu(gate): 3 R F"),
        "compiled": _compiled("silu_product", "what the compiler keeps: gate and up, 2 R F"),
        "fused": _fused(
            "mlp:silu_product", "gate and up: 2 R F; of GELU the product before its bias, R F",
            "(?:silu_product|biased_gelu)_(?:forward|backward)$", of_models=True,
        ),
        "liger": _liger("silu_product", "gate and up: 2 R F", r"^_swiglu_(?:forward|backward)_kernel", overwrites=True),
    },
    "loss": {
        "reference": PartRecord(function="", saves="the hidden state, R M, and log-probabilities in fp32, R V"),
        "compiled": _compiled("linear_cross_entropy", "what the compiler keeps: hidden state and logits, R M and R V"),
        "fused": _fused(
            "loss:linear_cross_entropy",
            "its own gradients: of the hidden state, R M, and of the head in fp32, V M; in bf16 of one chunk of rows "
            "the hidden state, R M, and the logits' gradient, R V, instead of the head's",
            "linear_cross_entropy_(?:forward|backward)$|cross_entropy_rows$|scaled_by$|add_embedded$"
            "|add_rows_of_tokens$",
            of_models=True,
        ),
        "liger": _liger(
            "linear_cross_entropy", "its own gradients: of the hidden state, R M, and of the head, V M",
            r"^liger_cross_entropy_kernel",
        ),
        "quack": _quack(
            "linear_cross_entropy", "its own gradients: of the hidden state, R M, and of the head in fp32, V M",
            "quack(?:::_?)?(?:linear_)?(?:cross_entropy|lce)|^_lce_glue", dtypes=_HALF,
        ),
    },
}  # fmt: skip

_OF_USERS = PartRecord(function="", saves="what it keeps itself", repeats=False)
PARTS: dict[Part, Records[PartRecord]] = {part: Records(ways, of_users=_OF_USERS) for part, ways in _PARTS.items()}
"""The implementations of each part, by name."""


KERNELS: tuple[Kernels, ...] = tuple(dict.fromkeys(name for ways in PARTS.values() for name in ways))
"""The names that `--kernels` takes. Each is an implementation of every part, but `quack`, which has no `mlp`."""


def named_kernels(kernels: object) -> dict[Part, Kernels]:
    """The name of each part that `kernels` says: one name for all parts that have it, or a name by part. Raises
    InputError."""
    if isinstance(kernels, Mapping):
        names = {str(part): str(name) for part, name in kernels.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        strangers = [part for part in names if part not in PARTS]
        if strangers:
            raise InputError(f"kernels has the part {strangers[0]!r}: choose among {', '.join(PARTS)}")
        return {part: choose_name(names[part], PARTS[part], part) for part in PARTS if part in names}
    name = choose(str(kernels), KERNELS, "kernels")
    return {part: name for part, ways in PARTS.items() if name in ways}


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


def has_few_programs(kv_heads: int, keys: int) -> bool:
    """Whether attention's backward has fewer programs than an H200 has multiprocessors. kv_heads: those of all batches.

    A program takes 128 keys of a head of keys, with all its queries one after another. Where programs are few, each
    head of queries has programs of its own: Qwen2's backward has 32 of a batch of 2 x 1,024, and took 6 times as long
    as its forward.
    """
    return kv_heads * -(-keys // 128) < 132


def loss_chunk_rows(rows: int, vocabulary: int, itemsize: int, width: int, *, few: bool = False) -> int:
    """How many rows of logits the fused loss makes at a time, or has room for where few of them have labels.

    A weight (V, M) whose gradient in fp32 stays in no cache gets chunks of 4 M rows in 16 bits, at least twice
    LOSS_LEAST_ROWS: their logits take as many bytes as AdamW's moments of the weight, 8 V M. In 32 bits products take
    so long that what is added beside them does not count.
    """
    fitting = (FEW_LABELS_CHUNK_BYTES if few else LOSS_CHUNK_BYTES) // max(1, vocabulary * itemsize)
    least = LOSS_LEAST_ROWS
    if itemsize == 2 and width <= LOSS_WIDEST and 4 * vocabulary * width > LOSS_SUM_IN_CACHE_BYTES:
        least = max(width // 32 * 128, 2 * LOSS_LEAST_ROWS)
    return max(1, min(rows, max(fitting // 128 * 128, least)))


def loss_columns(vocabulary: int) -> int:
    """How many columns a row of the fused loss's logits has: the vocabulary, or where 16 does not divide that, the next
    multiple of 64. Rows begin at addresses that fast products and wide loads take."""
    return vocabulary if vocabulary % 16 == 0 else (vocabulary + 63) // 64 * 64


def check_parts(
    chosen: Mapping[Part, Kernels], device_type: str, dtype: TensorDtype, widths: Mapping[Part, int]
) -> None:
    """Raise an InputError, one line, for a part that does not run here."""
    for part, name in chosen.items():
        fault = PARTS[part][name].fault(device_type, dtype, widths.get(part))
        if fault is not None:
            raise InputError(f"{part} {name} {fault}: choose --{part} {REFERENCE}")


def unpredicted_parts(chosen: Mapping[Part, Kernels], *, eager: bool) -> list[Part]:
    """The parts with which the memory of a step is not predicted."""
    return [part for part, name in chosen.items() if name != REFERENCE and not (eager and PARTS[part][name].predicted)]
