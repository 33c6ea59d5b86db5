"""The analysis of a capture: phases, modules, families, occupation, the critical path, and findings."""
