"""What autocast does: to a model of any kind, and to each operator."""

from stepscope.core.address_space import require_room_for_torch

require_room_for_torch()
