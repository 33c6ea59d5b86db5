"""Figures derived from a stored run, and the checks that judge it."""
