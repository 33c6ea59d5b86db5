"""Reads the environment and the device's datasheet, and counts the work of the step."""

import msgspec

from stepscope.core.device_spec import find_device_spec, overridden_spec
from stepscope.core.own_workload import OwnWorkload
from stepscope.core.work.transformer import known_work
from stepscope.engine.draft import Draft
from stepscope.recording.environment import read_environment


def look_round(draft: Draft) -> None:
    """Fill in what is known before anything runs, and write the run for the first time."""
    request = draft.request
    own_code = isinstance(request.workload, OwnWorkload)
    environment = read_environment(draft.device, request.memory_limit_bytes, own_code=own_code)
    environment = msgspec.structs.replace(environment, node=request.node)
    name, stated = environment.device_name, request.peak_flops_per_s
    spec = overridden_spec(name, request.workload.dtype, stated) if stated else find_device_spec(name)
    draft.set(environment=environment, device_spec=spec, work=known_work(request.workload))
    draft.save(rescue=False)
