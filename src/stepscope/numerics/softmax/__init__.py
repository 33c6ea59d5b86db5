"""Softmax, and attention with it, in few bits."""
