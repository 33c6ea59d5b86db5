"""Run one command as a fresh process; print its wall time, processor time and peak memory as JSON.

    python -I -S timed_process.py CORES OUTPUT ERRORS COMMAND...

A process' peak resident size starts at what its parent held when it forked, so the one who forks must be small: this
script, the standard library's least, some ten MB, and not the benchmark.
"""

import json
import os
import sys
import time


def busy_s() -> float | None:
    """Seconds that all cores together were at work since boot; None where the system does not tell."""
    try:
        with open("/proc/stat") as stat:  # noqa: PTH123 - pathlib would be half of this process
            user, nice, system, _, _, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """The peak is that of the largest process, where the command has processes of its own."""
    cores, output, errors, *command = sys.argv[1:]
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, output, write, 0o644),
        (os.POSIX_SPAWN_OPEN, 2, errors, write, 0o644),
    ]
    before = busy_s()
    start_ns = time.perf_counter_ns()
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=actions)
    _, status, usage = os.wait4(pid, 0)
    wall_s = (time.perf_counter_ns() - start_ns) * 1e-9
    after = busy_s()
    cpu_s = usage.ru_utime + usage.ru_stime
    others = None if before is None or after is None else max(0.0, after - before - cpu_s) / wall_s
    unit = 1 if sys.platform == "darwin" else 1024
    result = {"wall_s": wall_s, "cpu_s": cpu_s, "peak_bytes": usage.ru_maxrss * unit, "other_cores": others}
    sys.stdout.write(json.dumps({"exit_code": os.waitstatus_to_exitcode(status), "sample": result}))


if __name__ == "__main__":
    main()
