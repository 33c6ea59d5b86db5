"""The table of every option, and what options together fill.

A verb takes its options from here (`app/cli/verb.py`). A new field of ModelConfig or Workload is one line of the table:
`run`, `sweep` and `fit` have it then, and hand it on.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from stepscope.app.cli import completion
from stepscope.app.cli.output import Presentation
from stepscope.core.attentions import ATTENTIONS, attention_names
from stepscope.core.checkpointing import CHECKPOINTING_CHOICES, KEEPING
from stepscope.core.device_spec import NETWORKS
from stepscope.core.errors import InputError, choose
from stepscope.core.evidence import TRACE_TOOLS, TraceTool
from stepscope.core.model_config import PRESETS, PUBLIC_SHAPES, ModelConfig
from stepscope.core.options import (
    BUDGET,
    CALLS,
    MEASURING,
    MODEL,
    NUMBERS,
    OUTPUT,
    PARALLEL,
    QUESTION,
    RECORDING,
    STORED,
    SWEEPING,
    TRAINING,
    WORKLOAD,
    Option,
    finite_numbers,
    positive_integers,
    positive_number,
    positive_numbers,
)
from stepscope.core.parts import KERNELS, PART_WORDS, kernels_of
from stepscope.core.range_names import PHASES as CAPTURED_PHASES
from stepscope.core.run import Settings
from stepscope.core.strategies import NOT_PARALLEL, SCALINGS, option_words, strategy_names
from stepscope.core.study_results import TUNED_FIELDS
from stepscope.core.units import parse_bytes, parse_flops_per_s, parse_seconds, parse_window
from stepscope.core.workloads import (
    COMPILES,
    DTYPES,
    GRAPHS,
    NO_CLIP,
    OPTIMIZERS,
    PHASES,
    PROJECTIONS,
    FactoryWorkload,
    TextbookWorkload,
)
from stepscope.engine.request import MEMORY_STACKS, MemoryRequest, MemoryStacks, TraceRequest
from stepscope.rendering.renderers import STYLES


def norm_bound(text: str) -> float | str:
    """What `--clip` says: a number above zero, or none. Raises InputError for anything else."""
    return text if text == NO_CLIP else positive_number(text, "--clip")


# Which options stand on the command line: those that only have a default, nobody asked for.


_ALWAYS = ("--only", "--style", "--brief", "--json", "--save", "--device")
"""What shows an answer, and the device, which a script may name for all that it runs."""
_given: ContextVar[tuple[str, ...]] = ContextVar("given", default=())


def remember(flags: Iterable[str]) -> None:
    """Keep the options that this command line has; the grammar says them before a verb runs."""
    _given.set(tuple(flags))


def is_given(flag: str) -> bool:
    """Whether the command line has this option."""
    return flag in _given.get()


def refuse_beside(mode: str, *read: str) -> None:
    """Raise InputError for given options that are not read beside `mode`."""
    useless = [flag for flag in _given.get() if flag not in (mode, *read, *_ALWAYS)]
    if useless:
        raise InputError(f"{', '.join(useless)} says nothing with {mode}: leave it out")


# A list of words that an option was given.


def words(text: str, option: str) -> list[str]:
    """A comma-separated list of words, each once."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise InputError(f"{option} is empty: name at least one")
    return found


# What `--record` and the options beside it fill: what is kept of some more steps.


