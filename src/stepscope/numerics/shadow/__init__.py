"""Which module's precision the gradients of a step depend on: each alone in 16 bits, the others as given."""
