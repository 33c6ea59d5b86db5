"""What was observed of a step beside its times: the evidence that `runs/checks` judges, and what a snapshot notes."""

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from stepscope.core.parts import ATTENTIONS, Attention, PartFound, choose_name
from stepscope.core.range_names import STEP
from stepscope.core.samples import Samples
from stepscope.core.units import counted, format_seconds
from stepscope.core.workloads import Workload

# What was taken for a step of a loop that is not ours, and what its steps evaluate.


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of modules with gradients off in timed steps: an evaluation now and then, or a teacher in each."""

    modules: tuple[str, ...]
    """Their classes."""
    where: str
    """The user's line of the first such call; empty where it is not known."""
    steps: int
    """Timed steps that have such calls."""
    of: int
    """All timed steps."""
    median_s: float
    """What they take in such a step, with what lies between two of them."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of `torch.save` in timed steps, which write a checkpoint now and then."""

    where: str
    """The user's line of the first one; empty where it is not known."""
    steps: int
    """Timed steps that save."""
    of: int
    """All timed steps."""
    median_s: float
    """What saving takes in such a step. On a GPU it waits for what was launched before."""

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        verb = "saves" if self.steps == 1 else "save"
        took = format_seconds(self.median_s)
        return f"{counted(self.steps, 'step')} of {self.of} {verb} for {took} (torch.save{where})"


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the user's code, as it was while the loop ran."""

    path: str
    """From the run's directory."""
    digest: str
    """SHA-256 of its bytes."""


class WatchedLoop(msgspec.Struct, frozen=True, kw_only=True):
    """What was taken for a step of a loop that is not ours, and which of its steps were timed."""

    why: str
    """What decided it, in words."""
    modules: tuple[str, ...]
    """Classes of the modules whose calls are forward."""
    optimizers: tuple[str, ...] = ()
    """Classes of the optimizers; the first one's step ends a step. Empty where the loop says where a step ends."""
    forwards: int = 0
    """Calls of these modules in the step that was looked at."""
    backwards: int = 0
    evaluations: int = 0
    """Times that the optimizer's step evaluated its closure, which runs forward and backward."""
    autocast: str | None = None
    """The dtype of autocast in forward; None where it was off."""
    parameter_dtype: str = ""
    """The dtype of most parameters."""
    first_step: int | None = None
    """The number of the first timed step in its loop, from 0; None where none was timed."""
    timed_steps: tuple[tuple[int, int], ...] = ()
    """The first and the last number of each span of timed steps; other steps between them were recorded. Empty in runs
    from before there were several."""
    backwards_between: tuple[int, int] | None = None
    """The fewest and the most backwards in a timed step; None where none was timed, and in runs from before it was
    counted."""
    ended_by: str | None = None
    """The exception that ended the loop after its timed steps, in a line. The times are whole all the same."""
    module_forwards: tuple[int, ...] = ()
    """Calls of each of `modules` in the step that was looked at; this and what follows is not in earlier runs."""
    optimizer_models: tuple[str, ...] = ()
    """The models that each of `optimizers` updates, by their classes."""
    optimizer_steps: tuple[int, ...] = ()
    """How often each of `optimizers` steps in a step of the loop."""
    in_backward: int = 0
    """Optimizers that step inside backward, whose end then ends a step."""
    forwards_between: tuple[int, int] | None = None
    """The fewest and the most forwards in a timed step."""
    forwards_mean: float | None = None
    """The mean of them, where they vary: more than a tenth of the timed steps ran others than most."""
    trainable: int | None = None
    """Numbers in the model's parameters that train: an optimizer holds them, and they require a gradient."""
    evaluated: Evaluated | None = None
    """Calls with gradients off; None where no timed step has any."""
    tokens: int | None = None
    """Token ids that the forwards of a step took, where their batches differ in length; None where they do not."""
    saved: Saved | None = None
    """What the timed steps save; None where none does, and in runs from before it was looked at."""
    library: str = ""
    """The library whose code runs the steps: transformers, lightning, accelerate or torchtitan; empty for a loop of the
    user's own."""
    sources: tuple[SourceFile, ...] = ()
    """The script, and the modules beside it that it had imported."""


