"""What the capture of a stored run says, from the capture itself or from the digest that was kept of it."""

from collections.abc import Callable
from pathlib import Path

from stepscope.core.polars_memory import give_pages_back
from stepscope.core.run import Run
from stepscope.core.run_files import STREAM_FILE
from stepscope.traces.captures.checks import check_trace
from stepscope.traces.captures.digest import TraceDigest, digest_of, load_digest, save_digest
from stepscope.traces.captures.load import load_capture


def digest_beside(
    run: Run, directory: Path, tool: str, *, say: Callable[[str], None], keep: bool = False
) -> TraceDigest | None:
    """The digest of a run's capture, made anew if the capture is there, else the kept one, or None.

    say: is told what is left out. keep: whether a digest that was made is written beside the run.
    """
    capture = directory / run.artifacts.get(tool, "-")
    on_cpu = run.environment is None or run.environment.device_type == "cpu"
    if not capture.is_file():
        kept, stream = load_digest(directory, tool), directory / STREAM_FILE
        if kept is not None or tool != "nsys" or on_cpu or not stream.is_file():
            return kept
        capture = stream  # nsys recorded, and could not import there: its own importer reads the stream
    if tool == "nsys" and on_cpu:
        return None  # on a CPU Nsight Systems records ranges alone
    give_pages_back()
    summary = load_capture(capture, say=say)
    digest = digest_of(summary, check_trace(summary))
    if keep:
        save_digest(digest, directory)
    return digest
