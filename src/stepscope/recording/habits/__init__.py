"""Finds what a step does beside what was asked for: waits of the host, gradients of zeros, graphs that stay."""
