"""The decorator of emitted kernel bodies, in a module of its own: importing it imports neither llvmlite nor Numba."""

from ggjit.jit import Intrinsic, cpu_level

ROWS = 16  # of a panel


class Emitted(Intrinsic):
    """An emit function that kernels call with int64 arguments; it runs while they are compiled."""

    def _make(self):
        from numba import types

        from ggjit import numba_entry
        from ggjit.ops.lib.emit import Emit

        code = self.function.__code__
        names = code.co_varnames[1 : code.co_argcount]
        signature = types.void(*[types.int64] * len(names))

        def codegen(context, builder, sig, args):
            self.function(Emit(builder, cpu_level()), *args)
            return context.get_dummy_value()

        # Numba reads the number of arguments from the definition, so it is made with the right one.
        scope = {"signature": signature, "codegen": codegen}
        exec(f"def {self.__name__}(typingctx, {', '.join(names)}):\n    return signature, codegen\n", scope)
        return numba_entry.intrinsic(scope[self.__name__])


def emitted(names):
    """Make an emit function callable from kernels (see `ggjit.ops.lib.emit`).

    Args:
        names: the names of its int64 parameters, separated by blanks; the function takes an Emit before them.
    """

    def decorate(function):
        code = function.__code__
        given = " ".join(code.co_varnames[1 : code.co_argcount])
        if given != names:
            raise TypeError(f"{function.__qualname__}: an emit function must take (e, {names}), got (e, {given})")
        return Emitted(function)

    return decorate
