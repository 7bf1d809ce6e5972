"""mul_mat_id: each token meets the matrices of the experts that it is routed to.

    dst[m, u, t] = sum_k as[k, m, ids[u, t]] b[k, u % n_b, t]

One token (decode): a unit of work is a panel of 16 rows of one chosen expert. More tokens:

    route    pairs (u, t) sorted by expert, every id checked; a step of one thread
    gather   activations in that order, so that the columns of an expert lie side by side
    product  a unit is a panel of one expert with all its columns

Units go panel by panel, and experts within a panel, so that any run of them holds the same mixture of work whatever
the routing is: threads that take runs by the chunk counter end together. Each column is one chain of sums in the order
of `panel_kernels`: the bits depend neither on threads nor on the tokens beside it, and are those of mul_mat.

| version | 8 of 64 experts, 512 tokens |
|---|---|
| one column at a time | a panel is decoded for each column |
| 4 columns a tile, one above | decoded for 4 |
| more than 16: panels unpacked once | decoded once for all columns of the expert |
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import types
from ggjit.arguments import checked
from ggjit.autodiff import as_f32, refuse, unbroadcast
from ggjit.jit import kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op, element_nbytes
from ggjit.ops.lib.checks import are_f32, require, require_type
from ggjit.ops.mul_mat import check_mul_mat, is_packed, lower_activations, takes, transposed
from ggjit.tensor import Tensor, new_node

convert = lazy_module("ggjit.ops.lib.convert")
float_panel = lazy_module("ggjit.ops.lib.float_panel")
kernels = lazy_module("ggjit.ops.lib.panel_kernels")
memory = lazy_module("ggjit.ops.lib.memory")
panel = lazy_module("ggjit.ops.lib.panel")
state_rows = lazy_module("ggjit.ops.lib.state_rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["mul_mat_id"]

MUL_MAT_ID = Op("mul_mat_id", id=30, params=(("prec", "i32"), ("hint", "i32")), nmse=5e-4, packed=(0,), picks=(0, 2))
MUL_MAT_ID_BACK = Op("mul_mat_id_back", id=1003)
COLUMNS = 4  # of the tile for few columns
TILE = 64 * 16  # bytes of a tile's result: up to 16 columns
HEAD = 2  # words before the experts in the route


@checked
def mul_mat_id(a: Tensor, b: Tensor, ids: Tensor, *, prec: int = 0, hint: int = 0) -> Tensor:
    """Multiply each token with matrices chosen by number: a mixture of experts.

    Args:
        a: [k, m, n_experts], any type with kernels; rows contiguous, other strides free. Not transposed.
        b: f32, f16 or bf16 [k, n_b, n_tokens], rows contiguous; n_b divides the number of experts a token uses.
        ids: i32 [n_used, n_tokens], any strides: the experts of each token.
        prec: ggml's precision word; sums are f32 whatever it says.
        hint: ggml's hint word; it does not change the result.

    Returns:
        f32 [m, n_used, n_tokens].

    Raises:
        ValueError: shapes or layouts do not fit.
        TypeError: `ids` is not i32.
        IndexError: when computed, a number is out of range.

    Source: Shazeer et al., Outrageously large neural networks (2017); ggml_mul_mat_id.
    """
    check_mul_mat(MUL_MAT_ID, a, b)
    require_type("mul_mat_id", "ids", ids, types.I32)
    require("mul_mat_id", a.ne[3] == b.ne[3] == ids.ne[2] == ids.ne[3] == 1,
            "as and b must have 3 dimensions and ids 2", a, b, ids)  # fmt: skip
    require("mul_mat_id", ids.ne[1] == b.ne[2], "ids.ne[1] must equal b.ne[2], the tokens", ids, b)
    require("mul_mat_id", b.ne[1] > 0 and ids.ne[0] % b.ne[1] == 0, "b.ne[1] must divide ids.ne[0]", b, ids)
    return new_node(MUL_MAT_ID, types.F32, (a.ne[1], ids.ne[0], b.ne[2], 1), (a, b, ids), (prec, hint))


# --- references -------------------------------------------------------------------------------------------------------


@MUL_MAT_ID.reference
def _(node, a, b, ids):
    used = np.tile(b[0], (1, ids.shape[3] // b.shape[2], 1))  # [t, u, k]
    return np.einsum("tumk,tuk->tum", a[0][ids[0, 0]], used)[None]


@MUL_MAT_ID_BACK.reference
def _(node, b, ids, grad):
    out = np.zeros(node.ne[::-1])
    for t, u in np.ndindex(*ids.shape[2:]):
        out[0, ids[0, 0, t, u]] += np.outer(grad[0, t, u], b[0, t, u % b.shape[2]])
    return out


# --- kernels: one token -----------------------------------------------------------------------------------------------


def tile_of(type_name: str, columns: int):
    """The tile that reads panels of a type and rows of activations."""
    if type_name in float_panel.UNITS:
        return float_panel.float_tile(type_name, columns)
    return panel.panel_tile(type_name, columns)


@functools.cache
def make_one_token(type_name: str, packed: bool):
    """Kernel for one token; src0 experts, src1 activations, src2 ids."""
    w = kernels.weights(type_name)
    nbytes, n_slot = w.nbytes, kernels.packed_units(type_name)
    unit, next_chunk, tile = w.unit, kernels.next_chunk, tile_of(type_name, 1)
    product = kernels.rows_product(type_name, 1)

    @kernel(counter=True)
    def mul_mat_id_one(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, op_params, work,
        ith, nth,
    ):  # fmt: skip
        n_units, n_panels, n_used = (src0_ne[0] + unit - 1) // unit, (src0_ne[1] + 15) // 16, src2_ne[0]
        size, total = n_units * nbytes, n_panels * n_used
        scratch = COUNTER_LINE + ith * n_slot * nbytes
        for u in range(n_used):
            expert = np.int64(memory.load_i32(src2, u * src2_nb[0]))
            if expert < 0 or expert >= src0_ne[2]:
                return u << 4 | 3
        number, start, end = next_chunk(work, -1, 0, 0, 1, total, nth)
        while start < total:
            for at in range(start, end):
                p, u = at // n_used, at % n_used
                expert, n_rows = np.int64(memory.load_i32(src2, u * src2_nb[0])), src0_ne[1] - 16 * p
                y = memory.address(src1) + u % src1_ne[1] * src1_nb[1]
                out = memory.address(dst) + u * dst_nb[1] + 64 * p
                if packed:
                    tile(memory.address(src0) + (expert * n_panels + p) * size, y, 0, out, 0, n_units, n_rows, 1, 0)
                else:
                    offs = expert * src0_nb[2] + 16 * p * src0_nb[1]
                    product(src0, offs, src0_nb[1], n_rows, src0_ne[0], work, scratch, y, 0, out, 0, 1)
            number, start, end = next_chunk(work, number, start, end, 1, total, nth)
        return 0

    return mul_mat_id_one


# --- kernels: many tokens ---------------------------------------------------------------------------------------------


@kernel
def route_pairs(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """Sort pairs by expert: number of used experts, then their numbers, first pairs, and the sorted pairs.

    dst i32 {2 + 2 n_experts + n_pairs}: word 0 counts used experts; n_experts words of their numbers, n_experts + 1 of
    where their pairs begin (and end), then the pairs u + t n_used. op_params[0] is n_experts.
    """
    n_experts, n_used, n_pairs = np.int64(op_params[0]), src0_ne[0], src0_ne[0] * src0_ne[1]
    starts, pairs = 4 * (1 + n_experts), 4 * (HEAD + 2 * n_experts)
    if ith > 0:
        return 0
    for e in range(n_experts + 1):
        memory.store_i32(dst, starts + 4 * e, 0)
    for i in range(n_pairs):
        e = np.int64(memory.load_i32(src0, i % n_used * src0_nb[0] + i // n_used * src0_nb[1]))
        if e < 0 or e >= n_experts:
            return i << 4 | 1
        memory.store_i32(dst, starts + 4 * e, memory.load_i32(dst, starts + 4 * e) + 1)
    first, n_active = 0, 0
    for e in range(n_experts):  # counts become first places
        count = memory.load_i32(dst, starts + 4 * e)
        memory.store_i32(dst, starts + 4 * e, first)
        if count > 0:
            memory.store_i32(dst, 4 * (1 + n_active), e)
            n_active += 1
        first += count
    memory.store_i32(dst, 0, n_active)
    for i in range(n_pairs):
        e = np.int64(memory.load_i32(src0, i % n_used * src0_nb[0] + i // n_used * src0_nb[1]))
        place = np.int64(memory.load_i32(dst, starts + 4 * e))
        memory.store_i32(dst, pairs + 4 * place, i)
        memory.store_i32(dst, starts + 4 * e, place + 1)
    end = 0
    for j in range(n_active):  # ends of the pairs of each used expert, in the order of experts, over those of all
        e = np.int64(memory.load_i32(dst, 4 * (1 + j)))
        following = memory.load_i32(dst, starts + 4 * e)  # read before word j, which may be its own, is written
        memory.store_i32(dst, starts + 4 * j, end)
        end = following
    memory.store_i32(dst, starts + 4 * n_active, end)
    return 0


@kernel
def gather_pairs(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
    """Rows of activations (src0) in the order of sorted pairs (src1 the route); op_params: n_experts, n_used."""
    pairs, n_used = 4 * (HEAD + 2 * np.int64(op_params[0])), np.int64(op_params[1])
    nbytes = src0_nb[0] * src0_ne[0]
    for i in range(dst_ne[1] * ith // nth, dst_ne[1] * (ith + 1) // nth):
        pair = np.int64(memory.load_i32(src1, pairs + 4 * i))
        at = pair % n_used % src0_ne[1] * src0_nb[1] + pair // n_used * src0_nb[2]
        convert.move(dst, i * dst_nb[1], src0, at, nbytes)


@functools.cache
def make_routed(type_name: str, packed: bool):
    """Kernel for sorted pairs; src0 experts, src1 gathered activations, src2 the route. op_params: n_used."""
    w = kernels.weights(type_name)
    unit, nbytes, pack, next_chunk = w.unit, w.nbytes, w.pack, kernels.next_chunk
    one, few = tile_of(type_name, 1), tile_of(type_name, COLUMNS)
    unpacks, limit = type_name not in float_panel.UNITS, kernels.FEW
    convert_panel, many, many_columns, u_nbytes, n_scale = None, few, COLUMNS, 0, 1
    if unpacks:
        ready = kernels.prepared(type_name, packed)
        convert_panel, many, many_columns = ready.convert, ready.tile, ready.columns
        u_nbytes, n_scale = ready.nbytes, ready.n_scale

    @kernel(counter=True)
    def mul_mat_id_routed(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, op_params, work,
        ith, nth,
    ):  # fmt: skip
        n_units, n_panels, n_experts = (src0_ne[0] + unit - 1) // unit, (src0_ne[1] + 15) // 16, src0_ne[2]
        n_used, n_active = np.int64(op_params[0]), np.int64(memory.load_i32(src2, 0))
        size, total = n_units * nbytes, n_panels * n_active
        starts, pairs = 4 * (1 + n_experts), 4 * (HEAD + 2 * n_experts)
        slot = (size + 63) // 64 * 64 + (n_units * u_nbytes + 63) // 64 * 64
        result = COUNTER_LINE + ith * (TILE + slot)
        scratch = result + TILE
        unpacked = memory.address(work) + scratch + (size + 63) // 64 * 64
        number, start, end = next_chunk(work, -1, 0, 0, 1, total, nth)
        while start < total:
            for at in range(start, end):
                p, j = at // n_active, at % n_active
                expert = np.int64(memory.load_i32(src2, 4 * (1 + j)))
                first = np.int64(memory.load_i32(src2, starts + 4 * j))
                last = np.int64(memory.load_i32(src2, starts + 4 * (j + 1)))
                n_rows = src0_ne[1] - 16 * p
                if packed:
                    rows = memory.address(src0) + (expert * n_panels + p) * size
                else:
                    first_row, count = expert * src0_nb[2] + 16 * p * src0_nb[1], n_rows if n_rows < 16 else 16
                    pack(src0, first_row, src0_nb[1], count, work, scratch, src0_ne[0])
                    rows = memory.address(work) + scratch
                is_many = unpacks and last - first > limit
                if unpacks and last - first > limit:
                    convert_panel(rows, unpacked, n_units)
                c, out = first, memory.address(work) + result
                while c < last:
                    y, rest = memory.address(src1) + c * src1_nb[1], last - c
                    if is_many:
                        count = many_columns if many_columns < rest else rest
                        many(unpacked, y, src1_nb[1], out, 64, n_units * n_scale, 16, rest, 0)
                    elif rest > 2:
                        count = COLUMNS if COLUMNS < rest else rest
                        few(rows, y, src1_nb[1], out, 64, n_units, 16, rest, 0)
                    else:
                        count = np.int64(1)
                        one(rows, y, src1_nb[1], out, 64, n_units, 16, 1, 0)
                    for i in range(count):
                        pair = np.int64(memory.load_i32(src2, pairs + 4 * (c + i)))
                        to = pair % n_used * dst_nb[1] + pair // n_used * dst_nb[2] + 64 * p
                        vec.store_first(dst, to, vec.load(work, result + 64 * i), n_rows)
                    c += count
            number, start, end = next_chunk(work, number, start, end, 1, total, nth)

    return mul_mat_id_routed


def _routed_work_size(a: Tensor, packed: bool, nth: int) -> int:
    w, name = kernels.weights(a.type.name), a.type.name
    n_units = -(-a.ne[0] // w.unit)
    u_nbytes = 0 if name in float_panel.UNITS else kernels.prepared(name, packed).nbytes
    return nth * (TILE + -(-n_units * w.nbytes // 64) * 64 + -(-n_units * u_nbytes // 64) * 64)


@MUL_MAT_ID.supports
def _(node):
    return takes(*node.src[:2])


@MUL_MAT_ID.lower
def _(low, node):
    a, b, ids = node.src
    if not takes(a, b):
        raise NotImplementedError(
            f"mul_mat_id: the CPU must have kernels for the types, got {a.type.name} and {b.type.name} ('{node.name}')"
        )
    y, packed, name = lower_activations(low, a, b), is_packed(a), a.type.name
    if node.ne[2] == 1:
        nbytes = kernels.weights(name).nbytes
        work = 0 if packed else low.n_threads * kernels.packed_units(name) * nbytes
        low.emit(make_one_token(name, packed), node, src=(a, y, ids), work=work)
        return
    n_experts, n_used, n_pairs = a.ne[2], ids.ne[0], ids.nelements
    n_words = HEAD + 2 * n_experts + n_pairs
    route, is_new = low.derived(ids, f"route {n_experts}", types.I32, (n_words, 1, 1, 1), 4 * n_words)
    if is_new:
        low.emit(route_pairs, route, src=(ids,), params=(n_experts,))
    nbytes = y.ne[0] * y.type.type_size
    kind = f"routed {kernels.weights(name).activations} by {ids.address} of {n_experts}"
    gathered, is_new = low.derived(y if y is b else b, kind, types.I8, (nbytes, n_pairs, 1, 1), nbytes * n_pairs)
    if is_new:
        low.emit(gather_pairs, gathered, src=(y, route), params=(n_experts, n_used))
    low.emit(make_routed(name, packed), node, src=(a, gathered, route), params=(n_used,),
             work=_routed_work_size(a, packed, low.n_threads))  # fmt: skip


@MUL_MAT_ID.flops
def _(node):
    return 2 * node.src[0].ne[0] * node.nelements


@MUL_MAT_ID.traffic
def _(node):
    """Of the experts at most as many as are asked for."""
    a, b, ids = node.src
    used = min(a.ne[2], ids.nelements)
    rest = element_nbytes(b) + element_nbytes(ids)
    return element_nbytes(a) // max(a.ne[2], 1) * used + rest, element_nbytes(node)


# --- backward ---------------------------------------------------------------------------------------------------------


@kernel
def mul_mat_id_back_f32(
    dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, op_params, work,
    ith, nth,
):  # fmt: skip
    """Gradient of the experts from b, ids and the gradient: a row of an expert is a unit."""
    total = dst_ne[1] * dst_ne[2]
    for row in range(total * ith // nth, total * (ith + 1) // nth):
        m, expert, to = row % dst_ne[1], row // dst_ne[1], row * dst_nb[1]
        for i in range(dst_ne[0]):
            memory.store_f32(dst, to + 4 * i, np.float32(0))
        for t in range(src1_ne[1]):
            for u in range(src1_ne[0]):
                if memory.load_i32(src1, u * src1_nb[0] + t * src1_nb[1]) == expert:
                    g = memory.load_f32(src2, m * src2_nb[0] + u * src2_nb[1] + t * src2_nb[2])
                    state_rows.add_scaled(dst, to, src0, u % src0_ne[1] * src0_nb[1] + t * src0_nb[2], g, dst_ne[0])


@MUL_MAT_ID_BACK.kernel
def _(node):
    b, ids, grad = node.src
    return mul_mat_id_back_f32 if are_f32((b, grad)) and ids.type is types.I32 else None


@MUL_MAT_ID_BACK.flops
def _(node):
    return 2 * node.src[2].nelements * node.ne[0]


@MUL_MAT_ID.backward
def _(node, grad, need):
    a, b, ids = node.src
    da = db = None
    if need[0]:
        da = new_node(MUL_MAT_ID_BACK, types.F32, a.ne, (as_f32(b), ids, grad))
    if need[1]:
        if is_packed(a):
            refuse(node, "weights must lie in rows to be transposed, got a panel buffer")
        db = unbroadcast(mul_mat_id(transposed(a), grad, ids), b)
    return da, db, None


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, view_3d

    def case(name, kind, k, m, n_experts, n_used, n_b, tokens, low=0, high=None):
        @MUL_MAT_ID.case(name)
        def _(t):
            ids = t.ints("I32", n_used, tokens, low=low, high=high or n_experts)
            return mul_mat_id(t(kind, k, m, n_experts), t("F32", k, n_b, tokens), ids)

    for kind in ("F32", "F16", "BF16", "Q4_0", "Q6_K"):
        k = 256 if kind == "Q6_K" else 64 if kind == "Q4_0" else 67
        case(f"{kind}, one token", kind, k, 37, 6, 3, 1, 1)
        case(f"{kind}, tokens", kind, k, 21, 5, 2, 2, 9)
        case(f"{kind}, one busy expert", kind, k, 16, 8, 1, 1, 37, low=3, high=4)
    case("one token, rows of more than a slice", "F32", 331, 21, 4, 2, 1, 1)
    case("Q4_0, one token, rows of more than a slice", "Q4_0", 1888, 21, 4, 2, 2, 1)
    case("one expert of many", "F32", 32, 5, 40, 1, 1, 3)
    MUL_MAT_ID.case("permuted")(
        lambda t: mul_mat_id(
            permute(t("F32", 48, 3, 4), 0, 2, 1, 3),
            permute(t("F32", 48, 3, 2), 0, 2, 1, 3),
            t.ints("I32", 2, 3, high=3),
        )
    )
    MUL_MAT_ID.case("views")(
        lambda t: mul_mat_id(
            view_3d(t("F16", 50, 6, 4), 48, 5, 3, 100, 600, 100),
            t("F32", 48, 2, 4),
            permute(t.ints("I32", 4, 2, high=3), 1, 0, 2, 3),
        )
    )
    MUL_MAT_ID_BACK.case("tokens")(
        lambda t: new_node(
            MUL_MAT_ID_BACK,
            types.F32,
            (37, 5, 4, 1),
            (t("F32", 37, 2, 9), t.ints("I32", 4, 9, high=4), t("F32", 5, 4, 9)),
        )
    )


_cases()
