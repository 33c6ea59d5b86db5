"""What steps do beside what was asked for: waits of the host, gradients that are zeros, graphs that stay, and more."""
