"""Emit a whole kernel body as LLVM IR from Python loops.

A register tile has 100 to 500 vector operations. Written in Numba's language each of them is typed, lowered and inlined
by itself (0.3 to 3 s a tile); emitted by Python loops inside one intrinsic the tile costs LLVM's time alone (tens of
milliseconds).

    @emitted("w y out n")
    def dots(e, w, y, out, n):                 # runs while the calling kernel is compiled; e is an Emit
        acc, = e.loop(n, [e.zero_f32()], lambda i, acc: [e.fma(e.load_f32(w, 0), e.load_f32(y, 0), acc)])
        e.store(out, acc)

`dots(w, y, out, n)` can then be called from kernels with int64 arguments (addresses and counts) and returns nothing.

An operand is 64 bytes: a Python list of one 512-bit, two 256-bit or four 128-bit vectors, and every operation maps over
that list, so one description serves every CPU level:

    avx512   one vector; vpdpbusd
    avx2     two vectors; vpdpbusd where the CPU has AVX-VNNI, else vpmaddubsw
    neon     four vectors; usdot where the CPU has i8mm, sdot where it has dotprod
    sse2     four vectors of plain LLVM operations without target intrinsics (portable)

Numba is imported when a kernel that calls an emitted function is compiled, not before.
"""

from __future__ import annotations

from llvmlite import ir

from ggjit.cpu import has, has_int8_dot
from ggjit.ops.lib.bfloat import BF16
from ggjit.ops.lib.emitted import ROWS, emitted

__all__ = [
    "BF16", "F16", "F32", "I1", "I8", "I16", "I32", "I64", "ROWS", "Emit", "OrderedLoad", "emitted", "transpose",
    "vector",
]  # fmt: skip

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
BITS = {"avx512": 512, "avx2": 256, "neon": 128, "sse2": 128}


def vector(elem, n):
    """LLVM vector type of n elements."""
    return ir.VectorType(elem, n)


class OrderedLoad(ir.instructions.LoadInstr):
    """A volatile load: LLVM keeps these in program order.

    The hardware prefetcher follows memory that is read upwards; the order that the scheduler chooses freely costs up to
    a third of the bandwidth.
    """

    def descr(self, buf):
        """Print the instruction."""
        (ptr,) = self.operands
        buf.append(f"load volatile {self.type}, {ptr.type} {ptr.get_reference()}, align {self.align}\n")


