"""From a Python function to object code: the only file that uses Numba's internals. Imported when something compiles.

Numba types and lowers a function to LLVM IR; from there on the code is ours: one LLVM module per kernel holds the
native function, the helpers it reaches and a C entry; everything but the entry is made internal, optimised once for the
CPU level and emitted as an object that needs neither Numba nor Python. Helpers are never turned into machine code of
their own. Why not a @cfunc: its wrapper reports exceptions through Python, so its object needs the interpreter.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from ggjit import cpu, object_code


def _environment() -> None:
    """Numba's own compiler gets the same CPU and no SVML, as far as it is not imported yet."""
    if "numba" not in sys.modules:
        os.environ["NUMBA_DISABLE_INTEL_SVML"] = "1"
        if os.environ.get("GGJIT_CPU"):
            os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = cpu.target()


_environment()

import llvmlite.binding as llvm  # noqa: E402
import numba  # noqa: E402
from llvmlite import ir  # noqa: E402
from numba import types  # noqa: E402
from numba.core import codegen, compiler, config, dispatcher, errors, registry  # noqa: E402
from numba.core import cpu as numba_cpu  # noqa: E402
from numba.core.base import _wrap_impl  # noqa: E402
from numba.core.compiler_lock import global_compiler_lock  # noqa: E402
from numba.core.typing.templates import make_intrinsic_template  # noqa: E402
from numba.np.arrayobj import make_array, populate_array  # noqa: E402

from ggjit.ops.lib import vector_type  # noqa: E402, F401  (registers the operators before anything is typed)

U8, I64_ARRAY, I32_ARRAY = (types.Array(t, 1, "C") for t in (types.uint8, types.int64, types.int32))
I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
RECORD_SIZE, NE_AT, NB_AT, PARAMS_AT, SRC_AT, DATA_AT = 336, 16, 48, 84, 152, 248  # offsets in a tensor's record
_DEFINITION = re.compile(r"^(define [^\n]*?)( #\d+)? \{$", re.MULTILINE)
_WHOLE = re.compile(r"llvm\.x86\.[\w.]*512\b")
_HALVED = '"prefer-vector-width"="256" "min-legal-vector-width"="0"'
_OPTIONS = {
    "nopython": True, "nogil": True, "error_model": "numpy", "boundscheck": False, "debug": False, "_nrt": False,
}  # fmt: skip


# --- Numba's compiler, ending at LLVM IR ------------------------------------------------------------------------------


def _halve(module: Any, name: str) -> Any:
    """The module with its 512-bit vectors split in two; done after the passes, since inlining would widen it again."""
    text = str(module)
    if found := _WHOLE.search(text):  # LLVM cannot split it, and would end the process
        raise TypeError(
            f"{name}: a kernel with streams=True must not use what exists for 512 bits only (vec.exp and its like), "
            f"got {found[0]}"
        )
    return llvm.parse_assembly(_DEFINITION.sub(rf"\1 {_HALVED}\2 {{", text))


class _Library(codegen.CPUCodeLibrary):
    """The LLVM module of a function; finalizing a helper links its own helpers in and does no more."""

    def finalize(self) -> None:
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._final_module.verify()
        self._finalized = True

    def _finalize_specific(self) -> None:
        pass

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout  # optimised once, when complete

    def emit(self, name: str, assembly: bool = False, halved: bool = False) -> bytes | str:
        """Object code (or assembly) in which only the function `name` can be seen from outside.

        Halved: vectors of 512 bits are split into two registers.
        """
        self.finalize()
        module = self._final_module
        for value in (*module.functions, *module.global_variables):
            if not value.is_declaration and value.name != name:
                value.linkage = "internal"
        machine = object_code.target_machine()
        tuning = llvm.create_pipeline_tuning_options(speed_level=3)
        tuning.loop_vectorization, tuning.slp_vectorization = True, False
        builder = llvm.create_pass_builder(machine, tuning)
        builder.getModulePassManager().run(module, builder)
        if halved:
            module = _halve(module, name)
        return machine.emit_assembly(module) if assembly else machine.emit_object(module)


class _Codegen(codegen.JITCPUCodegen):
    _library_class = _Library

    def _init(self, llvm_module: Any) -> None:
        machine = object_code.target_machine()
        self._tm_features, self._tm, self._engine = cpu.target()[1], machine, None
        self._target_data = machine.target_data
        self._data_layout = str(self._target_data)
        self._loopvect, self._opt_level = False, 0

    def _create_empty_module(self, name: str) -> Any:
        module = super()._create_empty_module(name)
        module.triple = cpu.triple()
        return module

    def _get_host_cpu_name(self) -> str:
        return cpu.target()[0]

    def _get_host_cpu_features(self) -> str:
        return cpu.target()[1]


