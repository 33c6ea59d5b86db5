"""One training step, run again and again from the same weights, batch and random state, and compared with itself."""

from stepscope.core.address_space import require_room_for_torch

require_room_for_torch()
