"""What a device promises, and what it reaches."""
