"""Decorators for kernels and their helpers, and how compiled code is found: the one door to the compiler.

Decorators only remember a function. A kernel is compiled when its address is first asked for, or read from the cache on
disk, which needs no Numba.

    memory = lazy_module("ggjit.ops.lib.memory")

    @jitted
    def row(nb, ne, i): ...

    @kernel
    def neg(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth): ...

Flags are the same for all code: no fastmath, NumPy's error model, no allocation, no bounds checks, no SVML.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
import struct
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ggjit import garbage, kernel_cache, linking, object_code, progress
from ggjit.cpu import cpu_level

if TYPE_CHECKING:
    from ggjit.tensor import Tensor

    ByRows = Callable[[Tensor, int], bool]

__all__ = [
    "Intrinsic",
    "Jitted",
    "Kernel",
    "Words",
    "compile_all",
    "compile_seconds",
    "cpu_level",
    "intrinsic",
    "jitted",
    "kernel",
    "lazy_module",
    "soon",
    "words",
]

_lock = threading.RLock()  # held while kernels compile
_helper_lock = threading.RLock()  # never held while anything compiles: Numba asks for helpers under its own lock


def _after_fork() -> None:
    """In a child no other thread is left that could give the locks back."""
    global _lock, _helper_lock
    _lock, _helper_lock = threading.RLock(), threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _Helper:
    """What kernels may call: Numba asks for its type when it meets it in a function that it compiles."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._form: Any = None  # the Numba type, made at the first use
        self.__name__, self.__doc__, self.__wrapped__ = function.__name__, function.__doc__, function
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__

    def _make(self) -> Any:
        raise NotImplementedError

    @property
    def _numba_type_(self) -> Any:
        with _helper_lock:
            self._form = self._form or self._make()
            return self._form

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self.__qualname__}>"


class Jitted(_Helper):
    """A helper: a function that kernels may call. Called from Python it is compiled by Numba's dispatcher."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(function)
        self.options = options
        self._helper: Any = None
        self._dispatcher: Any = None

    def _make(self) -> Any:
        from ggjit import numba_entry

        self._helper = numba_entry.helper(self.function, self.options)  # its type holds it weakly
        return self._helper._numba_type_

    @property
    def njit(self) -> Any:
        """Numba's dispatcher of the function."""
        from ggjit import numba_entry

        with _helper_lock:
            self._dispatcher = self._dispatcher or numba_entry.python_dispatcher(self.function, self.options)
            return self._dispatcher

    def __call__(self, *args: Any) -> Any:
        """Call the function, compiled by Numba's dispatcher."""
        return self.njit(*args)


class Intrinsic(_Helper):
    """A helper that emits LLVM IR: `function(typingctx, *types) -> (signature, codegen)`, run at compile time."""

    def _make(self) -> Any:
        from ggjit import numba_entry

        return numba_entry.intrinsic(self.function)


class Compiled:
    """A function with a C entry: the key, the code, the address."""

    kind = ""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.name = function, function.__name__
        self.__name__, self.__doc__, self.__wrapped__ = function.__name__, function.__doc__, function
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__
        self._found: tuple[str, bool] | None = None
        self._address = 0

    @property
    def key(self) -> str:
        """What the compiled code is found by; changes with anything that the code is made of."""
        return self._walk()[0]

    def _walk(self) -> tuple[str, bool]:
        if self._found is None:
            self._found = kernel_cache.kernel_key(self.function, self.kind)
        return self._found

    @property
    def entry(self) -> str:
        """Name of the C entry in the object code."""
        return f"ggjit_{self.key}"

    def compile(self, assembly: bool = False) -> bytes | str:
        """Compile now, whatever the cache holds; return the object code or its assembly."""
        raise NotImplementedError

    def address(self) -> int:
        """Return the address of the C entry; loads or compiles at the first call."""
        return self._address or compile_all([self])[0]

    def asm(self) -> str:
        """Return the machine code as assembly text (compiled anew)."""
        text = self.compile(assembly=True)
        assert isinstance(text, str)
        return text

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self.__qualname__}>"


