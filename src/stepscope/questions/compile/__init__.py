"""A step eager and compiled, side by side."""
