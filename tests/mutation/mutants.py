"""Faults that the tests must see: one small change of the source each, and the tests that stand beside it.

An old text stands exactly once in its file (`tests/house/test_mutants.py` sees to it). Where a line changes, its mutant
changes with it: the fault is what matters, not the text.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault: `new` in place of `old` in a file below src/stepscope."""

    name: str
    file: str
    old: str
    new: str
    falsifies: str
    """What would be wrong, as a user of the tool would say it."""
    tests: tuple[str, ...]
    """Files below tests/, the likeliest to see it first; of a file whose other tests have time limits, single tests: a
    busy machine would be taken for a test that saw the fault."""


MUTANTS = (
    # Statistics and the timer.
    Mutant(
        name="median of an even number",
        file="core/samples.py",
        old="return ordered[half] if len(ordered) % 2 else",
        new="return ordered[half] if ordered else",
        falsifies="every median of an even number of steps is the upper of the middle two",
        tests=("core/test_samples.py",),
    ),
    Mutant(
        name="phases of one name overwrite each other",
        file="recording/timer.py",
        old="phases_s[name] = phases_s.get(name, 0.0) + self._device",
        new="phases_s[name] = self._device",
        falsifies="with accumulation, forward and backward are those of the last micro-batch",
        tests=("recording/test_timer.py",),
    ),
    Mutant(
        name="the step ends before its device",
        file="recording/timer.py",
        old="_issued_ns = self._clock.now_ns()\n        self._device.synchronize()\n",
        new="_issued_ns = self._clock.now_ns()\n",
        falsifies="a step on a GPU takes as long as its launches",
        tests=("recording/test_timer.py",),
    ),
    # Workloads, units, metrics.
    Mutant(
        name="later fields are left out of digests",
        file="core/files.py",
        old="if (value := getattr(record, field.name)) != field.default or field.name in first_fields",
        new="if (value := getattr(record, field.name)) is not None and field.name in first_fields",
        falsifies="cells that differ in accumulation or checkpointing are one experiment",
        tests=("core/test_workloads.py",),
    ),
    Mutant(
        name="GB is GiB",
        file="core/units.py",
        old='"gb": 10**9',
        new='"gb": GIB',
        falsifies="a limit of 80 GB is 7 % larger than asked for",
        tests=("core/test_units.py",),
    ),
    Mutant(
        name="tokens of a micro-batch",
        file="runs/metrics.py",
        old="return of_a_step / samples.median_s",
        new="return of_a_step / run.workload.accumulation / samples.median_s",
        falsifies="tokens per second fall with accumulation",
        tests=("runs/test_metrics.py", "rendering/test_tables.py"),
    ),
    Mutant(
        name="the peak of another dtype",
        file="runs/metrics.py",
        old="run.device_spec.peak_for(run.workload.dtype)",
        new='run.device_spec.peak_for("bf16")',
        falsifies="MFU of an fp32 step is against the peak of bf16",
        tests=("runs/test_metrics.py", "hostile/test_mistakes.py"),
    ),
    # FLOPs and bytes.
    Mutant(
        name="causal attention is the full square",
        file="core/formulas/transformer.py",
        old='workload.model.window) if causal == "half"',
        new='workload.model.window) if causal == ""',
        falsifies="MFU of causal attention is too high",
        tests=("core/formulas/test_work.py",),
    ),
    Mutant(
        name="backward is one forward",
        file="core/formulas/transformer.py",
        old="Work(flops=2 * forward, ",
        new="Work(flops=forward, ",
        falsifies="a step has two thirds of its model FLOPs",
        tests=("core/formulas/test_work.py",),
    ),
    Mutant(
        name="fused backward has four products",
        file="core/formulas/__init__.py",
        old="3 * sizes.head_dim + 2 * sizes.value_dim",
        new="2 * sizes.head_dim + 2 * sizes.value_dim",
        falsifies="rates of fused attention's backward are a fifth too low",
        tests=("core/formulas/test_operator_work.py",),
    ),
    Mutant(
        name="attention's flag is not read",
        file="core/formulas/operator_formulas.py",
        old="        if causal is not None:\n",
        new="        causal = None\n        if causal is not None:\n",
        falsifies="attention that is not causal runs at half its rate",
        tests=("core/formulas/test_operator_attention.py",),
    ),
    Mutant(
        name="only reads are bytes moved",
        file="core/formulas/__init__.py",
        old="return _sum(self.bytes_read, self.bytes_written)",
        new="return self.bytes_read",
        falsifies="operators bound by memory lie far below their roof",
        tests=("core/formulas/test_work.py", "traces/roofline/test_roofline.py"),
    ),
    # Captures.
    Mutant(
        name="launches joined without the process",
        file="traces/table.py",
        old="return_dtype=pl.Int64) * _FEW_IDS + one",
        new="return_dtype=pl.Int64) * 0 + one",
        falsifies="kernels of one rank are launched by another (row 12 of docs/measuring.md)",
        tests=("traces/captures/test_attribution.py",),
    ),
    Mutant(
        name="any thread's phase before one's own",
        file="traces/captures/attribution.py",
        old='pl.coalesce("own", "anywhere")',
        new='pl.coalesce("anywhere", "own")',
        falsifies="two threads in different phases take each other's kernels",
        tests=("traces/captures/test_attribution.py",),
    ),
    Mutant(
        name="the outermost operator makes the node",
        file="traces/captures/attribution.py",
        old='.agg(pl.col("forward_ns").max())',
        new='.agg(pl.col("forward_ns").min())',
        falsifies="backward work is given to another module",
        tests=("traces/captures/test_attribution.py",),
    ),
    Mutant(
        name="PyTorch's FlashAttention is unknown",
        file="traces/kernels/families.toml",
        old="'(?:^|::|_)(?:flash_(?:fwd|bwd)|fmha_|",
        new="'(?:^|::|_)(?:fmha_|",
        falsifies="fused attention is no attention",
        tests=("traces/kernels/test_families.py",),
    ),
    Mutant(
        name="fp32 on CUDA cores is TF32",
        file="traces/kernels/names.py",
        old='return decoded.input_dtype == "tf32"',
        new='return decoded.input_dtype in ("tf32", "fp32")',
        falsifies="a true fp32 step is reported as TF32",
        tests=("traces/kernels/test_kernel_names.py",),
    ),
    Mutant(
        name="gaps of one stream",
        file="traces/captures/occupation.py",
        old="            reached = ends.cum_max()\n",
        new="            reached = ends\n",
        falsifies="a device that works on another stream stands idle",
        tests=("traces/captures/test_occupation.py",),
    ),
    Mutant(
        name="the datasheet before what was measured",
        file="traces/roofline.py",
        old="rates |= measured",
        new="rates = measured | rates",
        falsifies="the roofline is against a rate that the device never reaches",
        tests=("traces/roofline/test_roofline.py",),
    ),
    # Memory.
    Mutant(
        name="large blocks are split to 512 bytes",
        file="allocations/prediction/caching_allocator.py",
        old="return SMALLEST if small else SMALL_REQUEST + 1",
        new="return SMALLEST",
        falsifies="a predicted peak is below the real one",
        tests=("allocations/prediction/test_allocator.py",),
    ),
    Mutant(
        name="no merging with what follows",
        file="allocations/replay.py",
        old="if address in free_to or end in free_from:",
        new="if address in free_to:",
        falsifies="a snapshot's history contradicts itself",
        tests=("allocations/test_replay.py",),
    ),
    Mutant(
        name="saved tensors of all micro-batches",
        file="recording/observe.py",
        old="        self._saved_storages.clear()  #",
        new="        #",
        falsifies="what accumulation saves for backward is that of the whole batch",
        tests=("training/test_training_step.py",),
    ),
    Mutant(
        name="parameters are saved for backward",
        file="recording/observe.py",
        old="if storage.data_ptr() not in self._owned:",
        new="if storage.data_ptr() not in ():",
        falsifies="memory that is there anyway counts as kept for backward",
        tests=("training/test_training_step.py",),
    ),
    # The model and its step.
    Mutant(
        name="rotary base",
        file="training/transformer.py",
        old="ROPE_BASE = 10_000.0",
        new="ROPE_BASE = 1_000.0",
        falsifies="the reference is no model of the Llama family",
        tests=("training/test_transformer.py",),
    ),
    Mutant(
        name="rotation the other way",
        file="training/transformer.py",
        old="torch.cat([-second, first], dim=-1)",
        new="torch.cat([second, -first], dim=-1)",
        falsifies="weights of other implementations do not fit",
        tests=("training/test_transformer.py",),
    ),
    Mutant(
        name="deviation of fresh weights",
        file="training/transformer.py",
        old="(2 / (module.in_features + module.out_features)) ** 0.5",
        new="(1 / module.in_features) ** 0.5",
        falsifies="training begins elsewhere than is documented",
        tests=("training/test_transformer.py",),
    ),
    Mutant(
        name="a norm's gradient before what is added to it",
        file="kernels/operators.py",
        old="if any(order[user] < order[added] for result in results for user in result.users):",
        new="if not results:",
        falsifies="a compiled graph reads what it has not made",
        tests=("kernels/parts/test_sums_in_norms.py",),
    ),
    Mutant(
        name="sums that stay in fp32",
        file="kernels/operators.py",
        old='stays = not isinstance(other, torch.fx.Node) or other.meta["val"].dtype == torch.float32',
        new="stays = True",
        falsifies="the bits of a compiled step",
        tests=("kernels/parts/test_sums_in_norms.py",),
    ),
    Mutant(
        name="gradients of keys and values where the layer has these the other way round",
        file="kernels/operators.py",
        old="if _same(steps, [each.shape[dim] * strides[dim] for each in values[:-1]]):",
        new="if strides[dim] == 1:",
        falsifies="what a compiled model learns",
        tests=("kernels/test_columns_as_rows.py",),
    ),
    Mutant(
        name="torch.compile's mode",
        file="training/training_step.py",
        old='torch.compile(parts.forward, mode=None if mode == "default" else mode)',
        new="torch.compile(parts.forward, mode=None)",
        falsifies="all modes of compilation are timed as the default one",
        tests=("training/test_training_step.py",),
    ),
    Mutant(
        name="gradients of the sum of micro-batches",
        file="training/training_step.py",
        old="share = self.loss / self.workload.accumulation if",
        new="share = self.loss if",
        falsifies="accumulation trains with another learning rate",
        tests=("training/test_training_step.py",),
    ),
    Mutant(
        name="one batch over and over",
        file="training/training_step.py",
        old="self._next_batch = (self._next_batch + 1) % len(self.batches)",
        new="self._next_batch = 0",
        falsifies="every step runs on data that the caches hold (row 19)",
        tests=("training/test_training_step.py", "hostile/test_mistakes.py"),
    ),
    Mutant(
        name="second moment's bias",
        file="training/half_optimizers.py",
        old='square.div_(1 - beta2 ** state["step"])',
        new="square.div_(1 - beta2)",
        falsifies="after its first step AdamW moves by a fraction",
        tests=("training/test_optimizer.py",),
    ),
    Mutant(
        name="weight decay",
        file="training/half_optimizers.py",
        old='parameter.mul_(1 - lr * group["weight_decay"])',
        new='parameter.mul_(1 - lr * lr * group["weight_decay"])',
        falsifies="AdamW is Adam",
        tests=("training/test_optimizer.py",),
    ),
    Mutant(
        name="epsilon under the root",
        file="training/half_optimizers.py",
        old='square.div_(1 - beta2 ** state["step"]).sqrt_().add_(group["eps"])',
        new='square.div_(1 - beta2 ** state["step"]).add_(group["eps"]).sqrt_()',
        falsifies="parameters with small gradients hardly move",
        tests=("training/test_optimizer.py",),
    ),
    # Precision.
    Mutant(
        name="a scale that remembers steps before it backed off",
        file="questions/scaling.py",
        old="            self.steps_since_change = 0\n            return\n",
        new="            return\n",
        falsifies="the loss scale grows too early after an overflow",
        tests=("questions/gradients/test_scaling.py",),
    ),
    Mutant(
        name="ties round up",
        file="core/float_formats.py",
        old="rounded = round(exact / unit) * unit",
        new="rounded = math.floor(exact / unit + Fraction(1, 2)) * unit",
        falsifies="rounding has a bias",
        tests=("questions/test_formats.py",),
    ),
    # What the device can do, and what it says.
    Mutant(
        name="the worst product is the ceiling",
        file="recording/ceilings.py",
        old="best = max(rates, key=",
        new="best = min(rates, key=",
        falsifies="MFU against the measured ceiling is too high",
        tests=("recording/test_ceilings.py",),
    ),
    Mutant(
        name="half the rate of a product",
        file="recording/ceilings.py",
        old="rate=work.flops / median_s",
        new="rate=work.flops / 2 / median_s",
        falsifies="MFU against the measured ceiling is twice what it is",
        tests=("recording/test_ceilings.py",),
    ),
    Mutant(
        name="NVML's power in watts",
        file="recording/nvml.py",
        old="power_w=None if power is None else power / 1000",
        new="power_w=power",
        falsifies="a GPU takes 345,678 W",
        tests=("recording/test_nvml.py",),
    ),
    Mutant(
        name="NVML's energy in joules",
        file="recording/nvml.py",
        old="None if energy is None else energy / 1000",
        new="energy",
        falsifies="a step takes a thousand times the energy",
        tests=("recording/test_nvml.py",),
    ),
    Mutant(
        name="NVML's violation time in microseconds",
        file="recording/nvml.py",
        old="status.violationTime * 1e-9",
        new="status.violationTime * 1e-6",
        falsifies="a power cap of a millisecond held the clocks down for a second",
        tests=("recording/test_nvml.py",),
    ),
    # Judgement, and what is on disk.
    Mutant(
        name="a timer may stop at half of the work",
        file="runs/checks/measurement.py",
        old="total > 1.05 * whole + 50e-6",
        new="total > 2.05 * whole + 50e-6",
        falsifies="a timer that did not wait for the device is believed (row 1)",
        tests=("hostile/test_mistakes.py",),
    ),
    Mutant(
        name="a sweep takes over the runs of another",
        file="engine/sweep.py",
        old="if run.sweep != self._plan.key or run.status in again:",
        new="if run.status in again:",
        falsifies="cells measured under another memory limit are this sweep's results",
        tests=("engine/test_sweep.py::test_the_run_of_another_sweep_is_no_result_of_this_one",),
    ),
    Mutant(
        name="a sweep takes over runs of other settings",
        file="engine/sweep.py",
        old="same = planned.settings == run.settings and planned",
        new="same = planned",
        falsifies="a cell of five steps stands for one of thirty",
        tests=("engine/test_sweep.py::test_settings_are_part_of_a_cell_that_is_taken_over",),
    ),
)
