"""A plain script, as one would write it: kernels joined to launches in a dict, launches swept into push/pop ranges.

Device time by innermost range name, and by kernel name.
"""

import json
import sqlite3
import sys
from collections import Counter, defaultdict

PUSH_POP = 59
PROCESS = ~0xFFFFFF

db = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
names = dict(db.execute("SELECT id, value FROM StringIds"))
launches = {
    (thread & PROCESS, correlation): (thread, start)
    for thread, correlation, start in db.execute(
        "SELECT globalTid, correlationId, start FROM CUPTI_ACTIVITY_KIND_RUNTIME"
    )
}
launched = defaultdict(list)
by_kernel = Counter()
unlaunched_ns = 0
for process, correlation, start, end, name in db.execute(
    "SELECT globalPid, correlationId, start, end, demangledName FROM CUPTI_ACTIVITY_KIND_KERNEL"
):
    by_kernel[name] += end - start
    launch = launches.get((process, correlation))
    if launch is None:
        unlaunched_ns += end - start
    else:
        launched[launch[0]].append((launch[1], end - start))
ranges = defaultdict(list)
for thread, start, end, text, text_id in db.execute(
    "SELECT globalTid, start, end, text, textId FROM NVTX_EVENTS WHERE eventType = ? AND end IS NOT NULL", (PUSH_POP,)
):
    ranges[thread].append((start, -end, text or names[text_id]))

by_range = Counter()
for thread, kernels in launched.items():
    kernels.sort()
    opening = sorted(ranges[thread])
    stack, i = [], 0
    for launch_start, duration in kernels:
        while i < len(opening) and opening[i][0] <= launch_start:
            start, minus_end, name = opening[i]
            while stack and stack[-1][0] <= start:
                stack.pop()
            stack.append((-minus_end, name))
            i += 1
        while stack and stack[-1][0] <= launch_start:
            stack.pop()
        by_range[stack[-1][1] if stack else None] += duration
table = {names[name]: duration for name, duration in by_kernel.most_common()}
attributed_ns = sum(by_range.values())
assert attributed_ns + unlaunched_ns == sum(by_kernel.values())
sys.stdout.write(json.dumps({"tables": {"ranges": len(by_range), "kernels": len(table)}}))
