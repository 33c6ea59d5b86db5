"""Makes a Run of a user's loop: the request, the user's script, and the run that a Watch fills."""
