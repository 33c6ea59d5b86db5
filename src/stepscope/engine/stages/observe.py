"""Gathers evidence of what the timed steps did, from steps that run after them."""

import msgspec
import torch

from stepscope.core.evidence import Precision
from stepscope.core.work import Work
from stepscope.engine.draft import Draft
from stepscope.recording import ranges
from stepscope.recording.driven import observe_step, profile_step, step_flops, step_habits, step_operators
from stepscope.recording.precision import probe_relative_error, with_kernels


def observe(draft: Draft) -> None:
    """Probe the precision, run steps under hooks and the profiler, and keep the evidence."""
    draft.begin("observe")
    step, device = draft.step, draft.device
    precision = Precision(
        float32_matmul=torch.get_float32_matmul_precision(), probe_relative_error=probe_relative_error(device)
    )
    draft.set_evidence(precision=precision)
    observation, memory = observe_step(step, device, draft.held_before_bytes)
    draft.set_evidence(observation=observation, memory=memory)
    draft.set_evidence(operators=step_operators(step, device, draft.timing))
    if draft.run.textbook is None:
        draft.set_evidence(habits=step_habits(step, device))
    if step.cuda_graphs:
        draft.note("allocated peaks: tensors of replayed CUDA graphs count as reserved only")
    if not draft.request.settings.profile:
        return
    if ranges.watched() and device.type == "cuda":
        draft.note("no profile: CUDA lets one profiler in at a time, and a tool watches this process already")
        return
    draft.begin("profile")
    profile = profile_step(step, device, draft.timing, draft.ranks)
    draft.set_evidence(profile=profile, precision=with_kernels(precision, profile))


def count_work(draft: Draft) -> None:
    """Count the FLOPs of a step, where no formula of its sizes says them."""
    if draft.run.work:
        return
    if draft.step.cuda_graphs:
        draft.note("no FLOPs: what CUDA graphs replay calls no operators that could be counted")
        return
    draft.begin("count FLOPs")
    mine, unknown = step_flops(draft.step, draft.timing)
    of_ranks: list[bytes] = draft.ranks.gathered(msgspec.json.encode(mine)) if draft.ranks.backend else []
    work = msgspec.json.decode(of_ranks[0], type=dict[str, Work]) if of_ranks else mine
    for other in of_ranks[1:]:  # each has a part of the batch, and of nothing else
        for phase, more in msgspec.json.decode(other, type=dict[str, Work]).items():
            work[phase] = work[phase] + more if phase in work else more
    draft.set(work=work)
    draft.set_evidence(uncounted=unknown)
