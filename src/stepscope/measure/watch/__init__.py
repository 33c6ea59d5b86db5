"""Watches a training loop that is not ours: what a step of it is, when its phases begin and end, and what they take."""
