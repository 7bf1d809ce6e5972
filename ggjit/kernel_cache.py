"""Compiled kernels on disk: what a kernel's key is made of, and the folder of object code.

A key changes when, and only when, what the kernel is made of changes: its code, that of every function it reaches over
files and closures, the project modules it names (those of ops/lib with all that they name in turn), captured constants,
the compiler's own source, the versions of Numba, llvmlite and Python, and the CPU. No line numbers, no file names, no
dates. Computing a key does not import Numba.

The folder is GGJIT_CACHE_DIR, else the user's cache directory; when neither can be written, a private folder in the
temporary directory, else none. Files are written whole and renamed, so that processes may share the folder. Each ends
in a checksum: a damaged file is compiled again. The oldest go first when the files exceed a limit. What LLVM told about
the CPU is there too.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import hashlib
import importlib.util
import os
import platform
import re
import stat
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ggjit import cpu

CPU = ".cpu"  # suffix of what is remembered of CPUs
LIMIT = 1 << 30  # bytes of all files together
_MAGIC = b"ggjit-object-1\n"
_PACKAGE = Path(__file__).resolve().parent
_COMPILER_FILES = ("cpu.py", "numba_entry.py", "object_code.py")
_LIB = "ggjit.ops.lib"
_EMIT = _LIB + ".emit"  # its hash is all of it: nothing there is called by a kernel, and a look at it would import LLVM
_OPS_NAME = re.compile(r"ggjit\.ops(?:\.\w+)+")
_FROM_OPS = re.compile(r"from (ggjit\.ops(?:\.\w+)*) import (\([^)]*\)|[^\n(]+)")


# --- keys -------------------------------------------------------------------------------------------------------------


_began = time.time()


@functools.cache
def file_hash(path: str) -> str:
    """Hash of a source file's bytes, read once per process.

    If a file of the package has changed since the process began, the code that runs may be of an older one: the hash is
    then one that no other process has.
    """
    with open(path, "rb") as file:
        source = file.read()
        if _began < os.fstat(file.fileno()).st_mtime <= time.time() and Path(path).is_relative_to(_PACKAGE):
            source += f"{os.getpid()} {_began}".encode()
    return hashlib.sha256(source).hexdigest()


@functools.cache
def _ops_module(name: str) -> str | None:
    """Source file of a module of ggjit.ops; None if there is no such module."""
    base = os.path.join(_PACKAGE, "ops", *name.split(".")[2:])
    return next((path for path in (f"{base}.py", os.path.join(base, "__init__.py")) if os.path.isfile(path)), None)


@functools.cache
def _mentions(path: str) -> frozenset[str]:
    """Modules of ggjit.ops that a source file names: in imports, and as text (lazy_module("ggjit.ops.lib.vec"))."""
    text, found = Path(path).read_text(encoding="utf-8"), set()
    for base, names in _FROM_OPS.findall(text):
        found |= {f"{base}.{name.split()[0]}" for name in names.strip("()").split(",") if name.strip()}
    modules = set()
    for name in found | set(_OPS_NAME.findall(text)):
        while name != "ggjit.ops" and _ops_module(name) is None:  # a function of a module
            name = name.rpartition(".")[0]
        modules.add(name)
    return frozenset(modules - {"ggjit.ops"})


@functools.cache
def _lib_hash(name: str) -> str:
    """Hash of a module of ops/lib and of all modules of ggjit.ops that it names, directly or not."""
    seen, pending = set(), {name}
    while pending:
        module = pending.pop()
        seen.add(module)
        path = _ops_module(module)
        if path is not None:
            pending |= _mentions(path) - seen
    files = [(module, file_hash(path)) for module in sorted(seen) if (path := _ops_module(module)) is not None]
    return hashlib.sha256(repr(files).encode()).hexdigest()


def _version(package: str) -> str:
    """Hash of the file that tells a package's version; the package is not imported, nor its metadata parsed."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return file_hash(str(Path(spec.origin).with_name("_version.py")))


def host_key(appearance: bytes) -> str:
    """Return the key under which a CPU is remembered that has this appearance."""
    made_of = _version("llvmlite"), file_hash(str(_PACKAGE / "cpu.py")), platform.release(), appearance
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]


@functools.cache
def _compiler() -> str:
    """What the compiler is: its source, versions, the CPU and its features."""
    versions = _version("numba"), _version("llvmlite"), sys.version_info[:2], sys.platform
    files = [file_hash(str(_PACKAGE / name)) for name in _COMPILER_FILES]
    return repr((versions, files, cpu.cpu_level(), cpu.target()))


