"""Takes together what the ranks of a step measured; of a step of one process it changes nothing."""

import contextlib
from collections.abc import Iterable

import msgspec
from torch import Tensor

from stepscope.core.evidence import PhaseMemory
from stepscope.core.range_names import STEP
from stepscope.core.ranks import Communication, RankFigures, RanksEvidence, Span, steps_together
from stepscope.core.run_files import RANK_FOLDER
from stepscope.core.strategies import stages_of
from stepscope.engine.draft import Draft
from stepscope.recording.driven import step_traffic
from stepscope.recording.held_tensors import tensors_within
from stepscope.recording.local_part import local_part
from stepscope.recording.step import Step
from stepscope.recording.timer import Measurement
from stepscope.recording.traffic import whole_bytes
from stepscope.training.parallel.ranks import host_name


def take_steps_together(draft: Draft, result: Measurement) -> None:
    """Make the samples of the step those of all ranks, and keep what each measured."""
    if not draft.ranks.backend:
        return
    environment = draft.run.environment
    parameters, state = kept_bytes(draft.step)
    whole, trained = _of_the_model(draft)
    mine = RankFigures(
        rank=draft.ranks.rank, host=host_name(), device_name=environment.device_name if environment else "",
        samples=result.samples, parameter_bytes=parameters, optimizer_bytes=state,
    )  # fmt: skip
    found: list[tuple[bytes, tuple[Span, ...]]] = draft.ranks.gathered((msgspec.json.encode(mine), result.spans_ns))
    figures = tuple(msgspec.json.decode(one, type=RankFigures) for one, _ in found)
    shared = RanksEvidence(
        backend=draft.ranks.backend, ranks=figures, threads=draft.ranks.threads, start_s=draft.ranks.start_s,
        started_here=draft.ranks.started_here, correct=draft.correct, whole_parameter_bytes=whole,
        whole_gradient_bytes=trained,
    )  # fmt: skip
    together = steps_together([spans for _, spans in found], one_clock=shared.one_host)
    step = msgspec.structs.replace(result.samples[STEP], values_s=together)
    draft.set(samples={**result.samples, STEP: step}, shared=shared)


def _of_the_model(draft: Draft) -> tuple[int, int]:
    """The bytes of all parameters of the model, and of those that are trained. Each rank has whole ones, or parts of
    tensors that say how large the whole is; in a pipeline it has some, and a weight that two stages share is two."""
    mine = whole_bytes(draft.step.model.parameters())
    if stages_of(draft.run.workload.parallel, draft.ranks.ranks) == 1:
        return mine
    of_ranks: list[tuple[int, int]] = draft.ranks.gathered(mine)
    return sum(whole for whole, _ in of_ranks), sum(trained for _, trained in of_ranks)


def count_traffic(draft: Draft) -> None:
    """Count what this rank sends and receives in a step."""
    if not draft.ranks.backend:
        return
    if draft.run.workload.graph == "step":
        draft.note("no bytes of collectives: what CUDA graphs replay calls none that could be counted")
        return
    draft.begin("count communication")
    draft.traffic = step_traffic(draft.step, draft.timing)


def bring_the_ranks_together(draft: Draft) -> None:
    """Keep the memory of every rank, and name the files that each recorded."""
    if not draft.ranks.backend or draft.run.shared is None:
        return
    run = draft.run
    profile = run.evidence.profile
    communication = Communication(
        calls=draft.traffic,
        communication_s=profile.communication_s if profile else None,
        exposed_s=profile.exposed_s if profile else None,
        computation_s=profile.computation_s if profile else None,
    )
    found = draft.ranks.gathered((
        msgspec.json.encode(run.evidence.memory), msgspec.json.encode(communication), run.artifacts,
    ))  # fmt: skip
    figures: list[RankFigures] = []
    files: dict[str, str] = {}
    for known, (memory, sent, artifacts) in zip(draft.run.shared.ranks, found, strict=True):
        kept = msgspec.json.decode(memory, type=PhaseMemory | None)
        told = msgspec.json.decode(sent, type=Communication)
        figures.append(msgspec.structs.replace(known, memory=kept, artifacts=artifacts, communication=told))
        if known.rank:
            folder = RANK_FOLDER.format(rank=known.rank)
            files |= {f"{kind}-{folder}": f"{folder}/{file}" for kind, file in artifacts.items()}
    draft.set(shared=msgspec.structs.replace(draft.run.shared, ranks=tuple(figures)))
    draft.keep_files(**files)
    if not draft.saves:
        with contextlib.suppress(OSError):  # it recorded nothing of its own
            draft.directory.rmdir()


def kept_bytes(step: Step) -> tuple[int, int]:
    """What this rank keeps between steps: its parameters, and its optimizer's state, in bytes."""
    optimizer = step.optimizer
    if optimizer is None:
        return storage_bytes(step.model.parameters()), 0
    groups = (tensor for group in optimizer.param_groups for tensor in group["params"])
    state = (tensor for _, tensor in tensors_within(optimizer.state))
    return storage_bytes([*step.model.parameters(), *groups]), storage_bytes(state)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the tensors' storages, each once; of a sharded tensor those of this rank's part."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        local = local_part(tensor)
        storage = local.untyped_storage()
        if local.device.type != "meta" and storage.nbytes():
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
