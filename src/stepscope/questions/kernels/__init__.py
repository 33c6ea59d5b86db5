"""The kernels of many cells side by side."""
