"""Watches a user's training loop: what a step of it is, when its phases begin and end, and how long they take."""
