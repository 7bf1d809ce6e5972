"""Kernels of the matrix product: which weights, how many columns, how the work is shared.

    few_kernel     up to 16 columns: tiles of 1, 2, 3, 4, 6 or 8 columns read the panel itself
    many_kernel    more: K in slices, a group of panels prepared once in the thread's scratch (quantized: unpacked; F16:
                   widened), then every column against it
    pack_kernel    rows to panels, for weights that are packed when they are loaded

Weights are panels already (`packed`), or rows with any strides, which a thread packs 16 at a time into its scratch, so
that the same tiles run and give the same bits. Threads share work by the chunk counter in work[0:8], many columns
of packed quantized weights by columns (`many_by_rows`).

What follows a product of few columns may be part of it (`End`): a thread that has finished 16 rows goes over them once
more. So bias, residual and activation need no step of their own, nor does the product of a gated unit's second matrix:
a third of the steps at which threads meet while they decode. With many columns that brings nothing: tried, the product
took as much longer as the step that it saved.

Sources: src0 weights {ne00, ne01, ne02, ne03}; src1 activations in the form of `weights(...).activations`, rows i1 of
matrices i2, i3; act_tiles of them where `tile_width` says so; src2 and src3 of `few_kernel` what an end reads, else
absent. dst f32 {ne01, ne1, ne2, ne3}; ne2 and ne3 are multiples of ne02 and ne03.
"""

import functools
from typing import Any, NamedTuple

from ggjit import types
from ggjit.jit import cpu_level, jitted, kernel, lazy_module
from ggjit.ops.lib import float_panel, float_rows, panel
from ggjit.ops.lib.emitted import ROWS

atomics = lazy_module("ggjit.ops.lib.atomics")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

LINE = 64  # the chunk counter's line at the start of the work buffer
COLUMNS = (1, 2, 3, 4, 6, 8)
FEW = 16  # columns up to which tiles read the panel itself
OWN_COLUMNS = 128  # for each further thread; from so many columns on threads share columns, not panels
MIN_CHUNK = 16384  # bytes of weights that are worth a step of the counter
SCRATCH = 256 << 10  # bytes of prepared panels, to stay in L2
SLICE = {"F32": 256, "F16": 256, "BF16": 512}  # k of a slice; quantized types: QUANT_SLICE
QUANT_SLICE = 1024
PACKED_SLICE = 16 << 10  # bytes of a panel that is packed for few columns, to stay in L1


class End(NamedTuple):
    """What is done to the product's rows, f32, 16 at a time.

    Attributes:
        lanes: jitted (x, b) of the product and src2, or (x, b, c) with src3.
        n_src: 1 or 2, the sources it reads: f32, rows as long as those of dst, repeated along dimensions 1 to 3.
        is_pair: src2 is a second matrix of weights, in the form of src0, and b its product; one matrix of each.
    """

    lanes: Any
    n_src: int
    is_pair: bool = False


class Weights(NamedTuple):
    """What the kernels need to know of a type.

    Attributes:
        unit: k of a panel unit.
        nbytes: bytes of a panel unit (16 rows).
        row_nbytes: bytes of a unit in a row of the file.
        y_nbytes: bytes of a unit's activations.
        activations: "act_q8", "act_bf16", "act_f16" or "act_f32".
        pack: jitted (src, src_offs, src_row_stride, n_rows, dst, dst_offs, k).
    """

    unit: int
    nbytes: int
    row_nbytes: int
    y_nbytes: int
    activations: str
    pack: Any


@functools.cache
def weights(type_name):
    """The `Weights` of a type."""
    if type_name in float_panel.UNITS:
        unit, size = float_panel.UNITS[type_name], float_panel.SIZES[type_name]
        kind = f"act_{type_name.lower()}"
        pack = float_panel.pack_float_panel(type_name)
        return Weights(unit, float_panel.NBYTES[type_name], unit * size, 4, kind, pack)
    t = types.by_name(type_name)
    p = t.quant.panel
    size = p.blck_size // t.blck_size * t.type_size
    y_nbytes = p.blck_size // panel.RUN * panel.ACT
    return Weights(p.blck_size, p.nbytes, size, y_nbytes, "act_q8", panel.pack_panel(type_name))