# Evidence is stored with the run, so that a run can be judged again from disk, by later rules too.

ProcessStart = Literal["exec", "fork"]
"""How a process came to be: as a Python of its own, or forked from one that had imported PyTorch."""
TraceTool = Literal["kineto", "nsys"]
TRACE_TOOLS: tuple[TraceTool, ...] = ("kineto", "nsys")


class KernelTotal(msgspec.Struct, frozen=True, kw_only=True):
    """All launches of one kernel in the profiled step."""

    name: str
    calls: int
    total_s: float


class ProfiledStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step under the profiler, run after the timed ones."""

    step_s: float
    kernel_launches: int
    busy_s: float
    """Union of the kernels' intervals on the device."""
    kernels: tuple[KernelTotal, ...]
    """Every kernel by name, longest total time first; names are cut to 240 characters."""
    attention_operators: tuple[str, ...] = ()
    """The fused attention operators that ran; empty when attention is written out."""
    communication_s: float | None = None
    """Of a step that ranks share: how long collectives were under way, those at once counted once."""
    exposed_s: float | None = None
    """The part of it in which nothing was computed."""
    computation_s: float | None = None
    """How long anything but communication was computed."""


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """What precision the matrix products had, by three witnesses: the setting, an experiment, the kernels' names."""

    float32_matmul: str
    """torch.get_float32_matmul_precision() during the step."""
    probe_relative_error: float
    """Error of one fp32 matrix product on this device against float64: about 1e-7 in fp32, 3e-4 in TF32."""
    tf32_kernels: tuple[str, ...] = ()
    fp32_kernels: tuple[str, ...] = ()
    """Matrix products whose names say that they ran in true fp32."""


class StepObservation(msgspec.Struct, frozen=True, kw_only=True):
    """What hooks saw during one untimed step."""

    model_forwards: dict[str, int]
    """How often the model's forward began in each phase."""
    autocast_outside: bool
    """Whether autocast was already on when the step began."""
    autocast_in_backward: bool | None
    autocast_in_optimizer: bool | None
    distinct_tokens: int | None
    """Distinct token ids in the batch that has the fewest; of a model that reads no tokens, distinct numbers. None
    where the model reads no tensor."""
    distinct_batches: int | None
    """Different batches among those that the steps rotate through; None where they hold no tensor."""
    graphs_alive_before: bool | None
    """Whether tensors saved by an earlier step were still alive when this one began; None where not observed."""
    product_dtypes: tuple[str, ...] | None = None
    """dtypes of the operands of the forward pass's matrix products; None where not observed (compiled)."""
    forward_tokens: int | None = None
    """Tokens that went through the model's forward in this step. None where the model reads no tokens; and, as the four
    below, in runs from before it was counted."""
    covers_batch: bool | None = None
    """Whether the forwards together took the step's batch: every sequence once, in order. None where the model reads no
    tensor."""
    backward_passes: int | None = None
    """How often a backward reached the loss."""
    optimizer_steps: int | None = None
    """How often the optimizer's step ran. A gradient scaler may skip it."""
    blocks_again: int | None = None
    """Blocks of the model whose forward ran in backward, as checkpointing does it; None also where it cannot be seen
    (compiled)."""


class PhaseMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the device over one untimed step. `allocated` is live tensors, `reserved` what the allocator holds.

    None where nobody counted (a CPU, unless a memory history was taken; tensors inside replayed CUDA graphs) or the
    phase did not run. Of phases that a step has several times (micro-batches), the largest figure.
    """

    parameter_bytes: int
    after_parameters: int | None = None
    """Allocated when the model, its optimizer state and the batch are in place, before the step."""
    requested_before: int | None = None
    """Bytes that tensors had requested before the step: `after_parameters` without the allocator's rounding."""
    resident_expected: int | None = None
    """Bytes that should be allocated then: parameters, buffers, optimizer state, batches, and what was held before."""
    forward_peak: int | None = None
    saved_for_backward: int | None = None
    """Allocated when forward has ended, over what was allocated before it. On a CPU without a memory history: the saved
    tensors, summed. Where forward and backward take turns, the most that was kept at a time."""
    turns_peak: int | None = None
    """While forward and backward take turns, as in a pipeline, where neither has a peak of its own."""
    backward_peak: int | None = None
    gradient_bytes: int | None = None
    """The gradients on the parameters when backward has ended, as tensors."""
    optimizer_peak: int | None = None
    reserved_before: int | None = None
    reserved_peak: int | None = None
    outside_allocator: int | None = None
    """What the process holds on the GPU beyond what the allocator reserved: the driver's context, the libraries' code.
    None where other processes share the GPU, since the driver counts all together."""

    @property
    def allocated_peak(self) -> int | None:
        peaks = [
            p for p in (self.forward_peak, self.turns_peak, self.backward_peak, self.optimizer_peak) if p is not None
        ]
        return max(peaks, default=None)


