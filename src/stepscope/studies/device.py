"""What does this device promise, and what does it reach?"""

from stepscope.core.device_spec import DeviceReport, find_device_spec
from stepscope.engine.request import Stage, Tell
from stepscope.measure.ceilings import ceilings_for, measure_ceilings, store_ceilings, supported_dtypes
from stepscope.measure.device import resolve_device
from stepscope.measure.environment import read_environment


def study_device(name: str, again: bool, tell: Tell) -> DeviceReport:
    """The device's environment, datasheet and ceilings; measures (and stores) what is not stored, or all if `again`."""
    device = resolve_device(name)
    environment = read_environment(device)
    dtypes = supported_dtypes(device)

    def on_progress(what: str) -> None:
        tell(Stage(name="ceiling", detail=what))

    if again:
        ceilings = measure_ceilings(device, dtypes, on_progress)
        store_ceilings(ceilings)
    else:
        ceilings = ceilings_for(device, dtypes, on_progress)
    spec = find_device_spec(environment.device_name)
    return DeviceReport(environment=environment, spec=spec, ceilings=ceilings)
