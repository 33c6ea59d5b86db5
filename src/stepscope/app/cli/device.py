"""`stepscope device`: what this device promises, and what it reaches."""

from pathlib import Path

from stepscope.app.cli.output import progress, stdout_kept_clean
from stepscope.app.cli.presentation import Presentation
from stepscope.app.cli.verb import verb
from stepscope.core.bounded_file import read_named
from stepscope.core.device_spec import DeviceReport
from stepscope.core.document import decode_document, json_document


@verb("device", "stepscope device", "stepscope device --from results/h200/device.json")
def device(*, device: str, again: bool, from_: Path | None, shown: Presentation) -> None:
    """Name the device, its datasheet peaks, and the ceilings measured on it (stored for later runs)."""
    report = _measure(device, again) if from_ is None else _load(from_)
    from stepscope.questions.device.answer import answer_device

    shown.show(answer_device(report), document=lambda: json_document(report))


def _measure(device: str, again: bool) -> DeviceReport:
    from stepscope.questions.device.study import study_device

    with stdout_kept_clean(), progress() as tell:
        return study_device(device, again, tell)


def _load(path: Path) -> DeviceReport:
    return decode_document(read_named(path), DeviceReport, str(path), holds="report of `stepscope device --json`")
