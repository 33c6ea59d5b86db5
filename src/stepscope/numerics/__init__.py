"""The precision lab: numbers that do not fit into 16 bits, one experiment a file. Every one runs on a CPU."""
