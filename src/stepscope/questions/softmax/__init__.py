"""Softmax, and attention with it, in few bits."""

from stepscope.core.address_space import require_room_for_torch

require_room_for_torch()
