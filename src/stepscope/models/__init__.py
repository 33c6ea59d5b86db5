"""The transformer family, and a training step of it."""
