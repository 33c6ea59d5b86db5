"""Which kind of work a kernel does: its family, by its name, and where the name leaves it open by where it ran."""

import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import msgspec

from stepscope.core.answer import PROSE, Answer, Line, table_of
from stepscope.core.errors import LONGEST_NAME, printable
from stepscope.core.range_names import OPTIMIZER, SOFTMAX
from stepscope.traces.kernels.names import KernelName, decode, is_tf32, split_name, whole_of

Family = Literal[
    "matrix multiplication", "attention (fused)", "convolution", "recurrence", "softmax", "normalisation",
    "activation/elementwise", "quantisation", "copy/cast", "reduction", "pooling/interpolation", "sorting",
    "embedding/gather", "expert routing", "sampling", "optimizer", "random", "communication", "memcpy/memset",
    "view/allocation", "Triton/compiled fusion", "other",
]  # fmt: skip


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel, or operator, whose function's name has `function` and whose template arguments have `arguments`."""

    family: Family
    function: str
    arguments: str = ""
    example: str


class Rulebook:
    """Rules in their order. The patterns of one are compiled when a lookup first reaches it: most names need few."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self._compiled: list[tuple[re.Pattern[str], re.Pattern[str]]] = []
        """The patterns of the first of them."""

    def find(self, function: str, arguments: str = "", *, cut: bool = False) -> Rule | None:
        """The first rule that fits. cut: whether the arguments end early: none fits where one before it might have."""
        for place, rule in enumerate(self.rules):
            if place == len(self._compiled):
                self._compiled.append((re.compile(rule.function), re.compile(rule.arguments)))
            in_function, in_arguments = self._compiled[place]
            if in_function.search(function):
                if in_arguments.search(arguments):
                    return rule
                if cut:
                    return None
        return None


def _rulebook(kind: str) -> Rulebook:
    """The rules of `kind` (operators, or kernels) as families.toml lists them."""

    def whole(text: str) -> str:
        text = "".join(line.strip() for line in text.splitlines())
        return re.sub(r"\{([A-Z_]+)\}", lambda word: _WRITTEN["words"][word[1]], text)

    rules = [{field: whole(text) for field, text in rule.items()} for rule in _WRITTEN[kind]]
    return Rulebook(msgspec.convert(rules, tuple[Rule, ...]))


_WRITTEN = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
OPERATOR_RULES, KERNEL_RULES = _rulebook("operators"), _rulebook("kernels")


# One spelling for kernels' names, which each profiler's demangler writes in its own way.
#
# void k<4, f(T const&)::{lambda(float)#1}, std::array<char*, 2ul> >(int)                             Kineto
# void k<(int)4, void f(T1)::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(T1)  Nsight Systems


_LAMBDA = re.compile(r"[\[{]lambda\(([^()]*)\)(?: \(instance (\d+)\)\]|#(\d+)\})")
_BRACKETS = re.compile(r"\([^()]*\)")
"""Parameter lists, which repeat the template arguments in either spelling, and casts of those."""
_DEEPEST = 16
_STEPS = (
    (re.compile(r"\(anonymous namespace\)|<unnamed>"), "{anonymous}"),
    (_LAMBDA, r"{lambda \1#\2\3}"),
    (re.compile(r"\bvoid (?=\w)"), ""),
    (re.compile(r"(?<![\w.])(\d+)(?:u?l{1,2}|u)(?!\w)"), r"\1"),
    (re.compile(r"(?<![\w.])true(?!\w)"), "1"),
    (re.compile(r"(?<![\w.])false(?!\w)"), "0"),
)


def one_spelling(name: str) -> str:
    """The kernel's function and template arguments, the same whichever profiler wrote the name."""
    function, arguments, _ = split_name(name)
    text = f"{function}<{arguments}>" if arguments else function
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    for _ in range(_DEEPEST):
        text, removed = _BRACKETS.subn("", text)
        if not removed:
            break
    return "".join(text.split())


FAMILIES: tuple[Family, ...] = get_args(Family)

