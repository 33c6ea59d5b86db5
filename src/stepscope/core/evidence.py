"""What was observed of a step or of a watched loop beside its times: the evidence that `runs/checks` judges."""

from typing import Literal

import msgspec

from stepscope.core.attentions import Attention, check_attention
from stepscope.core.parts import PartFound
from stepscope.core.range_names import STEP
from stepscope.core.samples import Samples
from stepscope.core.units import counted, format_seconds

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

    @property
    def is_part_of_a_step(self) -> bool:
        """Whether most steps have it. The times of other steps are stored without it."""
        return 2 * self.steps >= self.of


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


# What was observed of a step beside its times: the evidence that `runs/checks` judges.
#
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

    @property
    def count(self) -> int:
        return self.frames + self.graphs + self.recordings + self.kernels + self.tunings


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


class LeftBehind(msgspec.Struct, frozen=True, kw_only=True):
    """Allocations of one line of code that are more at the end of each recorded step than at the end before."""

    site: str
    """The line of the user's code that allocated them."""
    category: str
    """What their bytes are there for, as `memory_notes.MemoryCategory` has it."""
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
    unmet: tuple[str, ...] = ()
    """What the config.json of the model asks for and the step does not do, a sentence each (core/model_file.py)."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.attention is not None:
            check_attention(self.attention)