class _Context(numba_cpu.CPUContext):
    @global_compiler_lock
    def init(self) -> None:
        self.is32bit = False
        self._internal_codegen = _Codegen("ggjit")

    @property
    def enable_boundscheck(self) -> bool:
        """Never, whatever Numba's environment variables say: the objects are kept for processes without them."""
        return False

    @enable_boundscheck.setter
    def enable_boundscheck(self, value: bool) -> None:
        pass

    def post_lowering(self, mod: Any, library: Any) -> None:
        """Numba would link its reference counting here; code that allocates is refused instead."""

    def get_function(self, fn: Any, sig: Any, _firstcall: bool = True) -> Any:
        """What Numba implements in Python (`int`, much of NumPy) is compiled in its own context, linked from there."""
        try:
            return super().get_function(fn, sig, _firstcall)
        except NotImplementedError as missing:
            key = fn.get_impl_key(sig.as_function()) if isinstance(fn, types.Callable) else fn
            try:
                found = registry.cpu_target.target_context._defns[key].find(sig.args)
            except errors.NumbaNotImplementedError:
                raise missing from None
            return _wrap_impl(found, self, sig.as_function())

    def insert_user_function(self, func: Any, fndesc: Any, libs: Any = ()) -> None:
        """Helpers are known to Numba's context too: a helper called from Python may call others."""
        super().insert_user_function(func, fndesc, libs)
        registry.cpu_target.target_context.insert_user_function(func, fndesc, libs)

    def get_executable(self, library: Any, fndesc: Any, env: Any) -> Any:
        """What stands for a compiled helper in Numba's tables; it is only linked, never called from Python."""
        return functools.partial(_not_callable, fndesc.qualname)


def _not_callable(name: str, *args: Any) -> None:
    raise TypeError(f"{name}: this form of the function is for kernels only")


class _Target(registry.CPUTarget):
    @functools.cached_property
    def _toplevel_target_context(self) -> _Context:
        return _Context(self.typing_context, self._target_name)

    @property
    def typing_context(self) -> Any:
        return registry.cpu_target.typing_context


_target = _Target("cpu")


class _Dispatcher(dispatcher.Dispatcher):
    """A helper as kernels see it."""

    targetdescr = _target

    def add_overload(self, cres: Any) -> None:
        self.overloads[tuple(cres.signature.args)] = cres


def helper(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """The form of a helper that kernels call; its `_numba_type_` holds it weakly."""
    targetoptions = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, **options}
    return _Dispatcher(function, targetoptions=targetoptions)


