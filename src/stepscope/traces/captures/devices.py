"""The devices that a capture is of. A trace lists all of a host's, though only some of them ran anything."""

from stepscope.traces.captures.attribution import Attribution


def used_devices(attribution: Attribution) -> dict[int, str]:
    """The name, by index, of each device that ran something: "" where the trace does not say it. None on a CPU.

    ROCm numbers devices among all of the host's in its events, and among the visible ones in its list. Where all that
    are listed have one name, a device that is not listed has it too.
    """
    table = attribution.table
    if table.on_cpu:
        return {}
    listed = set(table.devices.values())
    common = listed.pop() if len(listed) == 1 else ""
    return {index: table.devices.get(index, common) for index in attribution.work["device"].unique().sort().to_list()}


def device_names(attribution: Attribution) -> tuple[str, ...]:
    """The distinct names of those devices; none where the trace leaves one of them unnamed."""
    names = used_devices(attribution).values()
    return tuple(sorted(set(names))) if all(names) else ()
