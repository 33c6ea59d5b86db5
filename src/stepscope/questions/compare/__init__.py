"""Comparisons: runs that differ in one thing, side by side."""
