"""What a capture holds: phases, modules, families, occupation, the critical path, and what to doubt in it."""
