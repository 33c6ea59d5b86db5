"""Captures that others published: tests read them where they lie, and are skipped where they are not.

`STEPSCOPE_PUBLIC_CAPTURES` names the folder. CONTRIBUTING says which files it holds and where they come from.
"""

import os
from pathlib import Path

import pytest

VARIABLE = "STEPSCOPE_PUBLIC_CAPTURES"


def public_capture(name: str) -> Path:
    """The path of a published capture. The calling test is skipped where there is none."""
    folder = os.environ.get(VARIABLE, "")
    if not folder:
        pytest.skip(f"no published captures here: {VARIABLE} names no folder")
    path = Path(folder) / name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return path