class Words(Compiled):
    """A function of int64 arguments returning int64, as a plain C function. Called from Python the GIL is released."""

    kind = "words"

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.n_args = len(inspect.signature(function).parameters)
        self._c_function: Any = None

    def compile(self, assembly: bool = False) -> bytes | str:
        """Compile now, whatever the cache holds; return the object code or its assembly."""
        from ggjit import numba_entry

        return numba_entry.compile_words(self.function, self.entry, assembly)

    @property  # a cached one holds a lock of all functions (Python 3.11), also of those that are there
    def c_function(self) -> Any:
        """The ctypes function, for callers that call often."""
        if self._c_function is None:
            self._c_function = ctypes.CFUNCTYPE(*[ctypes.c_int64] * (1 + self.n_args))(self.address())
        return self._c_function

    def __call__(self, *args: int) -> int:
        """Call the C function."""
        return int(self.c_function(*args))


class Kernel(Compiled):
    """A kernel of the fixed signature.

    kernel(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, ..., op_params, work, ith, nth)

    Buffers are uint8[::1], ne and nb int64[4], op_params int32[16]. The C entry is `int64 entry(int64 header, int64
    task, int64 ith, int64 nth)`: header is the address of a tensor's record, task that of the work buffer's address and
    size. It returns 0, or (position << 4) | (source index + 1) for an index out of range.
    """

    kind = "kernel"

    def __init__(
        self,
        function: Callable[..., Any],
        counter: bool = False,
        streams: bool = False,
        by_rows: ByRows | None = None,
        own_scratch: bool = False,
        counts_threads: bool = False,
        n_optional: int = 0,
    ) -> None:
        super().__init__(function)
        self.uses_counter, self.streams, self.by_rows, self.own_scratch = counter, streams, by_rows, own_scratch
        self.counts_threads, self.n_optional = counts_threads, n_optional
        self.kind = "streaming kernel" if streams else "kernel"
        names = list(inspect.signature(function).parameters)
        self.n_src = (len(names) - 7) // 3
        tensors = ["dst", *(f"src{i}" for i in range(self.n_src))]
        want = [name + part for name in tensors for part in ("", "_ne", "_nb")] + ["op_params", "work", "ith", "nth"]
        if names != want:
            raise TypeError(f"{function.__qualname__}: a kernel takes ({', '.join(want)}), got ({', '.join(names)})")
        if own_scratch and not counter:
            raise TypeError(f"{function.__qualname__}: own_scratch must come with counter=True, got counter=False")
        if self.n_src > 10:
            raise TypeError(f"{function.__qualname__}: a kernel has at most 10 sources, got {self.n_src}")
        self._jitted = Jitted(function, {})
        self._call: Any = None

    @property
    def key(self) -> str:
        """What the compiled code is found by; changes with anything that the code is made of."""
        key, names_counter = self._walk()
        if names_counter and not self.uses_counter:
            raise TypeError(
                f"{self.name}: a kernel that calls atomics.fetch_add must be @kernel(counter=True), got @kernel"
            )
        return key

    @property
    def njit(self) -> Any:
        """Numba's dispatcher of the function, compiled apart from the C entry."""
        return self._jitted.njit

    def compile(self, assembly: bool = False) -> bytes | str:
        """Compile now, whatever the cache holds; return the object code or its assembly."""
        from ggjit import numba_entry

        return numba_entry.compile_kernel(self.function, self.n_src, self.entry, assembly, self.streams)

    def __call__(self, *args: Any) -> None:
        """Run on NumPy arrays: uint8 buffers, four ints for ne and nb, op_params, work, ith, nth.

        A source may be absent: None, with any ne and nb.

        Raises:
            TypeError, ValueError: wrong arguments.
            IndexError: an index in a source was out of range.
        """
        if self._call is None:
            self._call = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 5)(self.address())
        status = _call_entry(self, self._call, args)
        if status < 0:
            raise RuntimeError(f"{self.name}: the kernel raised an exception, got status {status}")
        if status:
            raise IndexError(
                f"{self.name}: index out of range, got it in src{(status & 15) - 1} at position {status >> 4}"
            )


def _check_buffer(kernel: Kernel, name: str, buffer: Any) -> int:
    """The address of a byte buffer."""
    if (
        not isinstance(buffer, np.ndarray)
        or buffer.dtype != np.uint8
        or buffer.ndim != 1
        or not buffer.flags.c_contiguous
    ):
        what = f"{buffer.dtype} {list(buffer.shape)}" if isinstance(buffer, np.ndarray) else type(buffer).__name__
        raise TypeError(f"{kernel.name}: {name} must be a contiguous uint8 array of one dimension, got {what}")
    return int(buffer.__array_interface__["data"][0])


