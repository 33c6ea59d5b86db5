"""One training step, run again and again from the same weights, batch and random state, and compared with itself."""
