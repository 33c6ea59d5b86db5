"""A write-up: the questions of an assignment, answered from stored runs and answers."""
