"""Packing 16 rows at a time: words of 16 rows as operands, by transposing.

    rows = RowWords(e, src, stride, n_rows).at(offset)
    low = rows.words(0)              # 16 operands: lane r of operand j is word j of row r
    rows.store_halves(to, 208)       # a 16-bit field of the 16 rows

Writing a word of one row after another to its place 64 bytes apart takes 10 to 20 times as long for types whose codes
are scattered over the block.
"""

from ggjit.jit import lazy_module
from ggjit.ops.lib.emitted import ROWS

ir = lazy_module("llvmlite.ir")
emit = lazy_module("ggjit.ops.lib.emit")

ZEROS = 512  # bytes that stand for the blocks of a missing row


class RowWords:
    """Blocks of 16 rows, one block of each row at a time; rows that are missing are zeros.

    Args:
        e: Emit.
        src: address of the first row.
        stride: bytes from row to row.
        n_rows: rows that there are, 1 to 16.
        nbytes: bytes of a block, at most ZEROS.
    """

    def __init__(self, e, src, stride, n_rows, nbytes):
        assert nbytes <= ZEROS
        self.e = e
        zeros = e.b.ptrtoint(_zeros(e.b.module), emit.I64)
        valid = [e.b.icmp_signed("<", emit.I64(r), n_rows) for r in range(ROWS)]
        self._first = [e.b.select(valid[r], e.add(src, e.mul(stride, r)), zeros) for r in range(ROWS)]
        self._step = [e.b.select(v, emit.I64(nbytes), emit.I64(0)) for v in valid]
        self._rows = self._first

    def move(self, i):
        """Go to block i of each row."""
        self._rows = [self.e.add(a, self.e.mul(i, step)) for a, step in zip(self._first, self._step, strict=True)]

    def words(self, offset, n=ROWS):
        """16 operands: word j of the 64 bytes at `offset` of every row; no more than n words are read."""
        e, parts = self.e, []
        for p in range(e.parts):  # rows that one register holds
            rows = self._rows[p * e.lanes : (p + 1) * e.lanes]
            columns = []
            for k in range(0, ROWS, e.lanes):
                loaded = [self._load(a, offset + 4 * k, n - k) for a in rows]
                columns += emit.transpose(e, loaded)
            parts.append(columns)
        return [[parts[p][j] for p in range(e.parts)] for j in range(ROWS)]

    def _load(self, address, offset, n):
        """A register of words, the first n of them."""
        e, kind = self.e, emit.vector(emit.I32, self.e.lanes)
        if n >= e.lanes:
            return e.load(address, offset, kind)
        mask = ir.Constant(emit.vector(emit.I1, e.lanes), [int(lane < n) for lane in range(e.lanes)])
        pointer = e.ptr(address, offset, kind)
        return e.call(f"llvm.masked.load.v{e.lanes}i32.p0", kind, pointer, emit.I32(4), mask, ir.Constant(kind, None))

    def store_halves(self, to, offset):
        """The 16 bits at `offset` of every row to 32 bytes."""
        for r, row in enumerate(self._rows):
            self.e.store_value(to, 2 * r, self.e.load(row, offset, emit.I16))

    def store_bytes(self, to, x, byte):
        """Byte `byte` of an operand's words to 16 bytes."""
        e = self.e
        for p, v in enumerate(e.shr_i32(x, 8 * byte)):
            e.store_value(to, p * e.lanes, e.b.trunc(v, emit.vector(emit.I8, e.lanes)))


def _zeros(module):
    found = module.globals.get("zero_row")
    if found is None:
        kind = ir.ArrayType(emit.I8, ZEROS)
        found = ir.GlobalVariable(module, kind, "zero_row")
        found.linkage, found.global_constant, found.initializer = "internal", True, ir.Constant(kind, None)
    return found