def _is_foreign(name: str) -> bool:
    """Whether a module is Python's own or one whose version is part of the compiler or of no matter."""
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("numba", "numpy", "llvmlite")


@functools.cache
def _module_hash(name: str) -> str | None:
    """Hash of a module's source, for one of the project or of a user."""
    if name == _LIB or name.startswith(_LIB + "."):
        return _lib_hash(name)
    if _is_foreign(name):
        return None
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None) or importlib.util.find_spec(name)
    origin = spec.origin if spec is not None else None
    return file_hash(origin) if origin and origin.endswith(".py") else None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _constant_text(value: Any) -> str:
    """repr that does not depend on the process (the order of a set does)."""
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


@functools.cache
def _code_text(code: types.CodeType) -> str:
    """Everything in a code object that decides what it does: not line numbers, file names or the docstring."""
    parts = []
    for c in _codes(code):
        constants = [_constant_text(k) for k in c.co_consts if not isinstance(k, types.CodeType)]
        parts.append((c.co_code, c.co_names, c.co_varnames, c.co_freevars, c.co_argcount, constants))
    return repr(parts)


@functools.cache
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    return tuple(sorted({name for c in _codes(code) for name in c.co_names}))


@functools.cache
def _true_globals(code: types.CodeType) -> frozenset[str]:
    """Names that are read as globals, not as attributes; slow, so asked only in doubt."""
    return frozenset(i.argval for c in _codes(code) for i in dis.get_instructions(c) if i.opname == "LOAD_GLOBAL")


def _function_of(value: Any) -> types.FunctionType | None:
    """The Python function inside a helper, an intrinsic or a Numba dispatcher."""
    if isinstance(value, types.FunctionType):
        return value
    if isinstance(value, types.ModuleType):  # no look at a lazy one
        return None
    for name in ("function", "py_func", "_defn"):
        inner = getattr(value, name, None)
        if isinstance(inner, types.FunctionType):
            return inner
    return None