RECORDED = ("memory", *TRACE_TOOLS)


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of some more steps, after the timed ones."""

    trace: TraceRequest = TraceRequest()
    memory: MemoryRequest | None = None


def recording_from(
    record: tuple[str, ...],
    trace_steps: int,
    trace_stacks: bool = False,
    memory_stacks: str | None = None,
    memory_steps: int = 1,
) -> Recording:
    """What to keep; what is named twice is kept once."""
    named = dict.fromkeys(word for text in record for word in words(text, "--record"))
    for name in named:
        choose(name, RECORDED, "record")
    if trace_stacks and "kineto" not in named:
        raise InputError("--trace-stacks belongs to --record kineto: add it, or leave the stacks out")
    if memory_stacks is not None and "memory" not in named:
        raise InputError("--memory-stacks belongs to --record memory: add it, or leave the stacks out")
    if is_given("--memory-steps") and "memory" not in named:
        raise InputError("--memory-steps belongs to --record memory: add it, or leave the steps out")
    if is_given("--trace-steps") and not named.keys() & set(TRACE_TOOLS):
        raise InputError("--trace-steps belongs to --record kineto or nsys: add one of them, or leave the steps out")
    tools = cast("tuple[TraceTool, ...]", tuple(name for name in named if name in TRACE_TOOLS))
    stacks = cast("MemoryStacks", memory_stacks or "python")  # MemoryRequest refuses others
    return Recording(
        trace=TraceRequest(tools=tools, steps=trace_steps, stacks=trace_stacks),
        memory=MemoryRequest(stacks=stacks, steps=memory_steps) if "memory" in named else None,
    )


def _tag(text: str) -> str:
    if not text.isprintable() or not 0 < len(text) <= 100:
        raise InputError(f"the tag is {text[:40]!a}: use 1 to 100 printable characters")
    return text


_ATTENTION = ("study attention", "study attention-gate")
_WITH_PARTS = ("run", "sweep", "fit", "tune")
_PARTS = (*_WITH_PARTS, "plan")
_KERNELS = (*_PARTS, "study parallel")
_SHARED = ("run", "sweep", "tune", "study parallel")
_TRAINED = ("study quality", "study scaling", "study swallowed")
_TRACED = "Needs --record kineto."

OPTIONS = (
    # A new size of the model, or a new field of a workload, is one line here: run, sweep and fit have it then.
    Option("model", str, MODEL, "A preset.", ModelConfig, choices=tuple(PRESETS)),
    Option(
        "model", str, MODEL,
        "A preset, or the config.json of a Hugging Face model, which gets random weights: nothing is downloaded.",
        ModelConfig, choices=tuple(PRESETS),
        verbs=(
            "run", "sweep", "fit", "tune", "study compile", "study speed", "study underflow", "study swallowed",
            "study parity", "study shadow",
        ),
    ),
    Option("model", str, MODEL, "The config.json of a Hugging Face model, which gets random weights.",
           verbs=("study scaling", "study normalisation", "study quality")),
    Option("d_model", int, MODEL, "Width of the model, in place of the preset's.", ModelConfig),
    Option("d_ff", int, MODEL, "Width inside the feed-forward network, in place of the preset's.", ModelConfig),
    Option("layers", int, MODEL, "Blocks, in place of the preset's.", ModelConfig),
    Option("heads", int, MODEL, "Heads of attention, in place of the preset's.", ModelConfig),
    Option("vocabulary", int, MODEL, "Tokens in the vocabulary, in place of the preset's.", ModelConfig),
    Option("kv_heads", int, MODEL, "Heads of keys and values, each shared by several heads of queries.", ModelConfig),
    Option("tied", bool, MODEL, "Let the output head be the embedding's weight.", ModelConfig),
    Option("seq_len", int, WORKLOAD, "Tokens in a sequence.", TextbookWorkload),
    Option("batch_size", int, WORKLOAD, "Sequences in a step.", TextbookWorkload),
    Option("dtype", str, WORKLOAD, "", TextbookWorkload, choices=DTYPES),
    Option("phase", str, WORKLOAD, "", TextbookWorkload, choices=PHASES),
    Option(
        "parallel", str, PARALLEL,
        f"How several ranks share a step. Options follow the name, as in fsdp2:reshard=no: {option_words()}.",
        TextbookWorkload, choices=(NOT_PARALLEL, *strategy_names()), verbs=_SHARED,
    ),
    Option("ranks", int, PARALLEL, "Processes that share a step, a device each.", TextbookWorkload, verbs=_SHARED),
    Option("scaling", str, PARALLEL, "Whether ranks share one process's batch, or have one as large each.",
           default="both", choices=SCALINGS, verbs=("study parallel",)),
    Option("attention", str, WORKLOAD, "", TextbookWorkload, choices=attention_names()),
    *(Option(part, str, WORKLOAD, f"How {said} is computed.", TextbookWorkload, choices=kernels_of(part), verbs=_PARTS)
      for part, said in PART_WORDS.items()),
    Option("kernels", str, WORKLOAD, "How norm, rope, mlp and loss are computed, where they are not said; of your own "
           "model norm, mlp and loss. quack has no mlp.", TextbookWorkload, choices=KERNELS, verbs=_KERNELS),
    Option("projections", str, WORKLOAD, "Whether projections of one input are one product.", TextbookWorkload,
           choices=PROJECTIONS, verbs=_WITH_PARTS),
    Option("compile", str, WORKLOAD, "", TextbookWorkload, choices=COMPILES),
    Option("graph", str, WORKLOAD, "What is replayed as CUDA graphs.", TextbookWorkload, choices=GRAPHS),
    Option("optimizer", str, WORKLOAD, "", TextbookWorkload, choices=OPTIMIZERS),
    Option("clip", norm_bound, WORKLOAD, "The bound on the gradients' global norm, as in 1.0, to which they are scaled "
           "down; none leaves them.", TextbookWorkload, metavar="NORM"),
    Option(
        "checkpointing", str, WORKLOAD, f"What backward runs again instead of keeping: {CHECKPOINTING_CHOICES}.",
        TextbookWorkload,
        complete=completion.words("none", *KEEPING, "selective-4", "offload-4", "every-1", "every-2", "every-4"),
    ),
    Option("accumulation", int, WORKLOAD, "Micro-batches that a step is split into.", TextbookWorkload),
    Option(
        "seed", int, WORKLOAD, "Seed of parameters and data.", TextbookWorkload, 0,
        verbs=(
            "run", "sweep", "study underflow", "study scaling", "study swallowed", "study quality", "study parity",
            "study shadow",
        ),
    ),
    # What a verb has besides, or says otherwise.
    Option("model", str, MODEL, "A toy, a preset, or the config.json of a Hugging Face model.",
           verbs=("study autocast",), choices=("toy", *PRESETS)),
    Option(
        "module", str, MODEL,
        "A model of your own, as package.module:factory or path/file.py:factory, run with your rights. factory() "
        "returns (module, batch) or (module, batch, loss); docs/your-own.md has all it may return.", FactoryWorkload,
    ),
    Option(
        "arg", str, MODEL,
        "An argument of --module's factory, or a field of --model's file, as in width=64; a sweep takes several by "
        "commas.", FactoryWorkload, metavar="NAME=VALUE", repeated=True,
    ),
    Option("model_size", str, MODEL, "What is trained: cpu or gpu; the device's if left out.",
           complete=completion.words("cpu", "gpu")),
    Option("dtype", str, WORKLOAD, "", choices=("fp16", "bf16"), verbs=("study autocast",)),
    Option("to", str, WORKLOAD, "The precision that one module at a time gets.", default="bf16",
           choices=("bf16", "fp16")),
    Option("dtype", str, WORKLOAD, "", choices=("fp32", "bf16", "fp16"), verbs=_ATTENTION),
    Option("attention", str, WORKLOAD, "", choices=tuple(ATTENTIONS), verbs=_ATTENTION),
    Option("compile", str, WORKLOAD, "", choices=("none", "default"), verbs=("study attention",)),
    Option("compile", str, WORKLOAD, "", choices=COMPILES[1:4], verbs=("study compile",)),
    Option("batch_size", int, WORKLOAD, "Sequences.", verbs=("study attention",)),
    Option("heads", int, CALLS, "Heads of the queries.", verbs=("study attention",)),
    Option(
        "kv_heads", int, CALLS, "Heads of keys and values, where they have fewer: a divisor of --heads.",
        verbs=("study attention",),
    ),
    Option("head_dim", int, CALLS, "Numbers in a head."),
    Option("causal", bool, CALLS, "Whether a query sees only keys up to its own position, or all.",
           spelled="--causal/--full"),
    Option("launches", str, CALLS, "hidden (the device's own time) or shown (as on an idle device).",
           complete=completion.words("hidden", "shown")),
    Option("preset", str, CALLS, "seeds: the write-ups' grid, batch 8, no heads, fp32, naive.",
           complete=completion.words("seeds")),
    Option("every_shape", bool, CALLS, "Every length with every head_dim: 58 shapes, not 16; on a GPU 64, not 22.",
           default=False),
    Option("steps", int, TRAINING, "Training steps of each run.", verbs=_TRAINED),
    Option("learning_rate", float, TRAINING, "The highest learning rate, reached after the warm-up.",
           verbs=("study quality",)),
    Option("learning_rate", float, TRAINING, "Learning rates at which swallowed updates are counted.",
           verbs=("study swallowed",)),
    Option("remedies_at", float, TRAINING, "The learning rate at which the remedies are compared.", default=1e-4),
    Option("variants", str, TRAINING, "Run only these variants beside fp32, as in bf16,fp16-unscaled,bf16-pure."),
    Option("growth_interval", int, TRAINING, "Steps without an overflow until the scale grows.", default=20),
    Option("overflow_at", int, TRAINING, "Steps that are made to overflow, as in 7,8,60."),
    Option("format", str, NUMBERS, "The format of the table by kind of module: fp16, bf16, fp8-e5m2 or fp8-e4m3.",
           default="fp16", complete=completion.words("fp16", "bf16", "fp8-e5m2", "fp8-e4m3")),
    Option("row", partial(finite_numbers, option="--row"), NUMBERS,
           "What does each softmax make of these numbers? As in 10,11.5,89."),
    Option("scales", partial(positive_numbers, option="--scales"), NUMBERS,
           "Standard deviations of the input, as in 0.1,10,300."),
    Option("widths", partial(positive_integers, option="--widths", limit=65_536), NUMBERS,
           "Numbers in a row, as in 256,4096."),
    Option("epsilon", partial(positive_number, option="--epsilon"), NUMBERS,
           "The number that is added under the root; 1e-5 if left out."),
    Option("addend", float, NUMBERS, "The number that is added again and again; 0.01 if only --count is given."),
    Option("count", int, NUMBERS, "How many addends; 1000 if only --addend is given."),
    # How it is measured.
    Option("device", str, MEASURING, "auto, cpu, cuda or cuda:N.", default="auto",
           complete=completion.words("auto", "cpu", "cuda", "cuda:0", "cuda:1")),
    Option("device", str, MEASURING, "auto, cpu, cuda or cuda:N; cells are shared by several, as in cuda:0,cuda:1.",
           default=("auto",), verbs=("sweep",), complete=completion.words("auto", "cpu", "cuda", "cuda:0", "cuda:1")),
    Option("device", str, MEASURING, "Where PyTorch casts --value to 8 bits: auto, cpu, cuda or cuda:N.",
           verbs=("study formats",), complete=completion.words("auto", "cpu", "cuda", "cuda:0", "cuda:1")),
    Option("device", int, STORED, "Which device of a snapshot of several (default: the one that held most).",
           verbs=("memory",)),
    Option("rules", str, MEASURING, "Whose rules autocast goes by; without a GPU, cuda's as PyTorch registers them.",
           choices=("cpu", "cuda")),
    Option("warmup", int, MEASURING, "Exactly this many warm-up steps (default: until steady).", Settings, least=0),
    Option("warmup", int, MEASURING, "Numbers of warm-up steps.", verbs=("study warmup",)),
    Option("steps", int, MEASURING, "Exactly this many measured steps (default: 10 to 100).", Settings, least=1),
    Option("steps", int, MEASURING, "Measured steps.", least=2, verbs=("study warmup",)),
    Option("steps", str, MEASURING, "Exactly these steps, the first of the loop being 0: 20:40 is steps 20 to 39. "
           "Steps 0 and 1 show what a step is.", metavar="FIRST:END", verbs=("watch",)),
    Option("step_of", str, MEASURING, "The class of the model or of the optimizer whose step counts, where there are "
           "several.", metavar="CLASS"),
    Option("steps", int, MEASURING, "Exactly this many passes of each cell.", least=1, verbs=("study attention",)),
    Option("seconds", float, MEASURING, "Measure for about this long.", Settings, default=5.0, least=0),
    Option("seconds", float, MEASURING, "Seconds for each cell.", least=0, verbs=("study attention",)),
    Option("seconds", float, MEASURING, "Seconds for the whole matrix; the rest is not reached.", least=0,
           verbs=("study attention-gate",)),
    Option("seconds", float, MEASURING, "Seconds for each collective and size (default: 0.2).", least=0,
           verbs=("study collectives",)),
    Option("ranks", int, MEASURING, "Processes that take part, a device each.", least=2, verbs=("study collectives",)),
    Option("backend", str, MEASURING, "What the ranks talk over: gloo is for CPUs, nccl for GPUs.",
           choices=("gloo", "nccl")),
    Option("sizes", parse_bytes, MEASURING, "Sizes of messages, as in 1KiB,1MiB.", metavar="SIZE"),
    Option("largest", parse_bytes, MEASURING, "The largest message; sizes begin at 1 KiB.", metavar="SIZE"),
    Option("repeat", int, MEASURING,
           "Measure in so many processes, each started afresh: five or more tell how far processes differ.",
           default=1, least=1, metavar="N"),
    Option("against", str, MEASURING,
           "Another step, measured turn by turn with this one: a run's name, or the options in which it differs, as in "
           "\"--compile default\".", metavar="RUN|OPTIONS", verbs=("run",)),
    Option("against", str, TRAINING,
           "Also train by the whole step of these options of `run`, as in \"--kernels fused --dtype bf16-master\".",
           metavar="OPTIONS", repeated=True, verbs=("study quality",)),
    Option("no_profile", bool, MEASURING, "Leave out the profiled step after the timed ones.", Settings, False),
    Option("peak_flops", parse_flops_per_s, MEASURING, "The device's peak for this dtype, as in 989T, if unknown.",
           metavar="RATE"),
    Option("budget", float, MEASURING, "Seconds for the whole grid; the rest is not reached.", least=0),
    Option("budget", partial(parse_seconds, option="--budget"), MEASURING,
           "How long the search may take, as in 90s, 10min or 1h; what has begun is finished.", default=600.0,
           metavar="TIME", verbs=("tune",)),
    Option("keep", str, MEASURING, "Choices that stay as they are said.", choices=TUNED_FIELDS),
    Option("workers", int, MEASURING, "Processes that judge, or compile ahead (on a GPU).", least=0),
    Option("again", bool, MEASURING, "Measure anew even if ceilings are stored.", default=False),
    Option("record", str, RECORDING,
           "What to keep of some more steps: every allocation with its stack (memory), a trace of torch.profiler "
           "(kineto) or of Nsight Systems (nsys). Several by commas.",
           Recording, default=(), metavar="|".join(RECORDED), repeated=True, complete=completion.words(*RECORDED)),
    Option("trace_steps", int, RECORDING, "How many steps a trace holds.", Recording, default=2),
    Option("trace_stacks", bool, RECORDING, f"With Python stacks in the trace (slow). {_TRACED}", Recording, False),
    Option("memory_stacks", str, RECORDING,
           "Whose stacks allocations keep: python (default), or all: C++ too, which takes minutes. Needs --record "
           "memory.", Recording, complete=completion.words(*MEMORY_STACKS)),
    Option("memory_steps", int, RECORDING,
           "How many steps are recorded: 3 or more show what grows from step to step. Needs --record memory.",
           Recording, default=1),
    Option("keep_digests", bool, RECORDING, "Write each capture's tables beside its run, as trace-TOOL.json.",
           default=False),
    Option("on", str, SWEEPING,
           "Measure the cells on the nodes of a Ray cluster: ray://HOST, or auto for the one that this machine is in.",
           metavar="ray://HOST|auto", complete=completion.words("auto", "ray://")),
    Option("timeout", float, SWEEPING, "Seconds that one cell may take.", default=900.0, least=1),
    Option("no_skip", bool, SWEEPING, "Also try cells larger than one that ran out of memory.", default=False),
    Option("retry", bool, SWEEPING, "Measure failed, killed and timed-out cells again.", default=False),
    Option("fresh", bool, SWEEPING, "Measure every cell again.", default=False),
    Option("fresh", bool, STORED, "Measure again what an earlier search has measured.", default=False, verbs=("tune",)),
    # How much memory there is.
    Option("memory", parse_bytes, BUDGET,
           "How much PyTorch may allocate, as in 80GiB, so that a GPU stands for a smaller one.", metavar="SIZE"),
    Option("memory", parse_bytes, BUDGET, "How much PyTorch may allocate, as in 80GiB.", metavar="SIZE",
           verbs=("fit",)),
    Option("device", str, BUDGET, "A device by its name, as in H100 or 4090; the datasheet's memory.", verbs=("fit",),
           complete=completion.device_names),
    Option("device", str, BUDGET, "The device of each rank by its name, as in H100, A100 or B200.", verbs=("plan",),
           default="H100", complete=completion.device_names),
    # A step over many GPUs, on paper.
    Option("model", str, MODEL, "A preset, or a shape that others published.", ModelConfig,
           choices=(*PRESETS, *PUBLIC_SHAPES), verbs=("plan",)),
    Option("batch_tokens", int, WORKLOAD, "Tokens in a step, in place of --batch-size.", metavar="N"),
    Option("experts", int, MODEL, "Feed-forward networks in each block.", default=1, least=1),
    Option("active_experts", int, MODEL, "Experts that each token goes through.", default=1, least=1),
    Option("ranks", int, PARALLEL, "GPUs, one rank each.", default=1, verbs=("plan",)),
    Option("network", str, PARALLEL, "What joins GPUs and nodes: a name, figures, or both, as in nvlink4-ib400,"
           "between=100GB; or what `study collectives --json` wrote (default: as the device is usually sold).",
           metavar="NAME|FILE|FIGURES", complete=completion.words(*NETWORKS)),
    Option("layout", str, PARALLEL, "Dimensions that are settled, as in tensor=8,pipeline=4,sharding=zero3.",
           metavar="DIMENSION=N,..."),
    Option("efficiency", float, PARALLEL, "Share of the peak that matrix products reach (default: as measured on an "
           "H200).", metavar="SHARE"),
    Option("spread", float, PARALLEL, "Relative standard deviation of ranks' speeds in the simulation (default: as "
           "measured on an H200).", metavar="SHARE"),
    Option("verify", bool, QUESTION, "Set plans beside what others published, and beside runs (--against).",
           default=False),
    Option("against", Path, QUESTION, "With --verify: stored runs.", metavar="DIR", verbs=("plan",)),
    # What is asked.
    Option("tensors", bool, QUESTION, "List what a block keeps for backward, with the arithmetic of each size.",
           default=False),
    Option("sweep", bool, QUESTION, "The largest batch and the longest sequence that fit, by model: several, or all.",
           default=False),
    Option("fake", bool, QUESTION, "Predict a second time, by running the step on PyTorch's fake tensors.",
           default=False),
    Option("against", Path, QUESTION, "Another capture: what changed from it to this one."),
    Option("between", parse_window, QUESTION, 
           "Only work that starts in this window from the first event, as in 12ms:20ms.",
           metavar="T0:T1"),
    Option("module", str, QUESTION, "Only this module and those inside it, as in layers.0, or layers.*.mlp for all.",
           metavar="NAME", verbs=("trace",)),
    Option("device", int, QUESTION, "Only this device, by its number.", least=0, verbs=("trace",)),
    Option("stream", int, QUESTION, "Only this stream, by its number.", least=0),
    Option("graph_capture", Path, QUESTION,
           "A trace of the steps in which CUDA graphs were captured: `--only \"graph nodes\"` then tells each kernel's "
           "operator and module.", metavar="FILE"),
    Option("top", int, QUESTION, 
           "How many rows the tables of details have: 5, or all of those that --only names. With --json: adds trees of "
           "so many nodes.", least=1),
    Option("sort", str, QUESTION, "The column by which the tables of details are ordered, as in calls.",
           metavar="COLUMN"),
    Option("range", str, QUESTION, "Only what was launched inside ranges of this name.", metavar="NAME"),
    Option("phase", str, QUESTION, "Only this phase.", verbs=("trace",), choices=CAPTURED_PHASES),
    Option("step", int, QUESTION, "Only this step; the first is 0.", least=0),
    Option("rank", int, QUESTION, "Of several captures, only that of this rank.", least=0),
    Option("against", Path, QUESTION, "Compare with the measured runs in this folder.", metavar="DIR",
           verbs=("fit",)),
    Option("apart", Path, QUESTION,
           "With --against: runs shown apart, and not counted (the model was corrected by them).", metavar="DIR"),
    Option("at", str, QUESTION, "Another moment than the peak: 12ms, 12000us, start, end, or a phase for its peak.",
           complete=completion.words("start", "end", *CAPTURED_PHASES)),
    Option("stacks", int, QUESTION, "Print the call stacks of so many of the largest allocations.", least=1),
    Option("setting", str, QUESTION, "The setting of PyTorch's caching allocator that is added, as name:value.",
           metavar="NAME:VALUE"),
    Option("prices", bool, QUESTION,
           "What each graph break and recompilation costs a step of your own module (--module).", default=False),
    Option("across", str, QUESTION,
           "Fields in which the workloads may differ, as in dtype,compile: else only the same is compared.",
           metavar="FIELD"),
    Option("value", str, QUESTION, "The part of the step that is compared, as in forward.", verbs=("compare",)),
    Option("fail_if_slower", str, QUESTION,
           "Leave with code 1 where something surely became slower by more than this, as in 3%.", metavar="SHARE"),
    Option("strict", bool, QUESTION, "With --fail-if-slower: what cannot be decided fails, too.", default=False),
    Option("rows", str, QUESTION, "Fields of the rows."),
    Option("columns", str, QUESTION, "Fields of the columns."),
    Option("value", str, QUESTION, "Figures, as in forward,backward."),
    Option("stat", str, QUESTION, "median, median-interval, mean-std, p95 or p99, for times.", default="median",
           complete=completion.words("median", "median-interval", "mean-std", "p95", "p99")),
    Option("speedup", str, QUESTION, "A column's label: show speed-ups over it."),
    Option("no_ranges", bool, QUESTION, "Needed no more: a capture without ranges is read in any case.", default=False),
    Option("tool", str, QUESTION, "Whose captures to read.", default="kineto", choices=TRACE_TOOLS),
    # Runs and results that are stored.
    Option("runs", Path, STORED, "Where runs lie.", default=Path("runs"), metavar="DIR"),
    Option("from", Path, STORED, "Show an answer that --json wrote; nothing is run.", metavar="FILE"),
    Option("from", Path, STORED, "A file that --figures or --json wrote: nothing is measured.", metavar="FILE",
           verbs=_ATTENTION),
    Option("from", Path, STORED, "A folder of runs measured before: nothing is measured.", metavar="DIR",
           verbs=("study kernels",)),
    Option("from", Path, STORED, "A folder of runs, or an answer that --json wrote: nothing is measured.",
           metavar="PLACE", verbs=("study compile", "study speed", "study attention-step", "study parallel")),
    Option("where", str, STORED, "Keep runs with field=value[,value][,field=value].", metavar="FIELD=VALUE",
           repeated=True),
    Option("tag", _tag, STORED, "A word of your own to find the run by."),
    Option("tag", str, STORED, "Only runs with this tag.", verbs=("ls", "table", "history")),
    Option("workload", str, STORED, "Only trends whose key has this in it, with every run.", metavar="KEY"),
    Option("assignment", str, QUESTION, "Whose questions are answered.", default="cs336"),
    Option("run", bool, QUESTION, "Measure what is missing, the cheapest first. Ctrl-C keeps what is there."),
    Option("scale", str, QUESTION, "Sizes of what is measured; small is for a CPU.", default="full",
           choices=("full", "small")),
    Option("predictions", bool, STORED, "Show forecasts beside what was measured afterwards."),
    # What becomes of the answer.
    Option("only", str, OUTPUT, "Show the tables whose title contains this; `findings` for the sentences alone.",
           Presentation),
    Option("only", str, OUTPUT, "Only these tables, by their letters, as in d or b,e (default: all).", default=(),
           verbs=("study kernels",)),
    Option("brief", bool, OUTPUT, "At most ten lines: what matters, with its figures and remedies; with --json, too.",
           Presentation, False),
    Option("output", Path, OUTPUT, "The document to write: .md with its plots beside it, or .html.", metavar="FILE",
           short="-o", verbs=("writeup",)),
    Option("style", str, OUTPUT, f"{', '.join(STYLES)}; csv and jsonl with bare figures.", Presentation, "terminal",
           complete=completion.words(*STYLES)),
    Option("figures", Path, OUTPUT, "Keep the figures in this file, as they come; --from shows it.", metavar="FILE"),
    Option("cut", Path, OUTPUT,
           "Write what is asked for as a smaller trace of torch.profiler's format (.json, .json.gz).", metavar="FILE"),
    Option("perfetto", Path, OUTPUT, "Write a trace for Perfetto, with phases, families and counters as tracks.",
           metavar="FILE"),
    Option("output", Path, OUTPUT, "Write the page into this file (default: report.html in the run's folder, or "
           "NAME.report.html here).", metavar="FILE", short="-o", verbs=("report",)),
    Option("open_page", bool, OUTPUT, "Open the page in a browser.", default=False, spelled="--open"),
    Option("compare", bool, OUTPUT, "Two names are two sides: what changed, and how sure that is.", default=False,
           verbs=("report",)),
    Option("plots", Path, OUTPUT, "Also write each plot of the page into this folder.", metavar="DIR"),
    Option("plots_as", str, OUTPUT, "The form of those plots, svg unless it is said.", choices=("svg", "png")),
    Option("redact", bool, OUTPUT, "Leave out hosts, paths, arguments, lines of source and commands.", default=False),
    Option("save", Path, OUTPUT, "Draw a plot into this file: .svg, .png, .html or .json.", metavar="FILE"),
    Option("json", bool, OUTPUT, "JSON on stdout, and nothing else there.", Presentation, False),
)  # fmt: skip


def line_of(name: str, verb: str) -> Option | None:
    """The line of the table that holds for an option in a verb."""
    lines = [option for option in OPTIONS if option.name == name and (not option.verbs or verb in option.verbs)]
    return max(lines, key=lambda option: len(option.verbs) > 0, default=None)


def several(text: str, option: Option) -> tuple[Any, ...]:
    """What a comma-separated list says, each word once."""
    found = words(text, option.flag)
    try:
        return tuple(option.takes(word) if option.takes is not None else word for word in found)
    except ValueError:
        expected = "whole numbers, as in 128,256" if option.takes is int else "numbers, as in 1e-4,1e-3"
        raise InputError(f"cannot read {option.flag} {text!r}: write {expected}") from None