class CompileReport(msgspec.Struct, frozen=True, kw_only=True):
    """What torch.compile did, from dynamo's own counters."""

    frames_total: int
    frames_compiled: int
    graphs: int
    graph_breaks: int
    graph_break_reasons: tuple[str, ...] = ()
    recompiles: int
    recompile_reasons: tuple[str, ...] = ()
    """The guards that failed, each once; empty where dynamo keeps none."""
    limit_hit: bool
    compile_s: float | None = None
    """Time dynamo and the backend spent compiling, as dynamo reports it."""
    cached_graphs: int | None = None
    """Graphs whose code came from torch's caches on disk: `compile_s` is then not that of compiling. None in runs from
    before this was counted."""
    options: dict[str, bool | int | str | None] | None = None
    """What sets the modes apart, as the compiled callable itself says it was made. None in runs from before this was
    read, and where it does not say."""
    parts_compiled: int | None = None
    """Modules in the model that were compiled by themselves. None in runs from before this was counted."""
    graphs_recorded: int | None = None
    """CUDA graphs that inductor recorded. None in runs from before this was counted."""


class MeasuredCompilation(msgspec.Struct, frozen=True, kw_only=True):
    """What this process compiled while the measured steps ran. Nothing, in a sound run."""

    frames: int = 0
    """Python frames that dynamo compiled, or tried to: for the first time, or again."""
    graphs: int = 0
    """Graphs that a backend made code of. That of backward is made when the first backward runs."""
    recordings: int = 0
    """CUDA graphs that inductor recorded."""
    kernels: int = 0
    """Kernels that Triton compiled, or loaded from its cache on disk."""
    tunings: int = 0
    """Kernels of inductor whose configurations were timed one against the other."""
    compile_s: float = 0.0
    """How long dynamo and its backend took, as dynamo reports it."""

    def __add__(self, other: "MeasuredCompilation") -> "MeasuredCompilation":
        return MeasuredCompilation(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )


class Updates(msgspec.Struct, frozen=True, kw_only=True):
    """What the optimizer did in the measured steps, by its own count."""

    steps: int
    """Measured steps."""
    applied: int
    """Updates of the parameter that got fewest. A gradient scaler skips those of steps whose gradients overflowed."""
    loss_scale: float | None = None
    """The scale of the loss after the measured steps; None where it is not scaled."""
    parameters_finite: bool | None = None
    """Whether every parameter was finite after the measured steps."""
    gradient_norm: float | None = None
    """The global norm of the last measured step's gradients, before they were clipped; None where they were not."""

    @property
    def skipped(self) -> int:
        return max(0, self.steps - self.applied)


class StepOperators(msgspec.Struct, frozen=True, kw_only=True):
    """The operators that one untimed step called on the host, by phase and name. Kernels inside a replayed CUDA graph
    have none."""

    calls: dict[str, dict[str, int]]
    """Phase -> operator -> calls. Those of autograd's engine count to the phase that they ran in."""


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that ran under a profiler, after the timed ones, and what became of its trace."""

    tool: str
    """kineto (torch.profiler) or nsys (Nsight Systems); nvtx for an NVTX tool that the user started."""
    tool_version: str
    samples: dict[str, Samples] = {}
    """Times of the traced steps, measured and named as those of the run."""
    artifact: str | None = None
    """Kind of the trace among the run's artifacts; None where another program keeps it, or there is none."""
    failure: str | None = None
    """Why there is no trace that can be read, in one line."""

    @property
    def steps(self) -> int:
        return self.samples[STEP].count if STEP in self.samples else 0

    @property
    def step_s(self) -> float | None:
        """Median time of a traced step, by the host's clock round a synchronised region."""
        return self.samples[STEP].median_s if STEP in self.samples else None


class CodeLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the user's code, and what it calls."""

    where: str
    """File and line; of a library that the user's line calls, the library's, with the user's in brackets."""
    call: str
    calls: int
    """How often, in the step in which it was called least."""


class Energy(msgspec.Struct, frozen=True, kw_only=True):
    """Energy that a whole device took while steps ran one after the other, by the device's own counter."""

    energy_j: float
    steps: int
    duration_s: float
    """Time between the two readings of the counter."""
    of: Literal["gpu", "cpu-packages"]
    """Whose counter: that of the whole GPU, or those of the processor's packages, without memory."""
    are_samples: bool
    """Whether the steps are the measured ones. Where those were too short, others ran after them."""


class Unchanged(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that got gradients, while their optimizer updated them, and that hold the same numbers as before."""

    count: int
    parameters: int
    """All that were compared."""
    names: tuple[str, ...]
    """The first few."""
    at_rate_zero: int = 0
    """How many of them are in a group whose learning rate is 0."""
    held: bool = True
    """Whether an optimizer holds any of them."""
    dtypes: tuple[str, ...] = ()


class RestLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the loop in which a share of the rest of its steps passes."""

    where: str
    call: str
    """The function that it calls there; empty where that is none of Python's."""
    share: float


class Habits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What each of a few steps did that costs time or memory, or leaves something untrained. None: not observed."""

    steps: int
    """Steps that were looked at, after the timed ones."""
    host_reads: tuple[CodeLine, ...] | None = None
    """Lines at which every step makes the host wait for what the device computes. On a CPU, those that would."""
    zeroed_gradients: int = 0
    """Gradients that were tensors of zeros when a step's first backward began."""
    zeroed_bytes: int = 0
    without_gradient: tuple[str, ...] = ()
    """Parameters that require a gradient and had none in any step when the optimizer stepped; the first few."""
    without_gradient_count: int = 0
    gradients_hold_zeros: bool = False
    """Whether those are all parameters, whose gradients hold nothing but zeros at the update."""
    graphs_alive: int | None = None
    """Earlier steps whose graph was still alive when the last step had ended; two are looked at."""
    in_eval_mode: tuple[str, ...] = ()
    """Dropouts and batch norms, among modules that train, in eval mode when backward began; the first few."""
    in_eval_mode_count: int = 0
    unchanged: Unchanged | None = None
    """Parameters that get gradients and do not change; None also where no update was seen."""
    half_products: str | None = None
    """The dtype of 16 bits of most matrix products in forward."""
    fp32_products: tuple[str, ...] = ()
    """Modules whose matrix products in forward took operands of 32 bits; the first few."""
    fp32_share: float | None = None
    """Share of these products in the FLOPs of forward."""
    unpinned: tuple[CodeLine, ...] | None = None
    """Lines at which every step copies to the GPU from memory that is not pinned. None also on a CPU."""
    micro_batches: int | None = None
    """Micro-batches of a step of DistributedDataParallel."""
    synchronised: int = 0
    """Micro-batches before the last whose backward synchronises gradients over the ranks."""
    optimizer_tensors: int = 0
    """Tensors that the optimizer updates."""
    optimizer_operators: int | None = None
    """Operators that it calls in a step. None also where one of them takes many tensors."""
    optimizer_loops: bool = False
    """Whether foreach=False makes it go over its tensors one after another."""
    input_shapes: tuple[str, ...] = ()
    """Shapes of the first input whose shape changed from call to call of the model, in their order, each once."""
    forwards: int = 0
    """Calls of the model whose inputs were looked at."""
    products_s: float | None = None
    """Seconds that a step's products and attentions take in forward and backward. None on a GPU, where the host only
    launches them."""
    operators_s: float | None = None
    """Seconds that all operators take there."""
    again_flops: int = 0
    """FLOPs of a step's products that checkpointing runs again in backward."""
    again_bytes: int = 0
    """Bytes of all tensors that it makes again: a step without it keeps at most so many more."""
    free_bytes: int | None = None
    """Bytes of memory that were free beside what the process had taken, where something runs again."""
    rest_lines: tuple[RestLine, ...] = ()
    """The lines of a watched loop in which most of the rest of its steps passes, the longest first."""


class LeftBehind(msgspec.Struct, frozen=True, kw_only=True):
    """Allocations of one line of code that are more at the end of each recorded step than at the end before."""

    site: str
    """The line of the user's code that allocated them."""
    category: str
    """What their bytes are there for, as `MemoryCategory` has it."""
    bytes_a_step: int
    tensors_a_step: float
    """How many more there are after a step; 0 where one tensor grows."""
    shape: tuple[int, ...] | None = None
    """The shape of the largest; None where it is not known."""
    dtype: str = ""
    name: str = ""
    module: str = ""
    other_kinds: int = 0
    """Kinds of tensors beside the largest: each another category, shape or dtype."""
    other_categories: tuple[str, ...] = ()
    kept_by: str = ""
    """What holds them, as in `losses[...] in main()`, or the graph of such a thing; empty where it cannot be told."""


class MemoryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """What several steps that were recorded one after the other left behind."""

    ends: tuple[int, ...]
    """Bytes allocated before the first recorded step, and at the end of each."""
    left: tuple[LeftBehind, ...] = ()
    """What grew in each step, the largest first."""
    collected_bytes: int = 0
    """Bytes that Python's garbage collector freed after the last step: objects in circles held them."""

    @property
    def bytes_a_step(self) -> int:
        """Bytes by which memory grew in a step."""
        return sum(left.bytes_a_step for left in self.left)


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Everything observed beside the times. A part that could not be observed is None, with the reason in `notes`."""

    precision: Precision | None = None
    observation: StepObservation | None = None
    memory: PhaseMemory | None = None
    profile: ProfiledStep | None = None
    compilation: CompileReport | None = None
    compiled_while_measured: MeasuredCompilation | None = None
    updates: Updates | None = None
    """How many updates the optimizer made; None without an optimizer phase, or where the optimizer keeps no count."""
    operators: StepOperators | None = None
    uncounted: dict[str, int] = {}
    """Calls of operators and kernels whose FLOPs no formula gives, by name: the run's work is what is there at least.
    Looked for where the model is not ours."""
    energy: Energy | None = None
    """None without a counter that is this device's alone, or where the steps were too short for it."""
    attention: Attention | None = None
    """What `auto` picked; None where the workload names its attention."""
    parts: tuple[PartFound, ...] = ()
    """Which modules of a user's model other kernels compute, and which were left; empty where none were asked for."""
    absent: tuple[str, ...] = ()
    """Fields of the workload that choose what a user's model does not have: a change of them replaces nothing."""
    captures: tuple[Capture, ...] = ()
    """A record for each profiler that was asked for a trace, also where it failed."""
    loop: WatchedLoop | None = None
    """What a step is in a loop that was watched; None for a step of ours."""
    habits: Habits | None = None
    """What the steps of a user's model or loop do beside what was asked for."""
    growth: MemoryGrowth | None = None
    """What recorded steps left behind; None where fewer than three were recorded."""
    process_start: ProcessStart | None = None
    """How a cell's process came to be. Forked ones share their addresses and hash seed. None where it is no cell's."""
    stages_s: dict[str, float] = {}
    """Seconds in each stage of the run, as displays name it: `measure` are the timed steps. Empty of a watched loop."""
    unmet: tuple[str, ...] = ()
    """What the config.json of the model asks for and the step does not do, a sentence each (core/user_model.py)."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.attention is not None:
            choose_name(self.attention, ATTENTIONS, "attention")


# What the ranks of one step measured: a step that several processes take part in is over when the last of them is.
#
# Each rank times its own steps between two barriers that are not timed. On one host all processes share the monotonic
# clock, so a step lasts from the earliest start to the latest end; on several hosts, whose clocks differ, it lasts as
# long as the longest of its ranks.


Span = tuple[int, int]
"""When a step began and ended on one rank, in nanoseconds of its host's monotonic clock."""


class CollectiveCalls(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's calls of one kind of collective in one phase of a step."""

    phase: str
    kind: str
    """As core/formulas/communication.py names it."""
    ranks: int
    """How many take part."""
    calls: int
    message_bytes: int
    """The bytes of the messages of all calls together."""
    sent_bytes: int
    """What has to leave this rank, whatever algorithm the backend chooses."""
    received_bytes: int


class Communication(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank communicates in a step: counted in one untimed step, and timed in another under the profiler."""

    calls: tuple[CollectiveCalls, ...] | None = None
    """None where they were not counted."""
    communication_s: float | None = None
    """How long any collective was under way in the profiled step; waiting for other ranks is part of it."""
    exposed_s: float | None = None
    """The part in which this rank computed nothing."""
    computation_s: float | None = None
    """How long this rank computed in the profiled step."""

    @property
    def sent_bytes(self) -> int | None:
        """What the rank sends in a step."""
        return None if self.calls is None else sum(call.sent_bytes for call in self.calls)

    @property
    def received_bytes(self) -> int | None:
        """What the rank receives in a step."""
        return None if self.calls is None else sum(call.received_bytes for call in self.calls)


class RankFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured of the steps that all took part in."""

    rank: int
    host: str
    device_name: str
    samples: dict[str, Samples] = {}
    """The rank's own times: of its step, its host and its phases."""
    memory: PhaseMemory | None = None
    parameter_bytes: int = 0
    """What the rank keeps of the parameters between steps."""
    gradient_bytes: int | None = None
    optimizer_bytes: int | None = None
    artifacts: dict[str, str] = {}
    """Files of the rank beside run.json, by kind."""
    communication: Communication | None = None
    """None in runs from before it was counted."""


class Correctness(msgspec.Struct, frozen=True, kw_only=True):
    """How far the ranks are from one process on the same global batch, as a share, and how far they may be.

    Of each, the parameter that is furthest counts. The spread is that of one process over its own ways to split the
    batch (training/parallel/correctness.py).
    """

    gradient_error: float
    gradient_spread: float
    gradient_allowed: float
    update_error: float
    """The error of the parameters after the steps."""
    update_spread: float
    update_allowed: float
    worst: str
    """The parameter that is furthest off, or the step whose loss is."""
    steps: int
    """Steps of plain SGD, and as many of AdamW for the losses."""
    layers: int | None = None
    """The layers of the model that was held against one process; None where it had all of them."""
    vocabulary: int | None = None
    """Its vocabulary; None where it was the whole."""
    seq_len: int | None = None
    """The tokens of its sequences; None where they were whole."""
    batch_size: int | None = None
    """The sequences of all ranks together; None where the whole batch was taken."""
    loss_error: float | None = None
    """The error of the losses of AdamW's steps; None in runs from before they were compared."""
    loss_spread: float | None = None
    loss_allowed: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the ranks compute what one process does."""
        right = self.gradient_error <= self.gradient_allowed and self.update_error <= self.update_allowed
        losses = self.loss_error is None or self.loss_allowed is None or self.loss_error <= self.loss_allowed
        return right and losses


class RanksEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one step, in their order."""

    backend: str
    """gloo or nccl."""
    ranks: tuple[RankFigures, ...]
    threads: int | None = None
    """CPU threads of each rank, where the ranks compute on CPUs."""
    started_here: bool = True
    """Whether stepscope started the ranks; false inside a torchrun or srun of the user's."""
    correct: Correctness | None = None
    """That they compute what one process does; None where nobody looked, which the run's notes say."""
    start_s: float | None = None
    """From the start of the ranks' processes until all had met."""
    whole_parameter_bytes: int | None = None
    """The bytes of the parameters of all ranks, each counted once; None where no rank has them all, and in older
    runs."""
    whole_gradient_bytes: int | None = None
    """The bytes of the gradients of the parameters that are trained, counted likewise."""

    @property
    def one_host(self) -> bool:
        """Whether all ranks share a clock."""
        return len({figures.host for figures in self.ranks}) == 1


def steps_together(spans: Sequence[Sequence[Span]], *, one_clock: bool) -> tuple[float, ...]:
    """The seconds of each step that all ranks ended, of the spans of each rank's steps.

    Raises ValueError without a rank.
    """
    if not spans:
        raise ValueError("a step has at least one rank")
    count = min(map(len, spans))  # a rank that was interrupted lacks the last ones
    together: list[float] = []
    for step in range(count):
        of_ranks = [spans_of_rank[step] for spans_of_rank in spans]
        if one_clock:
            lasted_ns = max(end for _, end in of_ranks) - min(begin for begin, _ in of_ranks)
        else:
            lasted_ns = max(end - begin for begin, end in of_ranks)
        together.append(lasted_ns * 1e-9)
    return tuple(together)


# What stepscope writes into a memory snapshot beside PyTorch's own keys, and the categories of memory.
#
# A snapshot knows addresses, sizes and stacks. Only the process that took it knows which address was which tensor;
# these notes carry that over, as plain data under the key `stepscope` of the pickled dict.


NOTES_KEY = "stepscope"
"""Key of the notes in the snapshot's dict."""

SEGMENTS_BEFORE_KEY = "segments_before"
"""Key of the allocator's segments (PyTorch's own form) at the moment when the history begins: with them every block's
true size is known, the rounding and the remainders that were not split off included."""

# 1  2026-11  first
NOTES_VERSION = 1

MemoryCategory = Literal[
    "parameters",
    "frozen quantised weights",
    "gradients",
    "optimizer state",
    "saved for backward",
    "cast copies",
    "inputs",
    "temporaries",
    "workspaces",
    "there before",
    "rounding",
]
"""What a byte on the device is there for. parameters: and buffers. frozen quantised weights: those of 4 or 8 bits that
no gradient reaches, with their scales, as the base of QLoRA. saved for backward: activations that autograd keeps. cast
copies: 16-bit copies of parameters that autocast keeps until it ends. inputs: the batches. temporaries: everything that
a phase allocates and frees again, and what a loop keeps beside. workspaces: what libraries hold, and what nothing else
explains. there before: what lived before the history of a snapshot without notes, where nothing tells what it was.
rounding: what the allocator gives beyond what was asked (to 512 bytes, and remainders too small to split off)."""

CATEGORIES: tuple[MemoryCategory, ...] = get_args(MemoryCategory)


class TensorNote(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that was at an address at a moment."""

    address: int
    """The address of the tensor's storage."""
    at_us: int
    """The moment, on the clock of the events: an allocation that is live then at this address is this tensor."""
    bytes: int
    """Bytes of the tensor's storage."""
    category: MemoryCategory
    name: str
    """The name of the parameter, `blocks.3.attention.query.weight`, also for its gradient, copies and optimizer state;
    for a saved tensor, what the operator calls it: `self`, `result`."""
    shape: tuple[int, ...]
    dtype: str
    operator: str = ""
    """For a saved tensor, the operator that saved it, as autograd names it: `Mul`, `Exp`."""
    module: str = ""
    """Path of the module whose forward made it."""


class KeptTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that recorded steps made and that was alive when they were over, and what held it."""

    address: int
    """The address of the tensor's storage."""
    kept_by: str
    """A path from a name to the tensor, as in `losses[...] in main()`, or whose graph it is in."""


class PhaseSpan(msgspec.Struct, frozen=True, kw_only=True):
    """When a phase ran, on the clock of the events."""

    name: str
    start_us: int
    end_us: int


class MemoryNotes(msgspec.Struct, frozen=True, kw_only=True):
    """What the process knew when it took the snapshot."""

    version: int = NOTES_VERSION
    workload: Workload | None = None
    device_name: str = ""
    measured: PhaseMemory | None = None
    """The allocator's own counters over the same step."""
    phases: tuple[PhaseSpan, ...] = ()
    tensors: tuple[TensorNote, ...] = ()
    step_ends_us: tuple[int, ...] = ()
    """When each of several recorded steps ended; empty where one was recorded."""
    kept: tuple[KeptTensor, ...] = ()
    """What held the tensors of these steps when the last one was over."""
