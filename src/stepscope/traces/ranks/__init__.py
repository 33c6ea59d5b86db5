"""Several ranks of one job, read together."""
