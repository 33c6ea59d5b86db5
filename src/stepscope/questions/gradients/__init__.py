"""Gradients and updates in 16 bits: those that vanish, the loss scale that saves them, updates that round away."""

from stepscope.core.address_space import require_room_for_torch

require_room_for_torch()
