"""Loops that do one thing as fast as the core can: what `ggjit.limits` times.

    read_bytes     full-width loads, nothing else (the xor keeps the compiler from dropping them)
    copy_bytes     full-width loads and ordinary stores
    dot_chains     the instructions of an int8 dot product, in chains that do not wait for each other
    fma_chains     f32 multiply-add, the same

The chains work on registers alone. An operand that would let LLVM take a product out of the loop passes through an
empty piece of assembly, which costs no instruction but hides its value.
"""

from ggjit.jit import lazy_module
from ggjit.ops.lib.emitted import emitted

ir = lazy_module("llvmlite.ir")
emit = lazy_module("ggjit.ops.lib.emit")

STEP = 512  # bytes a turn of the read and copy loops
CHAINS = {"avx512": 24, "avx2": 12, "neon": 24}  # as many as leave registers for the operands
CHAINS_PORTABLE = 10


def dot_ops(level):
    """Operations of one turn of `dot_chains`: a product and a sum count as two."""
    return CHAINS.get(level, CHAINS_PORTABLE) * {"avx512": 128, "avx2": 64, "neon": 32}.get(level, 16)


def fma_ops(level):
    """Operations of one turn of `fma_chains`."""
    return CHAINS.get(level, CHAINS_PORTABLE) * {"avx512": 32, "avx2": 16}.get(level, 8)


def _hidden(e, value):
    """The same value, unknown to the optimiser."""
    register = "w" if e.level == "neon" else "x"
    return e.b.asm(ir.FunctionType(value.type, [value.type]), "", f"={register},0", [value], False)


def _store_all(e, out, chains):
    for i, v in enumerate(chains):
        e.store_value(out, i * 64, v)


@emitted("p n out")
def read_bytes(e, p, n, out):
    """Read n bytes (a multiple of STEP) at p upwards; the xor of all 64-byte pieces goes to out."""
    n_sums = max(1, 4 // e.parts)

    def body(i, *sums):
        sums, at = list(sums), e.add(p, i)
        for j in range(STEP // 64):
            sums[j % n_sums] = e.xor(sums[j % n_sums], e.load_bytes(at, j * 64))
        return sums

    sums = e.loop(n, [e.bytes_const(0)] * n_sums, body, step=STEP)
    total = sums[0]
    for s in sums[1:]:
        total = e.xor(total, s)
    e.store(out, total)


@emitted("p n out")
def copy_bytes(e, p, n, out):
    """Copy n bytes (a multiple of STEP) from p to out."""

    def body(i):
        source, target = e.add(p, i), e.add(out, i)
        for j in range(STEP // 64):
            e.store(target, e.load_bytes(source, j * 64), j * 64)
        return []

    e.loop(n, [], body, step=STEP)


@emitted("p n out")
def dot_chains(e, p, n, out):
    """n turns of CHAINS dot products of 8-bit operands at p and p + 64 (below 128, so that no level saturates)."""
    zero = e.zero_i32()[0]
    if e.portable:
        x, y = (e.load(p, offset, emit.vector(emit.I16, 8)) for offset in (0, 64))
    else:
        x, y = e.load_bytes(p)[0], e.load_bytes(p, 64)[0]

    def body(i, x, *sums):
        new = []
        for s in sums:
            if e.level != "avx512":
                x = _hidden(e, x)
            new.append(e.b.add(s, _pair_sums(e, x, y)) if e.portable else e.dot4([s], [x], [y])[0])
        return [x, *new]

    _store_all(e, out, e.loop(n, [x, *[zero] * CHAINS.get(e.level, CHAINS_PORTABLE)], body)[1:])


def _pair_sums(e, x, y):
    """Sums of the products of i16 pairs, in the form that LLVM makes pmaddwd of on x86."""
    wide = emit.vector(emit.I32, 8)
    products = e.b.mul(e.b.sext(x, wide), e.b.sext(y, wide))
    index = (ir.Constant(emit.vector(emit.I32, 4), [odd, odd + 2, odd + 4, odd + 6]) for odd in (0, 1))
    return e.b.add(*(e.b.shuffle_vector(products, products, i) for i in index))


@emitted("p n out")
def fma_chains(e, p, n, out):
    """n turns of CHAINS f32 multiply-adds with the operands at p and p + 64."""
    zero = e.zero_f32()[0]
    x, y = e.load_f32(p)[0], e.load_f32(p, 64)[0]

    def body(i, x, *sums):
        new = []
        for s in sums:
            if e.level not in CHAINS:
                x = _hidden(e, x)
            new.append(e.fma([x], [y], [s])[0])
        return [x, *new]

    _store_all(e, out, e.loop(n, [x, *[zero] * CHAINS.get(e.level, CHAINS_PORTABLE)], body)[1:])
