"""Plots: frames or rows in, Altair charts out. `save.py` writes a chart as SVG, PNG, HTML or JSON."""

from stepscope.core.errors import InputError

try:
    import altair  # noqa: F401
    import vl_convert  # noqa: F401
except ImportError as error:
    # A machine that only measures may lack them; whoever asks it for a plot is told once, here, for every plot.
    raise InputError(f"cannot plot without {error.name}: pip install altair vl-convert-python") from error