def python_dispatcher(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Numba's ordinary dispatcher, callable from Python."""
    if os.environ.get("GGJIT_CPU") and (config.CPU_NAME, config.CPU_FEATURES) != cpu.target():
        raise RuntimeError(
            f"{function.__name__}: with GGJIT_CPU set, ggjit must be imported and used before numba is, "
            "got numba imported first"
        )
    options = {k: v for k, v in _OPTIONS.items() if k not in ("nopython", "_nrt")} | options
    return numba.njit(**options)(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """The Numba type of a function that emits LLVM IR."""
    return types.Function(make_intrinsic_template(function, function, function.__name__))


# --- C entries --------------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Let Numba load what every compilation needs; done before processes are forked, so that they have it."""
    _target.typing_context.refresh()
    _target.target_context.refresh()


def _compile(function: Callable[..., Any], arguments: tuple[Any, ...], return_type: Any = None) -> Any:
    flags = compiler.Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.no_compile = True  # the entry goes into the same module first
    flags.nrt = False  # an allocation in a kernel is a compile error
    flags.error_model = "numpy"
    prepare()
    typing_context, context = _target.typing_context, _target.target_context
    return compiler.compile_extra(typing_context, context, function, arguments, return_type, flags, {})


def _array(context: Any, b: Any, type_: Any, address: Any, n: Any) -> Any:
    itemsize = ir.Constant(I64, type_.dtype.bitwidth // 8)
    struct = make_array(type_)(context, b)
    data = b.inttoptr(address, context.get_data_type(type_.dtype).as_pointer())
    populate_array(struct, data=data, shape=[n], strides=[itemsize], itemsize=itemsize, meminfo=None)
    return struct._getvalue()


class _KernelEntry:
    """Builds `int64 name(int64 header, int64 task, int64 ith, int64 nth)` around a kernel's native function."""

    def __init__(self, cres: Any, n_src: int, name: str) -> None:
        self.cres, self.n_src = cres, n_src
        self.context = _target.target_context
        self.module = cres.library.create_ir_module(name)
        self.function = ir.Function(self.module, ir.FunctionType(I64, [I64] * 4), name)
        self.b = ir.IRBuilder(self.function.append_basic_block())

    def load(self, address: Any, offset: int) -> Any:
        return self.b.load(self.b.inttoptr(self.b.add(address, I64(offset)), I64.as_pointer()))

    def tensor(self, record: Any) -> list[Any]:
        """data, ne, nb of the record. The data's length is an upper bound: the largest ne * nb."""
        b = self.b
        n = I64(0)
        for d in range(4):
            extent = b.mul(self.load(record, NE_AT + 8 * d), self.load(record, NB_AT + 8 * d))
            n = b.select(b.icmp_signed(">", extent, n), extent, n)
        four = I64(4)
        return [
            _array(self.context, b, U8, self.load(record, DATA_AT), n),
            _array(self.context, b, I64_ARRAY, b.add(record, I64(NE_AT)), four),
            _array(self.context, b, I64_ARRAY, b.add(record, I64(NB_AT)), four),
        ]

    def absent(self) -> Any:
        """Address of an empty record: null data, ne and nb of zeros."""
        type_ = ir.ArrayType(I64, RECORD_SIZE // 8)
        empty = ir.GlobalVariable(self.module, type_, "absent_source")
        empty.linkage, empty.global_constant, empty.initializer = "internal", True, ir.Constant(type_, None)
        return self.b.ptrtoint(empty, I64)

    def build(self) -> Any:
        b, context = self.b, self.context
        header, task, ith, nth = self.function.args
        arguments = self.tensor(header)
        absent = self.absent()
        for k in range(self.n_src):
            source = self.load(header, SRC_AT + 8 * k)
            arguments += self.tensor(b.select(b.icmp_signed("==", source, I64(0)), absent, source))
        arguments += [
            _array(context, b, I32_ARRAY, b.add(header, I64(PARAMS_AT)), I64(16)),
            _array(context, b, U8, self.load(task, 0), self.load(task, 8)),
            ith,
            nth,
        ]
        b.ret(_call_native(self.cres, self.module, b, arguments))
        return self.module


def _call_native(cres: Any, module: Any, b: Any, arguments: list[Any]) -> Any:
    """Call the native function and return its int64 value: 0 for None, -1 if it raised."""
    context, signature = _target.target_context, cres.signature
    convention = context.call_conv
    function_type = convention.get_function_type(signature.return_type, signature.args)
    native = ir.Function(module, function_type, cres.fndesc.llvm_func_name)
    status, value = convention.call_function(b, native, signature.return_type, signature.args, arguments)
    if signature.return_type == types.none:
        value = I64(0)
    else:
        value = context.cast(b, value, signature.return_type, types.int64)
    return b.select(status.is_error, I64(-1), value)


def _check_result(function: Callable[..., Any], return_type: Any, may_be_none: bool) -> None:
    integer = isinstance(return_type, types.Integer | types.IntegerLiteral | types.Boolean)
    if not integer and not (may_be_none and return_type == types.none):
        what = "None or an integer on every path" if may_be_none else "an integer"
        raise TypeError(f"{function.__qualname__}: must return {what}, got Numba type {return_type}")


@global_compiler_lock
def compile_kernel(
    function: Callable[..., Any], n_src: int, name: str, assembly: bool = False, halved: bool = False
) -> bytes | str:
    """Object code (or assembly) of a kernel with the C entry `name`; halved: without registers of 512 bits."""
    tensor = (U8, I64_ARRAY, I64_ARRAY)
    cres = _compile(function, tensor * (1 + n_src) + (I32_ARRAY, U8, types.int64, types.int64))
    _check_result(function, cres.signature.return_type, may_be_none=True)
    cres.library.add_ir_module(_KernelEntry(cres, n_src, name).build())
    return cres.library.emit(name, assembly, halved)


@global_compiler_lock
def compile_words(function: Callable[..., Any], name: str, assembly: bool = False) -> bytes | str:
    """Object code (or assembly) of a function of int64 arguments and result as the plain C function `name`."""
    n_args = len(inspect.signature(function).parameters)
    cres = _compile(function, (types.int64,) * n_args)
    _check_result(function, cres.signature.return_type, may_be_none=False)
    module = cres.library.create_ir_module(name)
    entry = ir.Function(module, ir.FunctionType(I64, [I64] * n_args), name)
    b = ir.IRBuilder(entry.append_basic_block())
    b.ret(_call_native(cres, module, b, list(entry.args)))
    cres.library.add_ir_module(module)
    return cres.library.emit(name, assembly)
