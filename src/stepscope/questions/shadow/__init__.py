"""One step, with each module alone in 16 bits: which module's precision the gradients depend on."""