def _call_entry(kernel: Kernel, entry: Any, args: Sequence[Any]) -> int:
    """Put the arguments into tensor records (42 int64 words each) and call the C entry."""
    n = 1 + kernel.n_src
    if len(args) != 3 * n + 4:
        raise TypeError(f"{kernel.name}: takes {3 * n + 4} arguments, got {len(args)}")
    op_params, work, ith, nth = args[3 * n :]
    words = np.zeros(42 * n + 2, np.int64)
    base = int(words.__array_interface__["data"][0])
    for i in range(n):
        buffer, ne, nb = args[3 * i : 3 * i + 3]
        if i and buffer is None:
            continue
        address = _check_buffer(kernel, f"src{i - 1}" if i else "dst", buffer)
        struct.pack_into("<8q", words, 336 * i + 16, *ne, *nb)
        struct.pack_into("<q", words, 336 * i + 248, address)
        if i:
            struct.pack_into("<q", words, 144 + 8 * i, base + 336 * i)
        elif not buffer.flags.writeable:
            raise ValueError(f"{kernel.name}: dst must be writable, got a read-only array")
    parameters = np.asarray(op_params)
    if parameters.dtype != np.int32 or parameters.size > 16:
        raise TypeError(f"{kernel.name}: op_params must be at most 16 int32, got {parameters.dtype} {parameters.size}")
    struct.pack_into(f"{4 * parameters.size}s", words, 84, parameters.tobytes())
    struct.pack_into("<2q", words, 336 * n, _check_buffer(kernel, "work", work), work.nbytes)
    return int(entry(base, base + 336 * n, ith, nth))


# --- decorators -------------------------------------------------------------------------------------------------------


