"""The acting wing's instruments: clock, device, timer, and the observers that run beside the timed steps."""
