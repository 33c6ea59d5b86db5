"""Work of single operations."""

from stepscope.core.work import Work


def matmul_work(m: int, n: int, k: int, bytes_per_element: int, batch: int = 1) -> Work:
    """(m, k) x (k, n): a multiply and an add for each of m*n*k; each operand read once, the result written once."""
    return Work(
        flops=2 * batch * m * n * k,
        bytes_read=batch * (m * k + k * n) * bytes_per_element,
        bytes_written=batch * m * n * bytes_per_element,
    )


def copy_work(bytes_copied: int) -> Work:
    """A device-to-device copy: every byte read once and written once."""
    return Work(flops=0, bytes_read=bytes_copied, bytes_written=bytes_copied)


def adamw_work(parameters: int, bytes_per_element: int) -> Work:
    """One AdamW step (Loshchilov and Hutter 2019, algorithm 2): reads p, g, m, v and writes p, m, v.

    FLOPs are elementwise and not model FLOPs; they are left at 0, since the bytes are what bounds this step.
    """
    return Work(
        flops=0,
        bytes_read=4 * parameters * bytes_per_element,
        bytes_written=3 * parameters * bytes_per_element,
    )