FUNCTION_LIMIT = 512
"""Characters of a function's name that patterns look at; the longest real ones have some 250."""

_POINTWISE: frozenset[Family] = frozenset(
    {"activation/elementwise", "copy/cast", "reduction", "sorting", "Triton/compiled fusion"}
)
"""Kernels of these families serve any layer: what they belong to is decided by operator, part and phase."""


def classify(name: str, *, operator: str | None = None, part: str | None = None, phase: str | None = None) -> Family:
    """The family of a kernel, or in a CPU trace of an operator, by its name.

    Where the name leaves it open, the innermost PyTorch operator decides, then the phase of the step and the part of
    the model: a softmax made of max, sub, exp, sum and div is softmax. A kernel named pointwise is never a product,
    wherever it ran. A product that an operator of convolution launches is how that convolution is computed.
    """
    rule = rule_of(name)
    family: Family = rule.family if rule else "other"
    by_operator = _family_of_operator(operator) if operator else "other"
    if family in _POINTWISE:
        # A copy launched by aten::addmm itself is the bias's, one by a convolution changes a layout: they stay what
        # their names say.
        if by_operator not in _POINTWISE | {"other", "matrix multiplication", "convolution", "view/allocation"}:
            return by_operator
        if phase == OPTIMIZER:
            return "optimizer"
        if part == SOFTMAX:
            return "softmax"
        return "copy/cast" if (family, by_operator) == ("activation/elementwise", "copy/cast") else family
    if not operator or _OPERATOR.match(name[:FUNCTION_LIMIT]):
        return family
    computes_convolution = (family, by_operator) == ("matrix multiplication", "convolution")
    return by_operator if family == "other" or computes_convolution else family


_GENERATED = re.compile(r"triton_(?:poi|red|per|for|unk)_")


def is_generated(name: str) -> bool:
    """Whether a compiler made the kernel of several operators, whatever its family."""
    return _GENERATED.match(name) is not None


@lru_cache(1024)
def rule_of(name: str) -> Rule | None:
    """The rule that the name alone falls under."""
    if _OPERATOR.match(name[:FUNCTION_LIMIT]):
        return OPERATOR_RULES.find(_operator_of(name[:FUNCTION_LIMIT]))
    whole = whole_of(name)
    function, arguments, _ = split_name(whole)
    if whole != name and whole.rstrip().endswith(function) and not _is_product(decode(name)):
        return None  # a word more may make it another kernel
    return KERNEL_RULES.find(function[:FUNCTION_LIMIT], arguments, cut=whole != name)


def _is_product(kernel: KernelName) -> bool:
    return (kernel.transposes or kernel.accumulate_dtype) is not None


_OPERATOR = re.compile(
    r"(?:aten|stepscope|c10d|_c10d_functional|prims|autograd|torch|profiler|mkl|mkldnn|gloo|mpi)::|(?:nccl|gloo|mpi):|"
    r"Optimizer\.|record_param_comms|\w+Backward\d*$"
)
_BACKWARD = re.compile(r"(\w+?)Backward\d*$")


@lru_cache(1024)
def _family_of_operator(operator: str) -> Family:
    rule = OPERATOR_RULES.find(_operator_of(operator[:FUNCTION_LIMIT]))
    return rule.family if rule else "other"


def _operator_of(name: str) -> str:
    """An autograd node is what it is the gradient of: AddmmBackward0 -> aten::addmm."""
    match = _BACKWARD.match(name)
    if match is None:
        return name
    return "aten::" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", match[1]).lower()


# One kernel's name in plain words.


class KernelExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a name says, and what follows from it, as (heading, sentence) pairs."""

    kernel: KernelName
    family: Family
    lines: list[tuple[str, str]] = msgspec.field(default_factory=list)


def explain_kernel(name: str) -> KernelExplanation:
    """What the name says of its kernel. Of an unknown kernel that is its function's name and no more."""
    kernel, family = decode(name), classify(name)
    sayings = (
        ("cut", _cut(kernel, family)),
        ("runs", "" if kernel.operation in kernel.function else kernel.operation),
        ("does", _does(kernel)),
        ("family", family),
        ("library", _library(kernel)),
        ("architecture", _architecture(kernel)),
        ("types", _types(kernel)),
        ("unit", _unit(kernel)),
        ("layout", f"{kernel.transposes}: {_LAYOUTS[kernel.transposes]}" if kernel.transposes else ""),
        ("products", _PRODUCTS[kernel.transposes] if kernel.transposes else ""),
        ("tile", _tile(kernel, family)),
        ("split", _split(kernel)),
        ("schedule", ", ".join(kernel.schedule)),
    )
    lines = [(heading, sentence) for heading, sentence in sayings if sentence]
    if len(lines) == 1 and family == "other":
        lines.append(("known", "nothing beyond the function's name"))
    return KernelExplanation(kernel=kernel, family=family, lines=lines)


def answer_kernel(explanation: KernelExplanation) -> Answer:
    """The function's name, and a line for each thing that it says."""
    function = printable(explanation.kernel.function, LONGEST_NAME)
    rows = [(heading, printable(sentence, None)) for heading, sentence in explanation.lines]
    return Answer(
        study="kernel",
        question="",
        lead=(Line(function, "strong"),),
        tables=(table_of("part", ("meaning", PROSE), rows=rows),),
    )


def _cut(kernel: KernelName, family: Family) -> str:
    if not kernel.cut:
        return ""
    text = "the name ends early: what stood behind is not known, and nothing is read from the word that may be half"
    if kernel.function.startswith("cutlass::Kernel") and family == "other":
        text += ". CUTLASS's wrapper of this name runs its matrix products, so this is most likely one"
    return text


# The functions that PyTorch's pointwise and reducing kernels apply (aten/src/ATen/native/cuda/*.cu).
_APPLIES = (
    (r"MulFunctor", "multiplies"),
    (r"DivFunctor|div_(?:true|floor|trunc)_kernel", "divides"),
    (r"CUDAFunctor_add|AddFunctor|add_kernel", "adds (where the call has alpha = -1: subtracts)"),
    (r"direct_copy_kernel", "copies, and casts where the types differ"),
    (r"(?:bfloat16|float16|float8)\w*_copy_kernel", "copies, and casts to that type"),
    (r"FillFunctor", "fills with one number"),
    (r"masked_fill", "fills with one number where a mask says so, as the causal mask of attention"),
    (r"where_kernel", "takes from one tensor or another, as a mask says"),
    (r"addcmul", "adds a product: a + value * b * c"),
    (r"addcdiv", "adds a quotient: a + value * b / c"),
    (r"lerp", "moves from one tensor towards another"),
    (r"\bexp_kernel|exp_kernel_cuda", "takes exp"),
    (r"\blog_kernel|log_kernel_cuda", "takes log"),
    (r"rsqrt", "takes 1 / sqrt"),
    (r"(?<!r)sqrt", "takes sqrt"),
    (r"pow_tensor", "takes a power"),
    (r"sigmoid_backward", "goes backward through sigmoid"),
    (r"sigmoid", "takes sigmoid"),
    (r"silu_backward", "goes backward through SiLU"),
    (r"silu", "takes SiLU: x * sigmoid(x)"),
    (r"GeluBackward|GeluCUDABackward", "goes backward through GELU"),
    (r"Gelu", "takes GELU"),
    (r"tanh_backward", "goes backward through tanh"),
    (r"tanh", "takes tanh"),
    (r"neg_kernel", "negates"),
    (r"(?:sin|cos)_kernel", "takes a sine or cosine, as the tables of rotary embeddings"),
    (r"CompareFunctor|CompareEqFunctor|compare_", "compares"),
    (r"MeanOps", "takes means over a dimension"),
    (r"NormTwoOps|NormOps", "takes norms"),
    (r"sum_functor|func_wrapper_t<.*sum|ReduceAdd", "sums over a dimension"),
    (r"MaxNanFunctor|MaxOps|max_values", "takes the largest over a dimension"),
    (r"MinNanFunctor|MinOps|min_values", "takes the smallest over a dimension"),
)


