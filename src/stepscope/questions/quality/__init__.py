"""A small transformer trained on real text once in each precision, and how the runs depart from fp32."""

from stepscope.core.address_space import require_room_for_torch

require_room_for_torch()
