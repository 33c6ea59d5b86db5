"""The precision lab: numbers that do not fit into 16 bits, one question a file or folder. All of it runs on a CPU."""

from stepscope.core.address_space import require_room_for_torch

require_room_for_torch()