def what_it_does(name: str) -> str:
    """What a kernel of PyTorch's own applies to each number, and how it reads them; empty of all others."""
    return _does(decode(name))


def _does(kernel: KernelName) -> str:
    """What a kernel of PyTorch's own applies to each number, and how it reads them."""
    if kernel.library != "ATen" or not kernel.arguments:
        return ""
    if kernel.operation == "multi_tensor_apply_kernel":
        return "one function on many tensors in one launch, as an optimizer with foreach or fused calls it"
    text = next((words for pattern, words in _APPLIES if re.search(pattern, kernel.arguments)), "")
    if text and re.search(r"[AB]UnaryFunctor", kernel.arguments):
        text += ", with one number as the other operand"
    wide = re.match(r"(?:\(int\))?(\d+)", kernel.arguments)
    reads = {
        "vectorized_elementwise_kernel": f"vectorised: loads and stores {wide[1] if wide else 'several'} numbers at a "
        "time, as tensors that lie whole let it",
        "elementwise_kernel": "works out the place of each number, for tensors that do not lie whole, or are broadcast",
        "unrolled_elementwise_kernel": "number by number, four to a thread, for types that differ or places that are "
        "not aligned",
    }.get(kernel.operation, "")
    return "; ".join(words for words in (text, reads) if words)


_LIBRARY_NOTES = {
    "CUTLASS": "; cuBLAS ships kernels made with it, so a call of cuBLAS may have chosen it",
    "Triton": ", generated by torch.compile (TorchInductor) from the operators in the name",
    "xFormers": ": memory-efficient attention, as PyTorch carries it",
    "ATen": ", PyTorch's own kernels",
    "Tensile": ", which makes the kernels of AMD's rocBLAS and hipBLASLt",
    "NCCL": " (RCCL on AMD names its kernels alike)",
}


def _library(kernel: KernelName) -> str:
    if kernel.library is None:
        return ""
    if kernel.function.startswith("aten::"):
        return "ATen: no kernel but an operator of PyTorch, as traces of a CPU name what runs"
    if kernel.operation.startswith("nvjet_"):
        return "cuBLAS, whose family of kernels for Hopper and later is called nvjet"
    return kernel.library + _LIBRARY_NOTES.get(kernel.library, "")


def _architecture(kernel: KernelName) -> str:
    built = kernel.architecture
    if built is None:
        return ""
    if not built.startswith("sm"):
        return f"written for {built}"
    number = int(built[2:])
    if number == 90 and kernel.unit == "tensor core":
        return "written for sm90 (Hopper), whose warp-group Tensor Core instructions (wgmma) no other GPU has"
    if number >= 90:
        return f"written for {built}"
    plain = kernel.unit == "cuda core" and kernel.input_dtype == "fp32"
    fp32 = ": fp32 products on a Hopper are usually taken by kernels written for sm80" if plain else ""
    where = f" (sm90, Hopper, say){fp32}" if number == 80 else ""
    return f"written for {built}, used on later GPUs too{where}"


def _types(kernel: KernelName) -> str:
    if kernel.input_dtype is None and kernel.output_dtype is None:
        return "a part of the name is cut off: it does not tell them" if "_xmma_gemm_" in kernel.name else ""
    if kernel.second_pass or (kernel.unit is None and kernel.accumulate_dtype is None):
        if kernel.input_dtype == kernel.output_dtype:
            return f"{kernel.input_dtype} elements"
        return f"reads {kernel.input_dtype or 'a type the name does not say'}, writes {kernel.output_dtype or 'unsaid'}"
    text = f"{kernel.input_dtype} operands" if kernel.input_dtype else "operands of a type the name does not say"
    if is_tf32(kernel):
        text = "fp32 operands rounded to tf32 (10 bits of mantissa)"
    if kernel.accumulate_dtype:
        text += f", products summed in {kernel.accumulate_dtype}"
    if kernel.output_dtype:
        text += f", result written as {kernel.output_dtype}"
    return text


