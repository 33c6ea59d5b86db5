"""The work of each operator of a capture, beside the least time that it takes on its device."""
