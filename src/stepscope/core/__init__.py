"""Ground floor: the types that travel, units, errors, statistics of samples, the run directory.

Imports the standard library and msgspec, nothing else.
"""
