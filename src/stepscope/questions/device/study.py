"""What does this device promise, and what does it reach?"""

from stepscope.core.device_spec import DeviceReport, find_device_spec
from stepscope.engine.request import Stage, Tell
from stepscope.recording.ceilings import ceilings_for, supported_dtypes
from stepscope.recording.device import resolve_device
from stepscope.recording.environment import read_environment


def study_device(name: str, again: bool, tell: Tell) -> DeviceReport:
    """The device's environment, datasheet and ceilings; measures (and stores) what is not stored, or all if `again`."""
    device = resolve_device(name)
    environment = read_environment(device)
    ceilings = ceilings_for(
        device, supported_dtypes(device), lambda what: tell(Stage(name="ceiling", detail=what)), again=again
    )
    spec = find_device_spec(environment.device_name)
    return DeviceReport(environment=environment, spec=spec, ceilings=ceilings)
