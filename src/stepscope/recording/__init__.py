"""What measures and looks at a step: clock, device, timer, and the observers that run beside the timed steps."""

from stepscope.core.interrupts import require_room_for_torch

require_room_for_torch()
