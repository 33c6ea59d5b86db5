"""Gradients and updates in 16 bits: those that vanish, the loss scale that saves them, updates that round away."""
