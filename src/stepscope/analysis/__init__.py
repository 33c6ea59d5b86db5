"""Conclusions from what was stored: figures derived from runs, and the checks that judge them. Never torch."""
