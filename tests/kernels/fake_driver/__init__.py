"""A CUDA driver that computes nothing, under which Triton compiles, loads and launches kernels on a machine without a
GPU. It keeps what each launch was given, so that tests see the parameters of a kernel byte by byte."""