_WITHOUT_TF32 = ("sm70", "sm72", "sm75")
"""Volta and Turing, whose Tensor Cores multiply fp16 and integers."""


def _unit(kernel: KernelName) -> str:
    if kernel.unit is None:
        return ""
    if kernel.unit == "tensor core":
        true_fp32 = "; true fp32 is torch.set_float32_matmul_precision('highest')" if is_tf32(kernel) else ""
        return f"Tensor Cores{true_fp32}"
    if kernel.input_dtype != "fp32":
        return "CUDA cores, not Tensor Cores"
    instead = (
        ", and those of Volta and Turing multiply neither TF32 nor bf16, but fp16 (torch.autocast with a GradScaler)"
        if kernel.architecture in _WITHOUT_TF32
        else ". To use them, allow TF32 (torch.set_float32_matmul_precision('high')) or take the products in bf16 "
        "(torch.autocast)"
    )
    return f"CUDA cores, by fused multiply-adds (FFMA): Tensor Cores have no fp32 of their own{instead}"


# cuBLAS is column-major: a row-major tensor is to it the transposed matrix, so PyTorch's C = A B is asked of it as
# C' = B' A', and its first letter is of PyTorch's second operand. A row-major operand is then n if it is that second
# one used as it lies, and so is the first; an operand that PyTorch reads transposed is t. Traces with shapes and
# strides agree: (2048x768)(768x3072, strides 1, 768) is tn, strides (3072, 1) nn, (2048x768 transposed)(2048x768) nt.
_LAYOUTS = {
    "tn": "A transposed, B not (column-major); to row-major PyTorch: X Wᵀ, the second operand read transposed",
    "nn": "neither operand transposed (column-major); to row-major PyTorch: X Y, both read as they lie",
    "nt": "B transposed, A not (column-major); to row-major PyTorch: Xᵀ Y, the first operand read transposed",
    "tt": "both operands transposed (column-major); to row-major PyTorch: Xᵀ Yᵀ, both read transposed",
}
_SWAPPED = ". With a weight kept as (in, out) instead of PyTorch's (out, in), tn and nn of a linear layer swap"
_PRODUCTS = {
    "tn": f"of a linear layer: the forward Y = X Wᵀ; of attention: scores Q Kᵀ, and in backward dP = dO Vᵀ{_SWAPPED}",
    "nn": "of a linear layer: the gradient of its input dX = dY W (not of its weight, as is sometimes written); "
    f"of attention: the output P V, and in backward dQ = dS K{_SWAPPED}",
    "nt": "of a linear layer: the gradient of its weight dW = dYᵀ X; of attention, in backward: dV = Pᵀ dO and "
    "dK = dSᵀ Q",
    "tt": "of no product of a usual step",
}


def _tile(kernel: KernelName, family: Family) -> str:
    if kernel.tile is None:
        return f"head dimension up to {kernel.head_dim}" if kernel.head_dim else ""
    m, n, k = kernel.tile
    if family == "attention (fused)":
        text = f"each thread block works on {m} queries and {n} keys at a time"
        # Kernels are built for some head dimensions; others are padded to the next.
        return text + (f", head dimension up to {kernel.head_dim}" if kernel.head_dim else "")
    text = f"each thread block computes a {m}x{n} piece of the output"
    if k:
        text += f", stepping over K by {k}"
    if kernel.stages:
        text += f", with {kernel.stages} stages of K in shared memory: one in use, the others on their way"
    if kernel.cluster and kernel.cluster != (1, 1):
        text += f", in clusters of {kernel.cluster[0]}x{kernel.cluster[1]} thread blocks that share what they load"
    return text


def _split(kernel: KernelName) -> str:
    if kernel.second_pass:
        return "adds up the partial results of a product whose K was split over thread blocks: part of that product"
    if kernel.split_k:
        return "K is split over several thread blocks, whose partial results are added up afterwards (split-K)"
    if kernel.sliced_k and kernel.sliced_k > 1:
        return f"K is sliced in {kernel.sliced_k} among the warps of a thread block"
    return ""