def panel_nbytes(type, ne0, ne1=ROWS):
    """Bytes of a matrix {ne0, ne1} as panels.

    Args:
        type: the Type of the weights.
        ne0: weights in a row.
        ne1: rows, filled up to a multiple of 16.
    """
    if type.name in float_panel.UNITS:
        unit, nbytes = float_panel.UNITS[type.name], float_panel.NBYTES[type.name]
    else:
        unit, nbytes = type.quant.panel.blck_size, type.quant.panel.nbytes
    return -(-ne1 // ROWS) * -(-ne0 // unit) * nbytes


# ---- sharing work --------------------------------------------------------------------------------------------------


@jitted
def chunk_size(rest, least, nth):
    """Size of the next chunk of `rest` units: half an even share, so that chunks shrink and threads end together."""
    size = (rest + 2 * nth - 1) // (2 * nth)
    size = size if size > least else least
    return size if size < rest else rest


@jitted
def next_chunk(work, number, start, end, least, total, nth):
    """The chunk after chunk `number` = [start, end) for this thread: (number, start, end); start == total: no more.

    Begin with number -1, start and end where the first chunk starts. One thread gets everything at once.
    """
    if nth == 1 or end == total:
        return number + 1, end, total
    taken = atomics.fetch_add(work, 0, 1)
    while number < taken and end < total:
        number, start, end = number + 1, end, end + chunk_size(total - end, least, nth)
    return (number, start, end) if number == taken else (number, total, total)


@jitted
def own_chunk(least, total, ith, nth):
    """What a thread has without asking, and where the chunks begin that are asked for: (start, end, first of the rest).

    Seven eighths of an even share, or all of it if the rest were less than two chunks for each thread: where threads
    run on chiplets of their own, a step of the counter takes as long as 4 to 8 KiB of weights (.1 to .2 of decoding).
    """
    size = 7 * total // (8 * nth)
    if nth == 1 or total - size * nth < 2 * nth * least:
        return total * ith // nth, total * (ith + 1) // nth, total
    return size * ith, size * (ith + 1), size * nth


# ---- ends ----------------------------------------------------------------------------------------------------------


@functools.cache
def end_row(end):
    """Jitted (dst, to, n, src2, by2, src3, by3): an end on n contiguous f32 of dst, in place."""
    if end is None:

        @jitted
        def row(dst, to, n, src2, by2, src3, by3):
            pass

        return row
    lanes, n_src = end.lanes, end.n_src

    @jitted
    def value(dst, to, src2, by2, src3, by3, n):
        x = vec.load_first(dst, to, n)
        if n_src == 1:
            return lanes(x, vec.load_first(src2, by2, n))
        return lanes(x, vec.load_first(src2, by2, n), vec.load_first(src3, by3, n))

    @jitted
    def row(dst, to, n, src2, by2, src3, by3):
        for i in range(0, 4 * n, 64):
            rest = n - i // 4
            vec.store_first(dst, to + i, value(dst, to + i, src2, by2 + i, src3, by3 + i, rest), rest)

    return row


# ---- few columns ---------------------------------------------------------------------------------------------------


def tile_columns(n, records=1):
    """Columns of the tile for n of them: the least cost of its passes, about 4 columns' worth for each.

    Args:
        n: columns.
        records: of a column for each run.
    """
    fit = [c for c in COLUMNS if c * records <= COLUMNS[-1]]
    return min(fit, key=lambda c: -(-n // c) * (c * records + 4))


def tile_width(type_name, columns, along=1):
    """Columns of the act_tiles that a tile of so many columns reads; 0: it reads rows."""
    return columns if type_name in float_panel.UNITS and columns >= 3 and along == 1 else 0


@functools.cache
def rows_product(type_name, columns, side_by_side=False, records=1):
    """Jitted (src, offs, stride, n_rows, k, work, scratch, y, y_stride, out, out_stride, n_cols): 16 rows by columns.

    Rows are k weights at src[offs:], stride bytes apart; `columns` of the n_cols, y_stride apart, are done at a time.
    Floats are used as they lie. Quantized weights are packed into scratch, of `packed_units`, a slice of K at a time.
    """
    if type_name in float_panel.UNITS:
        return float_rows.rows_product(type_name, columns, side_by_side)
    unit, _, row_nbytes, y_nbytes, _, pack = weights(type_name)
    slice_n, tile = packed_units(type_name, records), panel.panel_tile(type_name, columns, records)
    y_nbytes *= records

    @jitted
    def product(src, offs, stride, n_rows, k, work, scratch, y, y_stride, out, out_stride, n_cols):
        n_units, rows = (k + unit - 1) // unit, n_rows if n_rows < 16 else 16
        w = memory.address(work) + scratch
        for first in range(0, n_units if n_units > 0 else 1, slice_n):  # without k the results are 0
            n = slice_n if first + slice_n < n_units else n_units - first
            n_k = n * unit if (first + n) * unit < k else k - first * unit
            pack(src, offs + first * row_nbytes, stride, rows, work, scratch, n_k)
            for c in range(0, n_cols, columns):
                y_c = y + first * y_nbytes + c * y_stride
                tile(w, y_c, y_stride, out + c * out_stride, out_stride, n, n_rows, n_cols - c, 1 if first else 0)

    return product


@functools.cache
def few_kernel(type_name, columns, packed, along=1, end=None, records=1):
    """Kernel for up to 16 columns, a tile of `columns` at a time.

    Args:
        type_name: type of the weights.
        columns: columns of the tile.
        packed: src0 holds panels; else rows, packed into the thread's scratch.
        along: dimension of src1 that columns lie along; 2 where each matrix has one column and several share weights.
        end: the `End`; with along 1.
        records: of activations for a run; with 2 a panel is read in slices of K, as by `many_kernel`.
    """
    unit, nbytes, y_nbytes = weights(type_name).unit, weights(type_name).nbytes, weights(type_name).y_nbytes * records
    per_row = columns if tile_width(type_name, columns, along) else 1
    if type_name in float_panel.UNITS:
        tile = float_panel.float_tile(type_name, columns, per_row > 1, panel.AHEAD if columns >= 3 else 0)
    else:
        tile = panel.panel_tile(type_name, columns, records)
    slot = 0 if packed else packed_units(type_name, records) * nbytes
    product = rows_product(type_name, columns, per_row > 1, records)
    per_slice = slice_units(type_name) if records > 1 else 1 << 62
    finish, is_pair, ends = end_row(end), end is not None and end.is_pair, end is not None
    second = 64 * FEW if is_pair else 0

    @jitted
    def multiply(src, src_ne, src_nb, at, p, work, scratch, y, y_nb, repeats, n_repeats, out, out2, out3, step, n_cols):
        """Panel p, number `at` of all matrices, by n_cols columns of each matrix that shares it; results step apart."""
        n_units = (src_ne[0] + unit - 1) // unit
        n_rows, w = src_ne[1] - 16 * p, memory.address(src) + at * n_units * nbytes
        matrix = at // ((src_ne[1] + 15) // 16)
        offs = matrix % src_ne[2] * src_nb[2] + matrix // src_ne[2] * src_nb[3] + 16 * p * src_nb[1]
        for j in range(n_repeats):
            j2, j3 = j % repeats, j // repeats
            y_j, out_j = y + j2 * y_nb[2] + j3 * y_nb[3], out + j2 * out2 + j3 * out3
            if not packed:
                k, y_stride = src_ne[0], y_nb[along]
                product(src, offs, src_nb[1], n_rows, k, work, scratch, y_j, y_stride, out_j, step, n_cols)
            else:
                for first in range(0, n_units if n_units > 0 else 1, per_slice):  # without k the results are 0
                    n = per_slice if first + per_slice < n_units else n_units - first
                    w_s, y_s, add = w + first * nbytes, y_j + first * y_nbytes, 1 if first else 0
                    for c in range(0, n_cols, columns):
                        y_c = y_s + c // per_row * y_nb[along]
                        tile(w_s, y_c, y_nb[along], out_j + c * step, step, n, n_rows, n_cols - c, add)

    @kernel(counter=True, n_optional=2)
    def mul_mat_few(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, src3, src3_ne,
        src3_nb, op_params, work, ith, nth,
    ):  # fmt: skip
        size = (src0_ne[0] + unit - 1) // unit * nbytes
        n_panels = (src0_ne[1] + 15) // 16
        r2, r3 = src1_ne[2] // src0_ne[2], src1_ne[3] // src0_ne[3]
        n_cols, repeats = dst_ne[1], r2
        if along == 2:
            n_cols, repeats = r2, 1
        total = n_panels * src0_ne[2] * src0_ne[3]
        read = 2 * size if is_pair else size
        least = (MIN_CHUNK + read - 1) // (read + 1)
        least = least if least > 1 else 1
        u = 64 + ith * (second + slot)
        start, stop, last = own_chunk(least, total, ith, nth)
        number, first = -1, last
        while start < total:
            for at in range(start, stop):
                p, matrix = at % n_panels, at // n_panels
                i2, i3 = matrix % src0_ne[2] * r2, matrix // src0_ne[2] * r3
                y = memory.address(src1) + i2 * src1_nb[2] + i3 * src1_nb[3]
                out = i2 * dst_nb[2] + i3 * dst_nb[3] + 64 * p
                multiply(
                    src0, src0_ne, src0_nb, at, p, work, u + second, y, src1_nb, repeats, repeats * r3,
                    memory.address(dst) + out, dst_nb[2], dst_nb[3], dst_nb[along], n_cols,
                )  # fmt: skip
                if is_pair:
                    multiply(
                        src2, src2_ne, src2_nb, at, p, work, u + second, y, src1_nb, 1, 1,
                        memory.address(work) + u, 0, 0, 64, n_cols,
                    )  # fmt: skip
                if ends:
                    n = src0_ne[1] - 16 * p
                    n = n if n < 16 else 16
                    for j in range(repeats * r3):
                        j2, j3 = j % repeats, j // repeats
                        for c in range(n_cols):
                            to = out + j2 * dst_nb[2] + j3 * dst_nb[3] + c * dst_nb[1]
                            if is_pair:
                                finish(dst, to, n, work, u + 64 * c, work, u)
                            else:
                                by2 = 64 * p + repeated_or_0(src2_ne, src2_nb, c, i2 + j2, i3 + j3)
                                by3 = 64 * p + repeated_or_0(src3_ne, src3_nb, c, i2 + j2, i3 + j3)
                                finish(dst, to, n, src2, by2, src3, by3)
            number, first, last = next_chunk(work, number, first, last, least, total, nth)
            start, stop = first, last

    return mul_mat_few


@jitted
def repeated_or_0(ne, nb, i1, i2, i3):
    """`rows.repeated`, 0 for an absent source."""
    return rows.repeated(ne, nb, i1, i2, i3) if ne[0] > 0 else 0


def packed_units(type_name, records=1):
    """Panel units in a slice that is packed for few columns; whole lines."""
    return max(PACKED_SLICE // weights(type_name).nbytes // 2 * 2, 2) if records == 1 else slice_units(type_name)


def few_work_size(type, packed, nth, end=None, records=1):
    """Scratch of `few_kernel` for nth threads, the counter's line not counted."""
    size = 0 if packed else packed_units(type.name, records) * weights(type.name).nbytes
    return nth * (size + (64 * FEW if end is not None and end.is_pair else 0))


# ---- many columns --------------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """Panels as the tile of many columns reads them.

    Attributes:
        nbytes: bytes of a unit in scratch; 0: the panel is read where it is.
        packed_nbytes: bytes of a unit of a panel that is packed on the way; 0: none.
        tile: emitted tile.
        columns: of the tile.
        y_nbytes: bytes of a unit's activations from k to k.
        convert: emitted (w, u, n) from panel units to scratch; None if packing gives what the tile reads.
        n_scale: tile units in a panel unit.
    """

    nbytes: int
    packed_nbytes: int
    tile: Any
    columns: int
    y_nbytes: int
    convert: Any
    n_scale: int


def many_columns(type_name, records=1):
    """Columns of the tile for many columns: as many as the registers of the CPU level hold."""
    if type_name in float_panel.UNITS:
        return {"avx512": 12, "avx2": 6, "neon": 6}.get(cpu_level(), 3)
    return {"avx512": 8, "avx2": 4, "neon": 4}.get(cpu_level(), 2) // records


@functools.cache
def prepared(type_name, packed, records=1):
    """The `Prepared` of a type."""
    columns, w = many_columns(type_name, records), weights(type_name)
    if type_name not in float_panel.UNITS:
        form = panel.unpacked_form(type_name)
        tile = panel.unpacked_tile(form, columns, records)
        runs = w.unit // panel.RUN
        convert, packed_nbytes = panel.unpack(type_name), 0 if packed else w.nbytes
        return Prepared(runs * form.nbytes, packed_nbytes, tile, columns, w.y_nbytes * records, convert, runs)
    tile = float_panel.float_tile("F32" if type_name == "F16" else type_name, columns, side_by_side=True)
    if type_name == "F16":
        return Prepared(64, 0 if packed else w.nbytes, tile, columns, 4 * columns, float_panel.widen_f16, 1)
    return Prepared(0 if packed else w.nbytes, 0, tile, columns, 4 * columns, None, 1)


def slice_units(type_name):
    """Panel units in a slice of K."""
    return SLICE.get(type_name, QUANT_SLICE) // weights(type_name).unit


@jitted
def share(n_panels, n_matrices, n_cols, slot, columns, nth):
    """Panels in a group and columns in a chunk.

    A group is what fits the scratch, but small enough that each thread gets four; where there are too few panels for
    that, columns are cut as well, in pieces of at least four tiles (each piece prepares its panels again).
    """
    fits = SCRATCH // (slot if slot > 0 else 1)
    fits = fits if fits > 1 else 1
    want = 4 * nth if nth > 1 else 1
    group = n_panels * n_matrices // want
    group = fits if group > fits else group
    group = group if group > 1 else 1
    pieces = (n_panels + group - 1) // group * n_matrices
    chunks = (want + pieces - 1) // pieces if pieces > 0 else 1
    tiles = (n_cols + columns - 1) // columns
    chunk = (tiles + chunks - 1) // chunks
    return group, (chunk if chunk > 4 else 4) * columns


def many_work_size(type, ne00, packed, nth):
    """Scratch of `many_kernel` for nth threads, the counter's line not counted."""
    form, w = prepared(type.name, packed), weights(type.name)
    n = min(slice_units(type.name), -(-ne00 // w.unit))
    slots = max(SCRATCH, n * form.nbytes) if form.nbytes else 0
    return nth * (-(-slots // 64) + -(-(n * form.packed_nbytes) // 64)) * 64


def many_by_rows(dst, nth):
    """Has each thread whole columns of the product dst, rows of the tensor?

    Where there are many: each prepares all panels for itself, but what it reads and writes stays in its own cache,
    which threads on different chiplets do not share, and steps between two attentions need no barrier.
    """
    return dst.ne[2] == dst.ne[3] == 1 and dst.ne[1] >= OWN_COLUMNS * (nth - 1)


@functools.cache
def many_kernel(type_name, packed, records=1):
    """Kernel for more than 16 columns, of 1 or 2 records a run."""
    unit, nbytes, row_nbytes, _, _, pack = weights(type_name)
    u_nbytes, packed_nbytes, tile, columns, y_nbytes, convert, n_scale = prepared(type_name, packed, records)
    per_row = columns if type_name in float_panel.UNITS else 1
    in_place, converts, own_columns = u_nbytes == 0, convert is not None, packed and per_row == 1
    kb = slice_units(type_name)

    @jitted
    def prepare(src0, offs, row_stride, n_rows, k, n, work, u, scratch):
        """A slice of n units (k weights) of a panel to work[u:]; offs is that of the slice in src0."""
        if packed:
            if converts:
                convert(memory.address(src0) + offs, memory.address(work) + u, n)
        elif converts:
            pack(src0, offs, row_stride, n_rows, work, scratch, k)
            convert(memory.address(work) + scratch, memory.address(work) + u, n)
        else:
            pack(src0, offs, row_stride, n_rows, work, u, k)

    @kernel(counter=True, own_scratch=True, by_rows=many_by_rows if own_columns else None)
    def mul_mat_many(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        n_units = (src0_ne[0] + unit - 1) // unit
        n_panels, begin, n_cols, parts = (src0_ne[1] + 15) // 16, 0, dst_ne[1], nth
        if own_columns and dst_ne[2] * dst_ne[3] == 1 and dst_ne[1] >= OWN_COLUMNS * (nth - 1):
            begin, n_cols, parts = dst_ne[1] * ith // nth, dst_ne[1] * (ith + 1) // nth, 1
        r2, r3 = src1_ne[2] // src0_ne[2], src1_ne[3] // src0_ne[3]
        slice_n = kb if kb < n_units else n_units
        slot = slice_n * u_nbytes
        group, chunk = share(
            n_panels, src0_ne[2] * src0_ne[3], n_cols - begin, slice_n * (nbytes if in_place else u_nbytes), columns,
            parts,
        )  # fmt: skip
        n_groups, n_chunks = (n_panels + group - 1) // group, (n_cols - begin + chunk - 1) // chunk
        total = n_groups * n_chunks * src0_ne[2] * src0_ne[3]
        slots = ((slot if slot > SCRATCH else SCRATCH) + 63) // 64 * 64 if u_nbytes else 0
        base = 64 + memory.load_i64(work, 8) + ith * (slots + (slice_n * packed_nbytes + 63) // 64 * 64)
        scratch = base + slots
        number, start, end = next_chunk(work, -1, 0, 0, 1, total, parts)
        while start < total:
            for at in range(start, end):
                g, c0 = at % n_groups, begin + at // n_groups % n_chunks * chunk
                matrix = at // (n_groups * n_chunks)
                i02, i03 = matrix % src0_ne[2], matrix // src0_ne[2]
                first = g * group
                last = first + group if first + group < n_panels else n_panels
                c1 = c0 + chunk if c0 + chunk < n_cols else n_cols
                for k0 in range(0, n_units, kb):
                    m = kb if k0 + kb < n_units else n_units - k0
                    k = m * unit if (k0 + m) * unit < src0_ne[0] else src0_ne[0] - k0 * unit
                    for p in range(first, last):
                        n_rows = src0_ne[1] - 16 * p
                        if packed:
                            offs = ((matrix * n_panels + p) * n_units + k0) * nbytes
                        else:
                            offs = i02 * src0_nb[2] + i03 * src0_nb[3] + 16 * p * src0_nb[1] + k0 * row_nbytes
                        rows = n_rows if n_rows < 16 else 16
                        prepare(src0, offs, src0_nb[1], rows, k, m, work, base + (p - first) * slot, scratch)
                    for j in range(r2 * r3):
                        i2, i3 = i02 * r2 + j % r2, i03 * r3 + j // r2
                        y = memory.address(src1) + i2 * src1_nb[2] + i3 * src1_nb[3] + k0 * y_nbytes
                        out = memory.address(dst) + i2 * dst_nb[2] + i3 * dst_nb[3]
                        for c in range(c0, c1, columns):
                            for p in range(first, last):
                                w = memory.address(work) + base + (p - first) * slot
                                if in_place:
                                    w = memory.address(src0) + ((matrix * n_panels + p) * n_units + k0) * nbytes
                                tile(
                                    w, y + c // per_row * src1_nb[1], src1_nb[1], out + c * dst_nb[1] + 64 * p,
                                    dst_nb[1], m * n_scale, src0_ne[1] - 16 * p, c1 - c, 1 if k0 else 0,
                                )  # fmt: skip
            number, start, end = next_chunk(work, number, start, end, 1, total, parts)

    return mul_mat_many


# ---- packing a whole matrix ----------------------------------------------------------------------------------------


@functools.cache
def pack_kernel(type_name):
    """Kernel: rows of src0 {ne0, ne1, ne2, ne3}, any strides above nb[0], to panels in dst, matrix after matrix.

    dst takes `panel_nbytes` for each matrix; its own ne and nb are not looked at.
    """
    unit, nbytes, _, _, _, pack = weights(type_name)

    @kernel
    def pack_panels(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        size = (src0_ne[0] + unit - 1) // unit * nbytes
        n_panels = (src0_ne[1] + 15) // 16
        total = n_panels * src0_ne[2] * src0_ne[3]
        for at in range(total * ith // nth, total * (ith + 1) // nth):
            p, matrix = at % n_panels, at // n_panels
            i02, i03 = matrix % src0_ne[2], matrix // src0_ne[2]
            offs = i02 * src0_nb[2] + i03 * src0_nb[3] + 16 * p * src0_nb[1]
            n_rows = src0_ne[1] - 16 * p
            pack(src0, offs, src0_nb[1], n_rows if n_rows < 16 else 16, dst, at * size, src0_ne[0])

    return pack_panels
