"""Renderers of runs: terminal, Markdown, CSV, JSON lines. They read runs, and nothing else."""
