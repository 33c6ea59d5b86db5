"""Which module's precision the gradients of a step depend on: each alone in 16 bits, the others as given."""

from stepscope.core.address_space import require_room_for_torch

require_room_for_torch()
