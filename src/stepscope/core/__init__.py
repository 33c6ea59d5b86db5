"""The ground floor: the types that travel, units, errors, statistics of samples, and the run directory.

Imports the standard library and msgspec, nothing else.
"""
