"""Types whose weights are points of a codebook (`ggjit.ops.quants.grids`) with signs or shifts: IQ1, IQ2 and IQ3.

A type gives, for a file block, codes of 3 or 4 bits: each names one of up to 16 values, sign or shift included. From
these come the values (weight = d * factor * (2 * scale + 1) * value) and the panel, which holds codes instead of
indices: the operands are then one byte shuffle away, while indices would need gathers.

Panel block: 16 d f16 | 4 pairs of runs, each

    scales   4 bits: of the even run in the low, of the odd run in the high halves of one plane; or a plane a run, the
             first 16 weights in the low, the others in the high halves
    codes    of 4 bits: 4 operands a run, k-group g in the low, k-group g + 4 in the high halves
             of 3 bits: 3 operands a run, operand i with k-group 2 i in bits 0..2 and 2 i + 1 in bits 3..5; bits 6..7
             have two bits each of the codes of k-groups 6 and 7

Code of blocks is emitted: x is the block's address, runs are numbered from 0 to 7, words are i32 with four codes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ggjit.jit import Jitted, jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants.grids import grid
from ggjit.ops.quants.lookup import bytes_as_i32, values
from ggjit.ops.quants.nibbles import load_nibbles
from ggjit.ops.quants.quant import Bytes, Floats, Panel, Part, Quant, register
from ggjit.types import Type

emit = lazy_module("ggjit.ops.lib.emit")
memory = lazy_module("ggjit.ops.lib.memory")

IQ2_VALUES = (8, 25, 43, 0, -8, -25, -43, 0)
IQ1_VALUES = (-7, 1, 9, 0, -9, -1, 7, 0)  # 8 times -1, 0, 1, shifted by 1 or -1


class Codebook(NamedTuple):
    """What a file of a codebook type tells.

    Attributes:
        type_name, type_size: of the type.
        table: entries of the codebook, 4 or 8 codes each, as bytes.
        entry: codes of an entry.
        values: of a code, 8 or 16.
        factor: of the values.
        words: (e, x, run, Table) -> the 8 words of a run.
        scales: (e, x, run) -> scale of a run as i32, or of its two halves: a list.
        d: (e, x) -> bits of d as i16.
        scales_per_run: 1 or 2.
    """

    type_name: str
    type_size: int
    table: bytes
    entry: int
    values: tuple[int, ...]
    factor: float
    words: Callable[..., Any]
    scales: Callable[..., Any]
    d: Callable[..., Any]
    scales_per_run: int


# ---- NumPy ---------------------------------------------------------------------------------------------------------


def with_parity(signs: Bytes) -> Bytes:
    """Seven signs and the eighth, so that an even number of them is set."""
    return np.bitwise_or(signs, (np.bitwise_count(signs) & 1) << 7, dtype=np.uint8)


def sign_of(signs: Bytes) -> Floats:
    """1 or -1 for each bit: [..., 8]."""
    return np.where(signs[..., None] >> np.arange(8, dtype=np.uint8) & 1, np.float32(-1), np.float32(1))


def halves(b: Bytes) -> Bytes:
    """Low and high 4 bits of bytes, one after the other: [..., 2 n]."""
    return np.stack([b & 15, b >> 4], -1).reshape(*b.shape[:-1], -1)


# ---- emitted: bits of a block --------------------------------------------------------------------------------------


class Table:
    """A constant table of codes in the module of the kernel.

    Args:
        e: the Emit.
        data: its bytes.
        entry: bytes of an entry.
    """

    def __init__(self, e, data, entry):
        ir, module = emit.ir, e.b.module
        name = f"codebook.{hashlib.sha256(data).hexdigest()[:16]}"
        found = module.globals.get(name)
        if found is None:
            t = ir.ArrayType(emit.I8, len(data))
            found = ir.GlobalVariable(module, t, name)
            found.linkage, found.global_constant, found.align = "internal", True, 64
            found.initializer = ir.Constant(t, bytearray(data))
        self.e, self.entry, self.address = e, entry, e.b.ptrtoint(found, emit.I64)

    def words(self, index):
        """The codes of an entry, four to a word."""
        at = self.e.add(self.address, self.e.mul(self.e.b.zext(index, emit.I64), self.entry))
        return [self.e.load(at, 4 * i, emit.I32) for i in range(self.entry // 4)]


def load_int(e, x, offset, nbytes=1):
    """An unsigned integer of 1, 2 or 4 bytes of a block as i32."""
    v = e.load(x, offset, emit.ir.IntType(8 * nbytes))
    return v if nbytes == 4 else e.b.zext(v, emit.I32)


def bits(e, v, first, n):
    """n bits of an i32."""
    v = e.b.lshr(v, emit.I32(first)) if first else v
    return e.b.and_(v, emit.I32((1 << n) - 1))


def joined(e, low, high, shift):
    """low | high << shift."""
    return e.b.or_(low, e.b.shl(high, emit.I32(shift)))


def eight_signs(e, seven):
    """Seven signs and the eighth by parity."""
    count = e.call("llvm.ctpop.i32", emit.I32, seven)
    return joined(e, seven, bits(e, count, 0, 1), 7)


def add_signs(e, words, signs, bit):
    """Eight signs into bit `bit` of two words of codes."""
    out = []
    for half, word in enumerate(words):
        spread = e.b.mul(bits(e, signs, 4 * half, 4), emit.I32(0x00204081))
        out.append(joined(e, word, e.b.and_(spread, emit.I32(0x01010101)), bit))
    return out


def load_d(e, x, offset=0):
    """The bits of an f16."""
    return e.load(x, offset, emit.I16)


# ---- emitted: values, panels ---------------------------------------------------------------------------------------


def make_dequantize_blocks(book):
    """Emitted (src, dst, n): values of n blocks."""
    words_of, scales_of, d_of = book.words, book.scales, book.d
    factor, nbytes, table, entry = book.factor, book.type_size, book.table, book.entry
    of_code = tuple(book.values) * (16 // len(book.values))

    @emitted("src dst n")
    def dequantize_blocks(e, src, dst, n):
        entries = Table(e, table, entry)

        def body(i):
            x, y = e.add(src, e.mul(i, nbytes)), e.add(dst, e.mul(i, 1024))
            d = e.fmul(e.halves_to_f32([e.splat(d_of(e, x))] * e.parts), e.f32_const(factor))
            for run in range(8):
                words, scales = words_of(e, x, run, entries), scales_of(e, x, run)
                for half in range(2):
                    scale = [e.splat(joined(e, emit.I32(1), scales[half % len(scales)], 1))] * e.parts
                    v = emit.ir.Constant(emit.vector(emit.I32, 4), emit.ir.Undefined)
                    for k, word in enumerate(words[4 * half : 4 * half + 4]):
                        v = e.b.insert_element(v, word, emit.I32(k))
                    q = bytes_as_i32(e, e.b.bitcast(v, emit.vector(emit.I8, 16)))
                    e.store(y, e.fmul(values(e, q, of_code), e.fmul(d, e.to_f32(scale))), 128 * run + 64 * half)
            return []

        e.loop(n, [], body)

    return dequantize_blocks


def _code_words(e, w, code_bits):
    """The words of a run's operands."""
    if code_bits == 4:
        return [joined(e, w[g], w[g + 4], 4) for g in range(4)]
    last = joined(e, w[6], w[7], 3)
    mask = emit.I32(0x03030303)
    tops = [e.b.and_(e.b.lshr(last, emit.I32(2 * i)), mask) for i in range(3)]
    return [joined(e, joined(e, w[2 * i], w[2 * i + 1], 3), tops[i], 6) for i in range(3)]


