"""Whether another way to run the same step gives the same loss and gradients, and what departs first if not."""

from stepscope.core.address_space import require_room_for_torch

require_room_for_torch()