def _plain(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(_plain(v) for v in value)
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


class _Walk:
    """Collects the parts of one kernel's key."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.seen: set[object] = set()
        self.uses_counter = False

    def value(self, name: str, value: Any, code: types.CodeType, where: str) -> None:
        """What a name of `code` stands for."""
        if isinstance(value, types.ModuleType):  # first: looking at an attribute would load a lazy module
            self.module(name, value, code, where)
        elif _plain(value):
            self.parts.append(f"{name}: {type(value).__name__} {_constant_text(value)}")
        elif isinstance(value, list | tuple):
            self.parts.append(f"{name}: {len(value)} values")
            for v in value:
                self.value(name, v, code, where)
        elif isinstance(value, enum.Enum):
            self.parts.append(f"{name}: {value!r}")
        elif isinstance(value, enum.EnumType):
            self.parts.append(f"{name}: {value.__module__}.{value.__qualname__} {dict(value.__members__)!r}")
        elif isinstance(value, type | types.BuiltinFunctionType) or _is_foreign(getattr(value, "__module__", "") or ""):
            fields = getattr(value, "_fields", "")  # of a named tuple
            self.parts.append(f"{name}: {value.__module__}.{getattr(value, '__qualname__', value)} {fields}")
        elif (function := _function_of(value)) is not None:
            options = getattr(value, "options", None)
            self.parts.append(f"{name}: {type(value).__name__} {sorted(options.items()) if options else ''}")
            self.function(function)
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):  # scalars and constant arrays
            self.parts.append(f"{name}: {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}")
        elif type(value).__module__ == "numpy":  # np.sqrt and the like
            self.parts.append(f"{name}: {value!r}")
        else:
            raise TypeError(
                f"{where}: a kernel may refer to functions, modules and plain constants, got {name} = {value!r}"
            )

    def module(self, name: str, module: types.ModuleType, code: types.CodeType, where: str) -> None:
        """A module of the project: its source, and what the code names of it."""
        module_name = object.__getattribute__(module, "__name__")
        digest = _module_hash(module_name)
        self.parts.append(f"{name}: module {digest}")
        if digest is None or module_name == _EMIT or (id(module), code) in self.seen:
            return
        self.seen.add((id(module), code))
        for attribute in _global_names(code):
            value = getattr(module, attribute, None)
            if value is not None:
                with contextlib.suppress(TypeError):  # a name of something else: Numba will tell
                    self.value(f"{name}.{attribute}", value, code, where)

    def function(self, function: types.FunctionType) -> None:
        """The code of a function, and all it refers to."""
        if id(function) in self.seen:
            return
        self.seen.add(id(function))
        code, where = function.__code__, function.__qualname__
        names = _global_names(code)
        self.uses_counter = self.uses_counter or "fetch_add" in names
        if (function.__module__ or "").startswith(_LIB):
            # its module is hashed as a whole; what is left is which function, and what it captured
            self.parts.append(f"{_lib_hash(function.__module__)} {function.__module__} {where}")
        else:
            self.parts.append(_code_text(code))
            self.parts.append(repr((function.__defaults__, function.__kwdefaults__)))
            self.globals(function, names)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                captured = cell.cell_contents
            except ValueError:  # not set yet
                continue
            self.value(name, captured, code, where)

    def globals(self, function: types.FunctionType, names: tuple[str, ...]) -> None:
        """What the global names in a function stand for."""
        scope = function.__globals__
        for name in names:
            if name not in scope:
                continue
            try:
                self.value(name, scope[name], function.__code__, function.__qualname__)
            except TypeError:
                if name in _true_globals(function.__code__):
                    raise


def kernel_key(function: Callable[..., Any], kind: str) -> tuple[str, bool]:
    """Return the key of a function compiled as `kind`, and whether it reaches `atomics.fetch_add`.

    Raises:
        TypeError: it refers to an object that is no function, module or constant.
    """
    walk = _Walk()
    assert isinstance(function, types.FunctionType)
    walk.function(function)
    return hashlib.sha256(repr((kind, _compiler(), walk.parts)).encode()).hexdigest()[:32], walk.uses_counter


# --- the folder -------------------------------------------------------------------------------------------------------


def _usable(folder: Path, private: bool = False) -> bool:
    """Whether files can be made in the folder (made if missing); a private one must be the user's alone."""
    import tempfile

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if private and hasattr(os, "getuid"):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def user_cache() -> Path | None:
    """Return the folder that ggjit may use in the user's cache directory, None if there is no such directory."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return Path(base) / "ggjit" / "Cache" if base else None
    try:
        home = Path.home()
    except RuntimeError:
        home = None
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "ggjit" if home else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "ggjit"
    return home / ".cache" / "ggjit" if home and str(home) != "/" else None


def _first_folder() -> Path | None:
    """The folder that the user named, else that of the user's cache."""
    asked = os.environ.get("GGJIT_CACHE_DIR")
    found = Path(os.path.expanduser(asked)) if asked else user_cache()
    return None if found is None else found.absolute()


@functools.cache
def _folders() -> tuple[Path | None, Path | None]:
    """The folder to look in first, which may be read-only, and the one that is written to; once a process."""
    import tempfile

    first = _first_folder()
    if first is not None and _usable(first):
        return first, first
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    try:
        private = Path(tempfile.gettempdir()) / f"ggjit-{user}"
    except OSError:  # nor can any temporary directory be written
        return first, None
    return first, private if _usable(private, private=True) else None


def folder() -> Path | None:
    """Return the folder of compiled kernels that is written to, or None if nothing can be written."""
    return _folders()[1]


def _readable() -> list[Path]:
    """The folders to look in."""
    return list(dict.fromkeys(place for place in _folders() if place is not None))


def load(key: str, suffix: str = ".o") -> bytes | None:
    """Return the object code (or what else) stored under a key; None if there is none, or it is damaged."""
    for place in _readable():
        path = place / f"{key}{suffix}"
        try:
            data = path.read_bytes()
        except OSError:
            continue
        code, digest = data[len(_MAGIC) : -32], data[-32:]
        if data.startswith(_MAGIC) and hashlib.sha256(key.encode() + code).digest() == digest:
            with contextlib.suppress(OSError):
                os.utime(path)  # the oldest are removed first
            return code
    return None


def store(key: str, code: bytes, suffix: str = ".o") -> None:
    """Store object code (or what else) under a key; failing to write (a full disk) is no error."""
    place = folder()
    if place is None:
        return
    import tempfile

    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f"{key}.", suffix=".tmp", dir=place)
        with os.fdopen(handle, "wb") as f:
            f.write(_MAGIC + code + hashlib.sha256(key.encode() + code).digest())
        os.replace(temporary, place / f"{key}{suffix}")
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def trim(limit: int = LIMIT) -> None:
    """Remove the files used longest ago until all together are under the limit."""
    place = folder()
    if place is None:
        return
    files = []
    try:
        paths = list(place.iterdir())
    except OSError:  # somebody removed the folder
        return
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue  # another process removed it
        if path.suffix in (".o", CPU, ".tmp"):
            files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= limit:
            break
        try:
            path.unlink()
        except OSError:
            continue
        total -= size