@overload
def jitted(function: Callable[..., Any]) -> Jitted: ...
@overload
def jitted(**options: Any) -> Callable[[Callable[..., Any]], Jitted]: ...
def jitted(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a helper for kernels: `@jitted`, or `@jitted(inline="always")`, `@jitted(forceinline=True)`."""
    return Jitted(function, options) if function is not None else lambda f: Jitted(f, options)


def intrinsic(function: Callable[..., Any]) -> Intrinsic:
    """Make a helper that emits LLVM IR, as numba.extending.intrinsic does, without importing Numba."""
    return Intrinsic(function)


@overload
def kernel(function: Callable[..., Any]) -> Kernel: ...
@overload
def kernel(
    *,
    counter: bool = False,
    streams: bool = False,
    by_rows: ByRows | None = None,
    own_scratch: bool = False,
    counts_threads: bool = False,
    n_optional: int = 0,
) -> Callable[[Callable[..., Any]], Kernel]: ...
def kernel(
    function: Callable[..., Any] | None = None,
    *,
    counter: bool = False,
    streams: bool = False,
    by_rows: ByRows | None = None,
    own_scratch: bool = False,
    counts_threads: bool = False,
    n_optional: int = 0,
) -> Any:
    """Make a kernel of a function with the fixed signature (see Kernel).

    `@kernel(counter=True)` for one that shares work by the chunk counter in work[0:8], which must be 0 when it begins.
    `@kernel(streams=True)` for one that memory binds: it gets 256-bit registers, since accesses of 512 bits stream more
    slowly. It must not use what exists for 512 bits only (`vec.exp` and what is made of it).
    `@kernel(by_rows=f)` for one whose threads have rows n * ith / nth to n * (ith + 1) / nth of dst's n where
    f(dst, nth) is true, and read of a source with the ne[1:] of dst those rows alone; it does not write to sources.
    Threads then need not meet between such steps (`ggjit.lower`).
    `@kernel(counter=True, own_scratch=True)` for one whose scratch begins as many bytes behind the counter's line as
    the int64 in work[8:16] says, and whose thread ith uses the ith of its nth equal parts alone: nor need they meet
    between such steps that have as much scratch.
    `@kernel(counts_threads=True)` for one whose result may depend on nth: a program with it always runs with as many
    threads as it was made for. Of all others the results must be the same for any number.
    `@kernel(n_optional=n)` for one whose last n sources a node may lack: they have no data then, and ne of 0.
    """
    options = counter, streams, by_rows, own_scratch, counts_threads, n_optional
    if function is not None:
        return Kernel(function, *options)
    return lambda f: Kernel(f, *options)


def words(function: Callable[..., Any]) -> Words:
    """Make a plain C function of a function of int64 arguments that returns int64."""
    return Words(function)


class _LazyModule(types.ModuleType):
    """Stands for a module until an attribute is looked at."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        value = getattr(importlib.import_module(self.__name__), name)
        self.__dict__[name] = value
        return value


def lazy_module(name: str) -> Any:
    """Return a module that is executed at the first look at one of its attributes."""
    return sys.modules.get(name) or _LazyModule(name)


# --- compiling --------------------------------------------------------------------------------------------------------


class _Progress:
    """One line on stderr while several kernels compile, if that is a terminal."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.shown = total > 1 and sys.stderr is not None and sys.stderr.isatty()
        self.bar: Any = None
        if self.shown and (bar_class := progress.bar_class()) is not None:
            self.bar = bar_class(total=total, desc="compiling kernels", leave=False)

    def step(self) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.update()
        elif self.shown:
            end = "\n" if self.done == self.total else ""
            print(f"\rcompiling kernels: {self.done}/{self.total}", end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def soon(*compiled: Compiled) -> None:
    """Make these ready together with what `compile_all` is asked for next.

    So they share an engine with it, and where they must be compiled, several processes have more to share.
    """
    with _lock:
        _soon.extend(c for c in compiled if not c._address)


def compile_all(compiled: Iterable[Compiled]) -> list[int]:
    """Load or compile what is missing, link it in one engine, and return all addresses in order.

    Raises:
        ValueError: the code of a kernel calls something that it must not.
    """
    asked = list(compiled)
    with _lock:
        every = asked
        if any(not c._address for c in asked):
            every = [*asked, *_soon]
            _soon.clear()
        missing = {c.entry: c for c in every if not c._address and c.key not in _linked}
        objects = {entry: code for entry, c in missing.items() if (code := kernel_cache.load(c.key)) is not None}
        fresh = [c for entry, c in missing.items() if entry not in objects]
        if fresh:
            start = time.perf_counter()
            objects.update(_compile_fresh(fresh))
            _seconds.append(time.perf_counter() - start)
        if objects:
            addresses = linking.link(objects)
            _linked.update((missing[entry].key, address) for entry, address in addresses.items())
        for c in every:
            c._address = c._address or _linked[c.key]
    return [c._address for c in asked]


def _compile_fresh(fresh: list[Compiled]) -> dict[str, bytes]:
    """Object code by entry of what the cache has not."""
    from ggjit import numba_entry, parallel_compile

    objects: dict[str, bytes] = {}
    shown = _Progress(len(fresh))

    def compile_one(i: int) -> None:
        objects[fresh[i].entry] = _compile(fresh[i])

    n_processes = parallel_compile.processes(len(fresh)) if kernel_cache.folder() is not None else 1
    try:
        with garbage.put_off():  # Numba makes many objects, of which few are garbage
            if n_processes > 1:
                numba_entry.prepare()
                parallel_compile.run(len(fresh), n_processes, compile_one, shown.step)
                for c in fresh:  # what the children did is on disk
                    objects.setdefault(c.entry, kernel_cache.load(c.key) or b"")
            for i, c in enumerate(fresh):
                if not objects.get(c.entry):
                    compile_one(i)
                    shown.step()
    finally:
        shown.close()
    kernel_cache.trim()
    return objects


def compile_seconds() -> float:
    """Seconds spent compiling in this process so far."""
    return sum(_seconds)


_soon: list[Compiled] = []
_seconds: list[float] = []
_linked: dict[str, int] = {}  # key -> address: the same kernel made twice is linked once


def _compile(compiled: Compiled) -> bytes:
    try:
        code = compiled.compile()
    except Exception as error:
        made = compiled.function.__code__
        where = f"{made.co_filename}:{made.co_firstlineno}"
        error.add_note(f"while {compiled.kind} {compiled.name} was compiled ({where})")
        raise
    assert isinstance(code, bytes)
    object_code.check_symbols(code, compiled.name)
    kernel_cache.store(compiled.key, code)
    return code