class Emit:
    """Builder of operations on 64-byte operands at one CPU level.

    Args:
        builder: llvmlite IRBuilder, positioned.
        level: as `ggjit.jit.cpu_level` gives it.
    """

    def __init__(self, builder, level):
        self.b, self.level = builder, level
        self.portable = level == "sse2"
        self.int8_dot = has_int8_dot()
        self.mixed_dot = self.int8_dot and (level != "neon" or has("i8mm"))  # unsigned by signed bytes
        self.vbmi = level == "avx512" and has("avx512vbmi")
        self.bits = BITS[level]
        self.parts = 512 // self.bits
        self.lanes = self.bits // 32
        self.nbytes = self.bits // 8

    # ---- scalars and control --------------------------------------------------------------------------------------

    def i64(self, v):
        """Constant of an int; values pass."""
        return ir.Constant(I64, v) if isinstance(v, int) else v

    def add(self, a, c):
        """Add int64 values or ints."""
        if isinstance(a, int) and isinstance(c, int):
            return a + c
        if isinstance(c, int) and c == 0:
            return a
        return self.b.add(self.i64(a), self.i64(c))

    def sub(self, a, c):
        """Subtract c."""
        return self.b.sub(self.i64(a), self.i64(c))

    def mul(self, a, c):
        """Multiply by c."""
        return self.b.mul(self.i64(a), self.i64(c))

    def loop(self, count, carried, body, start=0, step=1):
        """Emit `for i in range(start, count, step): carried = body(i, *carried)`.

        Args:
            count: end, an int or an i64 value.
            carried: list of operands or single values.
            body: called once, at the loop's place; returns the list of new values.
            start: first i.
            step: constant.

        Returns:
            The list of final values.
        """
        b = self.b
        flat, shape = _flatten(carried)
        before = b.block
        head, inside, done = (b.append_basic_block(n) for n in ("head", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        phis = [b.phi(v.type) for v in flat]
        b.cbranch(b.icmp_signed("<", i, self.i64(count)), inside, done)
        b.position_at_end(inside)
        new, _ = _flatten(body(i, *_unflatten(phis, shape)) or [])
        following = b.add(i, self.i64(step))
        last = b.block
        b.branch(head)
        i.add_incoming(self.i64(start), before)
        i.add_incoming(following, last)
        for phi, first, value in zip(phis, flat, new, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, last)
        b.position_at_end(done)
        return _unflatten(phis, shape)

    def if_else(self, condition, then, otherwise):
        """Emit then() where the condition holds, otherwise() where not; neither returns values."""
        with self.b.if_else(condition) as (yes, no):
            with yes:
                then()
            with no:
                otherwise()

    def call(self, name, ret, *args):
        """Call of an LLVM intrinsic, declared by the types of its arguments."""
        function = self.b.module.globals.get(name)
        if function is None:
            function = ir.Function(self.b.module, ir.FunctionType(ret, [a.type for a in args]), name)
        return self.b.call(function, args)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def ptr(self, address, offset, t):
        """Typed pointer to address + offset, by getelementptr so that LLVM folds constant offsets."""
        p = self.b.inttoptr(address, I8.as_pointer())
        if not isinstance(offset, int) or offset:
            p = self.b.gep(p, [self.i64(offset)])
        return self.b.bitcast(p, t.as_pointer())

    def load(self, address, offset, t):
        """One unaligned load of LLVM type t."""
        return self.b.load(self.ptr(address, offset, t), align=1)

    def load_ordered(self, address, offset, t):
        """One load that keeps its place among the ordered loads: for weights, which are read upwards."""
        ld = OrderedLoad(self.b.block, self.ptr(address, offset, t), typ=t)
        ld.align = 1
        self.b._insert(ld)
        return ld

    def store_value(self, address, offset, v):
        """One unaligned store."""
        self.b.store(v, self.ptr(address, offset, v.type), align=1)

    def _loads(self, address, offset, t, ordered=False):
        """Parts of lanes or bytes of vector type t, one after the other."""
        load = self.load_ordered if ordered else self.load
        size = t.count * ({F32: 4, F16: 2}.get(t.element) or t.element.width // 8)
        return [load(address, self.add(offset, p * size), t) for p in range(self.parts)]

    def load_bytes(self, address, offset=0):
        """64 weight bytes, in order."""
        return self._loads(address, offset, vector(I8, self.nbytes), ordered=True)

    def load_f32(self, address, offset=0, ordered=False):
        """16 f32."""
        return self._loads(address, offset, vector(F32, self.lanes), ordered)

    def load_i32(self, address, offset=0, ordered=False):
        """16 i32."""
        return self._loads(address, offset, vector(I32, self.lanes), ordered)

    def load_f16(self, address, offset=0, ordered=False):
        """16 f16 as f32."""
        if self.portable:
            return self.halves_to_f32(self._loads(address, offset, vector(I16, self.lanes), ordered))
        return self.map(
            lambda v: self.b.fpext(v, vector(F32, self.lanes)),
            self._loads(address, offset, vector(F16, self.lanes), ordered),
        )

    def load_bf16(self, address, offset=0, ordered=False):
        """16 bf16 as f32."""
        x = self._loads(address, offset, vector(I16, self.lanes), ordered)
        return self.bits_to_f32(self.shl_i32(self.map(lambda v: self.b.zext(v, vector(I32, self.lanes)), x), 16))

    def load_u8_as_i32(self, address, offset=0, signed=False):
        """16 bytes as i32."""
        extend = self.b.sext if signed else self.b.zext
        return self.map(
            lambda v: extend(v, vector(I32, self.lanes)), self._loads(address, offset, vector(I8, self.lanes))
        )

    def store(self, address, parts, offset=0):
        """64 bytes."""
        for p, v in enumerate(parts):
            self.store_value(address, self.add(offset, p * self.nbytes), v)

    def first(self, n):
        """Masks of the first n (i64) of 16 lanes; none if n <= 0."""
        count = self.b.trunc(n, I32)
        return [
            self.b.icmp_signed(
                "<",
                ir.Constant(vector(I32, self.lanes), list(range(p * self.lanes, (p + 1) * self.lanes))),
                self.splat(count),
            )
            for p in range(self.parts)
        ]

    def store_first(self, address, parts, n, offset=0):
        """The first n (i64) lanes of an f32 or i32 operand."""
        name = f"llvm.masked.store.v{self.lanes}{'f' if parts[0].type.element == F32 else 'i'}32.p0"
        for p, (v, mask) in enumerate(zip(parts, self.first(n), strict=True)):
            at = self.ptr(address, self.add(offset, p * self.nbytes), v.type)
            self.call(name, ir.VoidType(), v, at, ir.Constant(I32, 1), mask)

    def load_first(self, address, n, offset=0):
        """The first n (i64) f32, zeros after."""
        t, out = vector(F32, self.lanes), []
        for p, mask in enumerate(self.first(n)):
            at = self.ptr(address, self.add(offset, p * self.nbytes), t)
            out.append(
                self.call(
                    f"llvm.masked.load.v{self.lanes}f32.p0", t, at, ir.Constant(I32, 1), mask, ir.Constant(t, None)
                )
            )
        return out

    def prefetch(self, address, offset=0):
        """Prefetch a line to L2.

        Only where arithmetic takes longer than memory, for every line, before the loads: a kernel bound by memory loses
        a quarter by it.
        """
        at, k = self.ptr(address, offset, I8), [ir.Constant(I32, v) for v in (0, 2, 1)]
        self.call("llvm.prefetch.p0", ir.VoidType(), at, *k)

    # ---- splats and constants -------------------------------------------------------------------------------------

    def splat(self, scalar, lanes=None):
        """One vector with the scalar in every lane."""
        n = lanes or self.lanes
        v = self.b.insert_element(ir.Constant(vector(scalar.type, n), ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(v, v, ir.Constant(vector(I32, n), [0] * n))

    def splat_f32(self, address, offset=0):
        """One f32 of memory in 16 lanes."""
        return [self.splat(self.load(address, offset, F32))] * self.parts

    def splat_f16(self, address, offset=0):
        """One f16 of memory as f32 in 16 lanes."""
        if self.portable:
            return self.halves_to_f32([self.splat(self.load(address, offset, I16))] * self.parts)
        return [self.splat(self.b.fpext(self.load(address, offset, F16), F32))] * self.parts

    def splat_u8(self, address, offset=0):
        """One byte of memory as i32 in 16 lanes."""
        return [self.splat(self.b.zext(self.load(address, offset, I8), I32))] * self.parts

    def splat_i8_as_f32(self, address, offset=0):
        """One int8 of memory as f32 in 16 lanes."""
        return [self.splat(self.b.sitofp(self.load(address, offset, I8), F32))] * self.parts

    def splat_i32(self, address, offset=0):
        """One i32 of memory in 16 lanes."""
        return [self.splat(self.load(address, offset, I32))] * self.parts

    def splat4(self, address, offset=0):
        """Four bytes of memory repeated 16 times."""
        return [self.b.bitcast(self.splat(self.load(address, offset, I32)), vector(I8, self.nbytes))] * self.parts

    def zero_f32(self):
        """16 f32 zeros."""
        return [ir.Constant(vector(F32, self.lanes), None)] * self.parts

    def zero_i32(self):
        """16 i32 zeros."""
        return [ir.Constant(vector(I32, self.lanes), None)] * self.parts

    def bytes_const(self, v):
        """64 equal bytes."""
        return [ir.Constant(vector(I8, self.nbytes), [v & 255] * self.nbytes)] * self.parts

    def f32_const(self, v):
        """16 equal f32."""
        return [ir.Constant(vector(F32, self.lanes), [v] * self.lanes)] * self.parts

    def i32_const(self, v):
        """16 equal i32."""
        return [ir.Constant(vector(I32, self.lanes), [v] * self.lanes)] * self.parts

    def i32_lanes(self, values):
        """16 i32 of a list."""
        n = self.lanes
        return [ir.Constant(vector(I32, n), list(values[n * p : n * (p + 1)])) for p in range(self.parts)]

    # ---- f32 ------------------------------------------------------------------------------------------------------

    def map(self, f, *operands):
        """Apply f to the parts of operands."""
        return [f(*xs) for xs in zip(*operands, strict=True)]

    def fma(self, x, y, z):
        """Fused x * y + z with one rounding; at the portable level with one or two, as the target has it."""
        name = f"llvm.{'fmuladd' if self.portable else 'fma'}.v{self.lanes}f32"
        return self.map(lambda a, c, d: self.call(name, a.type, a, c, d), x, y, z)

    def fmul(self, x, y):
        """Multiply f32."""
        return self.map(self.b.fmul, x, y)

    def fadd(self, x, y):
        """Add f32."""
        return self.map(self.b.fadd, x, y)

    def fsub(self, x, y):
        """Subtract f32."""
        return self.map(self.b.fsub, x, y)

    def fneg(self, x):
        """-x."""
        return self.map(self.b.fneg, x)

    def fmax(self, x, y):
        """Larger of two; y where either is NaN (maxps)."""
        return self.map(lambda a, c: self.b.select(self.b.fcmp_ordered(">", a, c), a, c), x, y)

    def fabs(self, x):
        """|x|."""
        return self.bits_to_f32(self.map(self.b.and_, self.f32_bits(x), self.i32_const(0x7FFFFFFF)))

    def to_f32(self, x):
        """i32 as f32."""
        return self.map(lambda v: self.b.sitofp(v, vector(F32, self.lanes)), x)

    def f32_bits(self, x):
        """The bits of f32 as i32."""
        return self.map(lambda v: self.b.bitcast(v, vector(I32, self.lanes)), x)

    def bits_to_f32(self, x):
        """i32 taken as the bits of f32."""
        return self.map(lambda v: self.b.bitcast(v, vector(F32, self.lanes)), x)

    def rint_i32(self, x):
        """f32 rounded to the nearest integer, ties to even, as i32; |x| must be below 2^22.

        Adds 1.5 * 2^23, where one unit is one bit of the mantissa: the same two instructions at every level.
        """
        big = self.f32_bits(self.fadd(x, self.f32_const(12582912.0)))
        return self.map(self.b.sub, big, self.i32_const(0x4B400000))

    def halves_to_f32(self, x):
        """16 f16 given as i16, to f32 by integer code: subnormals, infinities and NaN included."""
        h = self.map(lambda v: self.b.zext(v, vector(I32, self.lanes)), x)
        sign = self.shl_i32(self.map(self.b.and_, h, self.i32_const(0x8000)), 16)
        mag = self.shl_i32(self.map(self.b.and_, h, self.i32_const(0x7FFF)), 13)
        value = self.f32_bits(self.fmul(self.bits_to_f32(mag), self.f32_const(2.0**112)))
        special = self.map(self.b.or_, mag, self.i32_const(0x7F800000))
        value = self.map(
            lambda m, v, s: self.b.select(
                self.b.icmp_signed(">=", m, ir.Constant(m.type, [0x7C00 << 13] * self.lanes)), s, v
            ),
            mag,
            value,
            special,
        )
        return self.bits_to_f32(self.map(self.b.or_, value, sign))

    # ---- bytes and i32 --------------------------------------------------------------------------------------------

    def iadd(self, x, y):
        """Add i32, or bytes."""
        return self.map(self.b.add, x, y)

    def shl_i32(self, x, n):
        """i32 shifted left."""
        return x if n == 0 else self.map(self.b.shl, x, self.i32_const(n))

    def shr_i32(self, x, n):
        """i32 shifted right, zeros in."""
        return x if n == 0 else self.map(self.b.lshr, x, self.i32_const(n))

    def sar_i32(self, x, n):
        """i32 shifted right, the sign in; left if n is negative."""
        return self.map(self.b.ashr, x, self.i32_const(n)) if n > 0 else self.shl_i32(x, -n)

    def shr_lanes(self, x, first):
        """i32 of lane i shifted right by first + i (below 32), zeros in."""
        places = [
            ir.Constant(vector(I32, self.lanes), [first + p * self.lanes + i for i in range(self.lanes)])
            for p in range(self.parts)
        ]
        return self.map(self.b.lshr, x, places)

    def and_i32(self, x, n):
        """i32 masked by a constant."""
        return self.map(self.b.and_, x, self.i32_const(n))

    def and_(self, x, c):
        """Bytes masked by a byte constant or an operand."""
        return self.map(self.b.and_, x, self.bytes_const(c) if isinstance(c, int) else c)

    def or_(self, x, y):
        """Bitwise or."""
        return self.map(self.b.or_, x, y)

    def xor(self, x, c):
        """Exclusive or with a byte constant or an operand."""
        return self.map(self.b.xor, x, self.bytes_const(c) if isinstance(c, int) else c)

    def shr(self, x, n):
        """Bytes shifted right; bits of the neighbour byte come in (a 16-bit shift): mask afterwards."""
        return self._shift16(x, n, self.b.lshr)

    def shl(self, x, n):
        """Bytes shifted left; bits of the neighbour byte come in."""
        return self._shift16(x, n, self.b.shl)

    def _shift16(self, x, n, shift):
        if n == 0:
            return x
        half = vector(I16, self.nbytes // 2)
        k = ir.Constant(half, [n] * half.count)
        return self.map(lambda v: self.b.bitcast(shift(self.b.bitcast(v, half), k), v.type), x)

    def plane_as_i32(self, x, plane, signed=False):
        """16 bytes number `plane` (0 to 3) of a 64-byte operand as i32."""
        extend, out = self.b.sext if signed else self.b.zext, []
        for p in range(self.parts):
            at = plane * 16 + p * self.lanes
            source = x[at // self.nbytes]
            index = ir.Constant(vector(I32, self.lanes), [at % self.nbytes + i for i in range(self.lanes)])
            out.append(extend(self.b.shuffle_vector(source, source, index), vector(I32, self.lanes)))
        return out

    def lookup16(self, x, table):
        """table[x] of 16 bytes for indices below 16 (vpshufb, tbl; selects at the portable level)."""
        if self.portable:
            out = self.bytes_const(table[0])
            for i, value in enumerate(table[1:], 1):
                out = self.map(
                    lambda v, k, o, c: self.b.select(self.b.icmp_unsigned("==", v, k), c, o),
                    x,
                    self.bytes_const(i),
                    out,
                    self.bytes_const(value),
                )
            return out
        name = {512: "llvm.x86.avx512.pshuf.b.512", 256: "llvm.x86.avx2.pshuf.b", 128: "llvm.aarch64.neon.tbl1.v16i8"}[
            self.bits
        ]
        t = ir.Constant(vector(I8, self.nbytes), [v & 255 for v in table] * (self.nbytes // 16))
        return self.map(lambda v: self.call(name, v.type, t, v), x)

    def lookup64(self, x, table):
        """table[x & 63] of 64 bytes (vpermb, where `vbmi` says so)."""
        t = ir.Constant(vector(I8, 64), [v & 255 for v in table])
        return self.map(lambda v: self.call("llvm.x86.avx512.permvar.qi.512", v.type, t, v), x)

    # ---- dot products ---------------------------------------------------------------------------------------------

    def dot4(self, acc, u, s):
        """Return acc + sum over each four bytes of u (unsigned) * s (signed, -127 .. 127), exact.

        Where the CPU has no dot product of unsigned by signed bytes (`mixed_dot`) u must be at most 127: vpmaddubsw
        saturates 16-bit sums of two products (`pairs` and `pairs_to_i32` are its two steps), and sdot takes signed
        bytes alone. Any u will do where there is no instruction at all.
        """
        if self.level == "avx2" and not self.int8_dot:
            return self.iadd(acc, self.pairs_to_i32(self.pairs(u, s)))
        if not self.int8_dot:
            return self.map(lambda a, x, y: self.b.add(a, self._dot4_portable(x, y)), acc, u, s)
        name = f"llvm.x86.avx512.vpdpbusd.{self.bits}"
        if self.level == "neon":
            name = f"llvm.aarch64.neon.{'usdot' if self.mixed_dot else 'sdot'}.v4i32.v16i8"
        return self.map(lambda a, x, y: self.call(name, a.type, a, x, y), acc, u, s)

    def pairs(self, u, s):
        """Level "avx2": i16 sums of byte pairs (vpmaddubsw)."""
        return self.map(lambda x, y: self.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), x, y), u, s)

    def pairs_to_i32(self, p):
        """Level "avx2": i32 sums of i16 pairs (vpmaddwd with ones)."""
        ones = ir.Constant(vector(I16, 16), [1] * 16)
        return self.map(lambda x: self.call("llvm.x86.avx2.pmadd.wd", vector(I32, 8), x, ones), p)

    def _dot4_portable(self, u, s):
        """16 bytes by 16 bytes to 4 i32. A product fits i16 (255 * 127); LLVM makes pmaddwd of the pair sums."""
        b, wide = self.b, vector(I16, self.nbytes)
        x, y = b.zext(u, wide), b.sext(s, wide)
        products = []
        for odd in (0, 1):
            index = ir.Constant(vector(I32, self.nbytes // 2), list(range(odd, self.nbytes, 2)))
            half = vector(I32, self.nbytes // 2)
            products.append(
                b.mul(b.sext(b.shuffle_vector(x, x, index), half), b.sext(b.shuffle_vector(y, y, index), half))
            )
        sums = b.add(*products)
        even, odd = (
            b.shuffle_vector(sums, sums, ir.Constant(vector(I32, self.lanes), list(range(o, 2 * self.lanes, 2))))
            for o in (0, 1)
        )
        return b.add(even, odd)

    def dot2_bf16(self, acc, x, y):
        """Return acc + x[2i] * y[2i] + x[2i+1] * y[2i+1] of bf16 pairs in 64 bytes, where `cpu.has_bf16_dot` says so.

        The instruction is vdpbf16ps or bfdot; which of the sums are rounded is up to the CPU.
        """
        name = f"llvm.x86.avx512bf16.dpbf16ps.{self.bits}"
        if self.level == "neon":
            name = "llvm.aarch64.neon.bfdot.v4f32.v8bf16"
        t = vector(BF16, 2 * self.lanes)
        return self.map(
            lambda a, u, v: self.call(name, a.type, a, self.b.bitcast(u, t), self.b.bitcast(v, t)), acc, x, y
        )


def transpose(e, rows):
    """L vectors of L lanes, L a power of two: lane i of vector j becomes lane j of vector i."""
    rows, n, width = list(rows), len(rows), 1
    index = vector(I32, n)
    while width < n:  # exchange one bit of the vector's and the lane's number
        low = ir.Constant(index, [i if not i & width else n + i - width for i in range(n)])
        high = ir.Constant(index, [i + width if not i & width else n + i for i in range(n)])
        for i in range(n):
            if not i & width:
                x, y = rows[i], rows[i + width]
                rows[i], rows[i + width] = e.b.shuffle_vector(x, y, low), e.b.shuffle_vector(x, y, high)
        width *= 2
    return rows


def _flatten(values):
    flat, shape = [], []
    for v in values:
        if isinstance(v, list):
            flat += v
            shape.append(len(v))
        else:
            flat.append(v)
            shape.append(None)
    return flat, shape


def _unflatten(flat, shape):
    out, i = [], 0
    for n in shape:
        out.append(flat[i] if n is None else list(flat[i : i + n]))
        i += 1 if n is None else n
    return out
