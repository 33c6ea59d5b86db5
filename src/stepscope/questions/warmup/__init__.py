"""How many warm-up steps a measurement needs."""
