"""What engineers look up in a capture, one question a file: operators, copies, calls, queues, trees, graphs."""
