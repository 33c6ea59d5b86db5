"""How a step becomes a run: requests, processes, sweeps."""