def _sizes(book):
    """Bits of a code, bytes of the scales of a pair of runs, of its codes."""
    code_bits = 3 if len(book.values) == 8 else 4
    return code_bits, 16 * book.scales_per_run, 2 * 64 * code_bits


def make_pack(book):
    """Emitted (x, to, row): the block at x to a row's places in the panel block at `to`."""
    words_of, scales_of, d_of, table, entry = book.words, book.scales, book.d, book.table, book.entry
    code_bits, scale_nbytes, codes_nbytes = _sizes(book)
    n_operands, per_run = codes_nbytes // 128, book.scales_per_run

    @emitted("x to row")
    def pack(e, x, to, row):
        entries = Table(e, table, entry)
        e.store_value(e.add(to, e.mul(row, 2)), 0, d_of(e, x))
        of_row, of_word = e.add(to, row), e.add(to, e.mul(row, 4))
        for pair in range(4):
            at = 32 + pair * (scale_nbytes + codes_nbytes)
            scales = [s for run in (0, 1) for s in scales_of(e, x, 2 * pair + run)]
            for plane in range(per_run):
                s = joined(e, scales[2 * plane], scales[2 * plane + 1], 4)
                e.store_value(of_row, at + 16 * plane, e.b.trunc(s, emit.I8))
            for run in range(2):
                words = _code_words(e, words_of(e, x, 2 * pair + run, entries), code_bits)
                for i, word in enumerate(words):
                    e.store_value(of_word, at + scale_nbytes + 64 * (n_operands * run + i), word)

    return pack


