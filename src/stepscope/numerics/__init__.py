"""The precision lab: numbers that do not fit into 16 bits, one experiment a file. Every one runs on a CPU."""

from stepscope.core.address_space import require_room_for_torch

require_room_for_torch()
