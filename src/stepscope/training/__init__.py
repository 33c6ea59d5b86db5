"""The transformer family, and a training step of it."""

from stepscope.core.interrupts import require_room_for_torch

require_room_for_torch()
