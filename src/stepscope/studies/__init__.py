"""Top floor: one question a file, from a Workload to a Run. The only place where the wings meet."""
