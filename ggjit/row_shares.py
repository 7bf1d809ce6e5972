"""Where a kernel's threads have whole rows: what `@kernel(by_rows=...)` takes, and what the lowering makes of it.

A step of such a kernel may follow another one without a barrier although it reads what that one writes: each thread
finds there what it has written itself.
"""

from __future__ import annotations

from ggjit.tensor import Tensor


def always(dst: Tensor, nth: int) -> bool:
    """Kernels that share by `rows.whole`."""
    return True


def many(dst: Tensor, nth: int) -> bool:
    """Kernels that share by `rows.share`."""
    n = dst.nrows
    return n >= 8 * nth or (n >= nth and n % nth == 0)


def meet(mine: Tensor, dst: Tensor, other: Tensor, other_dst: Tensor) -> bool:
    """Do two steps by rows share no byte of two of their tensors but what one thread has in both?

    Args:
        mine: a tensor of the one step.
        dst: what it makes.
        other: a tensor of the other step.
        other_dst: what that makes.
    """
    return (
        dst.ne[1:] == mine.ne[1:] == other.ne[1:] == other_dst.ne[1:]
        and (mine.data, mine.nbytes) == (other.data, other.nbytes)
        and mine.is_contiguous
        and other.is_contiguous
    )
