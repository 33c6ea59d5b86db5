"""Cells of a sweep that are measured on the nodes of a Ray cluster."""
