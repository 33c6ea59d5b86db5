"""What a kernel's name says of it: library, architecture, dtypes, layout, tile, and the unit that multiplies."""

from stepscope.analysis.kernel_names.decoding import decode, is_tf32
from stepscope.analysis.kernel_names.name import KernelName, split_name

__all__ = ["KernelName", "decode", "is_tf32", "split_name"]
