"""The stages in which a step becomes a run, one a file; `engine/step.py` has their list."""
