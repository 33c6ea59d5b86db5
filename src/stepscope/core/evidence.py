"""What was observed of a step beside its times: the evidence that `analysis/runs/checks` judges.

Evidence is stored with the run, so that a run can be judged again from disk, by later rules too.
"""

from typing import Literal

import msgspec

from stepscope.core.attentions import Attention, check_attention
from stepscope.core.samples import Samples

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
    distinct_tokens: int
    """Distinct token ids in the batch that has the fewest."""
    distinct_batches: int
    """Different batches among those that the steps rotate through."""
    graphs_alive_before: bool | None
    """Whether tensors saved by an earlier step were still alive when this one began; None where not observed."""
    product_dtypes: tuple[str, ...] | None = None
    """dtypes of the operands of the forward pass's matrix products; None where not observed (compiled)."""
    forward_tokens: int | None = None
    """Tokens that went through the model's forward in this step. None, as the four below, in runs from before it was
    counted."""
    covers_batch: bool | None = None
    """Whether the forwards together took the step's batch: every sequence once, in order."""
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
    tensors, summed."""
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
        peaks = [p for p in (self.forward_peak, self.backward_peak, self.optimizer_peak) if p is not None]
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
        return self.samples["step"].count if "step" in self.samples else 0

    @property
    def step_s(self) -> float | None:
        """Median time of a traced step, by the host's clock round a synchronised region."""
        return self.samples["step"].median_s if "step" in self.samples else None


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
    attention: Attention | None = None
    """What `auto` picked; None where the workload names its attention."""
    captures: tuple[Capture, ...] = ()
    """A record for each profiler that was asked for a trace, also where it failed."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.attention is not None:
            check_attention(self.attention)
