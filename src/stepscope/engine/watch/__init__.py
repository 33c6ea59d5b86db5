"""How a loop that is not ours becomes a Run: the request, the user's script, and the run that a Watch fills."""
