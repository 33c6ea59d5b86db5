"""What a step will need, before it runs: from the workload alone, without torch."""