def _operands(e, w, offset, code_bits, table):
    """The 8 operands of a run: entries of a table by codes."""
    if code_bits == 4:
        return [e.lookup16(v, table) for v in load_nibbles(e, w, offset)]
    x = [e.load_bytes(w, offset + 64 * i) for i in range(3)]
    last = e.or_(e.and_(e.shr(x[0], 6), 0x03), e.and_(e.shr(x[1], 4), 0x0C))
    last = e.or_(last, e.and_(e.shr(x[2], 2), 0x30))
    out = []
    for v in [*x, last]:
        if e.vbmi:  # indices of 6 bits: neither mask nor shift
            out += [e.lookup64(v, table * 8), e.lookup64(v, [t for t in table for _ in range(8)])]
        else:
            out += [e.lookup16(e.and_(v, 7), table * 2), e.lookup16(e.and_(e.shr(v, 3), 7), table * 2)]
    return out


def make_panel(book):
    """The `Panel` of a type."""
    code_bits, scale_nbytes, codes_nbytes = _sizes(book)
    factor, per_run = book.factor, book.scales_per_run
    top = max(map(abs, book.values))
    offset_shift = top.bit_length()
    table = [v + (1 << offset_shift) for v in book.values]
    pack = make_pack(book)

    @jitted
    def pack_block(src, src_offs, dst, dst_offs, row):
        pack(memory.address(src) + src_offs, memory.address(dst) + dst_offs, row)

    def runs(e, w, step):
        d, w = e.fmul(e.load_f16(w), e.f32_const(factor)), e.add(w, e.add(e.mul(step, scale_nbytes + codes_nbytes), 32))
        planes = [e.load_u8_as_i32(w, 16 * plane) for plane in range(per_run)]
        scales = [s for p in planes for s in (e.and_i32(p, 15), e.shr_i32(p, 4))]
        scales = [e.to_f32(e.or_(e.shl_i32(s, 1), e.i32_const(1))) for s in scales]
        out = []
        for run in range(2):
            x = _operands(e, w, scale_nbytes + codes_nbytes // 2 * run, code_bits, table)
            n = 8 // per_run
            parts = [
                Part(x[n * j : n * (j + 1)], e.fmul(d, scales[per_run * run + j]), offset_shift) for j in range(per_run)
            ]
            out.append(parts)
        return out

    nbytes = 32 + 4 * (scale_nbytes + codes_nbytes)
    return Panel(
        256, nbytes, max(table), pack_block, runs, steps=4, parts=per_run, offset_shift=offset_shift
    )  # fmt: skip


def register_codebook(
    type: Type,
    book: Codebook,
    quantize: Callable[..., Bytes],
    dequantize: Callable[[Bytes], Floats],
    quantize_weighted: Jitted,
    panel: Panel | None = None,
    needs_imatrix: bool = False,
) -> Quant:
    """Make a type's code known; its panel is that of codes unless one is given.

    Nothing is quantized to it while a graph runs: that takes a long search.
    """
    size = type.blck_size
    dequantize_blocks = make_dequantize_blocks(book)

    @jitted
    def dequantize_row(src, src_offs, dst, dst_offs, n):
        dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // size)

    return register(
        Quant(
            *(type, quantize, dequantize, None, dequantize_row, panel or make_panel(book), True),
            *(quantize_weighted, needs_imatrix),
        )
    )


def table_of(name: str) -> bytes:
    """The codebook of a type as bytes."""
    return grid(name).tobytes()
