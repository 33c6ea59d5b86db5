"""What was observed of a step beside its times: the evidence that `analysis/checks` judges.

Evidence is stored with the run, so that a run can be judged again from disk, by later rules too.
"""

from typing import Literal

import msgspec

from stepscope.core.samples import Samples
from stepscope.core.workload import Attention

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
    """By total time, longest first; every distinct name, each cut to 240 characters."""
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


class PhaseMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the device over one untimed step. `allocated` is live tensors, `reserved` what the allocator holds.

    None where nobody counted (a CPU, unless a memory history was taken; tensors inside replayed CUDA graphs) or the
    phase did not run. Of phases that a step has several times (micro-batches), the largest figure.
    """

    parameter_bytes: int
    after_parameters: int | None = None
    """Allocated when the model, its optimizer state and the batch are in place, before the step."""
    requested_before: int | None = None
    """The same without the allocator's rounding and remainders: what the tensors asked for."""
    resident_expected: int | None = None
    """The same by arithmetic: parameters, buffers, optimizer state, batches, and what the process held before."""
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
    attention: Attention | None = None
    """What `auto` picked; None where the workload names its attention."""
    captures: tuple[Capture, ...] = ()
    """One for each profiler that took a trace, or should have."""
    notes: tuple[str, ...] = ()
