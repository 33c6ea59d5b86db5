"""Whether another way to run the same step gives the same loss and gradients, and what departs first if not."""
