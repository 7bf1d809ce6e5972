"""What the system does with pages: locked ones are never paged out, small ones are made when they are touched.

Source: mlock(2), madvise(2), VirtualLock.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import warnings


def _lock(address: int, nbytes: int) -> int:
    """Lock a range; 0 or the system's error number."""
    if sys.platform == "win32":
        kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
        done = kernel32.VirtualLock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
        return 0 if done else ctypes.get_last_error()
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0
    return 0 if done else ctypes.get_errno()


def _limit() -> str:
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    except (ImportError, AttributeError, OSError, ValueError):
        return ""
    return "" if soft == resource.RLIM_INFINITY else f", the limit is {soft} bytes; raise it (ulimit -l)"


def lock_memory(address: int, nbytes: int, what: str) -> bool:
    """Lock whole pages of a range as long as they are mapped; a warning where the system forbids it.

    Args:
        address: first byte.
        nbytes: of the range.
        what: for the warning.

    Returns:
        Is it locked?
    """
    if nbytes == 0:
        return True
    error = _lock(address, nbytes)
    if error:
        text = f"{what}: memory must be lockable, got {os.strerror(error)!r} for {nbytes} bytes{_limit()}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    return error == 0


def use_small_pages(address: int, nbytes: int) -> None:
    """Let only those pages of new memory become real that are touched, not the 2 MiB around them (NumPy wants these).

    Args:
        address: first byte.
        nbytes: of the range.
    """
    if sys.platform == "linux" and hasattr(mmap, "MADV_NOHUGEPAGE"):
        first = address // mmap.PAGESIZE * mmap.PAGESIZE
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(address + nbytes - first), mmap.MADV_NOHUGEPAGE)
