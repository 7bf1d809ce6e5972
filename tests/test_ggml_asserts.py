"""What ggml asserts where a graph is built, tried for every builder: each is one exception, and none ends the process.

tests/test_op_errors.py has the smaller ops, tests/test_rejects.py what was tried with ggml itself, and
tests/test_arguments.py what is no tensor at all.
"""

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
from test_op_errors import ROWS as OTHER_ROWS
from test_op_errors import N, T, V, apart, leaf, turned

import ggjit as gg
from ggjit import ops, types
from ggjit.dev.probe import LAYOUTS, Leafs, laid_out
from ggjit.op import all_ops

ONE_LINE = re.compile(r"[\w.]+: [^\n]+")


@pytest.fixture(autouse=True)
def context():
    with gg.Context(2 << 20) as opened:
        yield opened


def f16(*ne):
    return leaf(*ne, type="F16")


def i32(*ne):
    return leaf(*ne, type="I32")


def q8(*ne):
    return leaf(*ne, type="Q8_0")


def permuted(*ne, type="F32"):
    return ops.permute(leaf(ne[0], ne[2], ne[1], *ne[3:], type=type), 0, 2, 1, 3)


def parameter(*ne):
    return leaf(*ne).set_param()


ROPE = (0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)
SCAN = {"s": (8, 4, 2, 3), "x": (4, 2, 5, 3), "dt": (2, 5, 3), "A": (8, 2), "B": (8, 1, 5, 3), "C": (8, 1, 5, 3)}
DELTA = {
    "q": (8, 2, 5, 3), "k": (8, 2, 5, 3), "v": (8, 2, 5, 3), "g": (1, 2, 5, 3), "beta": (1, 2, 5, 3),
    "state": (64, 2, 3),
}  # fmt: skip


def scan(n_slots=1, ids=None, **other):
    given = {name: leaf(*ne) for name, ne in SCAN.items()} | other
    return ops.ssm_scan(**given, ids=i32(3) if ids is None else ids, n_slots=n_slots)


def delta(n_slots=1, **other):
    return ops.gated_delta_net(**{name: leaf(*ne) for name, ne in DELTA.items()} | other, n_slots=n_slots)


def wkv6(**other):
    given = {name: leaf(8, 2, 6) for name in ("k", "v", "r", "td")} | {"tf": leaf(8, 2), "state": leaf(128, 3)}
    return ops.rwkv_wkv6(**given | other)


def wkv7(**other):
    given = {name: leaf(8, 2, 6) for name in ("r", "w", "k", "v", "a", "b")} | {"state": leaf(128, 3)}
    return ops.rwkv_wkv7(**given | other)


def gla(**other):
    given = {name: leaf(8, 2, 6) for name in ("k", "v", "q", "g")} | {"state": leaf(128, 3)}
    return ops.gated_linear_attn(**given | other, scale=1.0)


def attention(q=None, k=None, v=None, mask=None, **more):
    q, k, v = leaf(16, 3, 4) if q is None else q, f16(16, 5, 2) if k is None else k, f16(8, 5, 2) if v is None else v
    return ops.flash_attn_ext(q, k, v, mask, 1.0, **more)


def indexer(q=None, k=None, weights=None, mask=None):
    q, k = leaf(16, 4, 3, 2) if q is None else q, leaf(16, 1, 5, 2) if k is None else k
    weights, mask = leaf(4, 3, 1, 2) if weights is None else weights, f16(5, 3, 1, 2) if mask is None else mask
    return ops.lightning_indexer(q, k, weights, mask)


ROWS = [
    # views and copies
    (lambda: ops.reshape(leaf(4, 3), leaf(4, 4)), V, "reshape: the number of elements must stay the same"),
    (lambda: ops.reshape(turned(4, 3), leaf(12)), V, "reshape: a must be contiguous"),
    (lambda: ops.reshape_1d(apart(4, 3), 12), V, "reshape_1d: a must be contiguous"),
    (lambda: ops.reshape_2d(leaf(4, 3), 4, -3), V, "reshape_2d: sizes must be 1 to 4 and not be negative"),
    (lambda: ops.reshape_3d(q8(64, 2), 16, 4, 2), V, "reshape_3d: ne[0] must be a multiple of 32, the block of Q8_0"),
    (lambda: ops.reshape_4d(leaf(24), 2, 3, 4, 2), V, "reshape_4d: the number of elements must stay the same"),
    (lambda: ops.view_1d(leaf(8), 9, 0), V, "view: a view must lie inside its source"),
    (lambda: ops.view_1d(leaf(8), 4, 20), V, "view: a view must lie inside its source"),
    (lambda: ops.view_1d(leaf(8), 4, -4), V, "view_1d: offset and strides must not be negative"),
    (lambda: ops.view_1d(q8(64), 48, 0), V, "view_1d: ne[0] must be a multiple of 32"),
    (lambda: ops.view_2d(leaf(8, 4), 4, 4, 40, 0), V, "view_2d: all elements must lie inside the source"),
    (lambda: ops.view_2d(leaf(8, 4), 4, -1, 32, 0), V, "view_2d: sizes must be 1 to 4 and not be negative"),
    (lambda: ops.view_2d(leaf(8, 4), 4, 2, -32, 64), V, "view_2d: offset and strides must not be negative"),
    (lambda: ops.view_3d(leaf(8, 4, 2), 8, 4, 2, 32, 256, 0), V, "view_3d: all elements must lie inside the source"),
    (lambda: ops.view_4d(leaf(8), 1, 1, 1, 9, 4, 4, 4, 0), V, "view: a view must lie inside its source"),
    (lambda: ops.view_4d(leaf(8), 1, 1, 1, 1, 4, 4, 1 << 63, 0), V, "view: sizes and strides must fit 64 bits"),
    (lambda: ops.permute(leaf(4, 3), 0, 1, 2, 2), V, "permute: axes must be 0, 1, 2 and 3 in some order"),
    (lambda: ops.permute(leaf(4, 3), 0, 1, 2, 4), V, "permute: axes must be 0, 1, 2 and 3 in some order"),
    (lambda: ops.permute(leaf(4, 3), -1, 1, 2, 3), V, "permute: axes must be 0, 1, 2 and 3 in some order"),
    (lambda: ops.permute(q8(32, 32), 1, 0, 2, 3), V, "permute: dimension 0 of a block type must stay first"),
    (lambda: ops.transpose(q8(32, 32)), V, "transpose: dimension 0 of a block type must stay first"),
    (lambda: ops.cpy(leaf(8), leaf(9)), V, "cpy: a and b must have equally many elements"),
    (lambda: ops.cast(leaf(33), types.Q8_0), V, "cast: ne[0] must be a multiple of 32, the block of Q8_0"),
    (lambda: ops.cont_1d(leaf(4, 3), 11), V, "cont_1d: the number of elements must stay the same"),
    (lambda: ops.cont_2d(leaf(4, 3), 5, 2), V, "cont_2d: the number of elements must stay the same"),
    (lambda: ops.cont_3d(q8(64, 3), 16, 4, 3), V, "cont_3d: ne[0] must be a multiple of 32"),
    (lambda: ops.cont_4d(leaf(24), 2, 3, 4, -1), V, "cont_4d: sizes must be 1 to 4 and not be negative"),
    (lambda: ops.set_1d(leaf(8), leaf(9), 0), V, "set_1d: b must lie inside a"),
    (lambda: ops.set(turned(4, 8), leaf(2), 32, 32, 32, 0), V, "set: a must be contiguous and rows of b"),
    # rows
    (lambda: ops.get_rows(leaf(8, 5), leaf(3)), T, "get_rows: b must be I32, got F32"),
    (lambda: ops.get_rows(leaf(8, 5), leaf(3, type="I64")), T, "get_rows: b must be I32, got I64"),
    (lambda: ops.get_rows(leaf(8, 5, 2), i32(3)), V, "get_rows: a must have ne [ne0, n_rows, b.ne1, b.ne2]"),
    (lambda: ops.get_rows(leaf(8, 5, 2, 3), i32(3, 2, 2)), V, "get_rows: a must have ne [ne0, n_rows, b.ne1, b.ne2]"),
    (lambda: ops.get_rows(leaf(8, 5), i32(3, 1, 1, 2)), V, "get_rows: a must have ne"),
    (lambda: ops.set_rows(leaf(8, 5), leaf(7, 2), i32(2)), V, "set_rows: a and b must agree in dimensions 0, 2 and 3"),
    (lambda: ops.set_rows(leaf(8, 5, 2), leaf(8, 2), i32(2)), V, "set_rows: a and b must agree in dimensions"),
    (lambda: ops.set_rows(leaf(8, 5), leaf(8, 2), i32(3)), V, "set_rows: c must have a number for each row of b"),
    (lambda: ops.set_rows(leaf(8, 5, 4), leaf(8, 2, 4), i32(2, 3)), V, "set_rows: c must have a number for each row"),
    (lambda: ops.set_rows(leaf(8, 5), leaf(8, 2), leaf(2)), T, "set_rows: b must be F32 or F16 and c I64 or I32"),
    (lambda: ops.set_rows(leaf(8, 5), i32(8, 2), i32(2)), T, "set_rows: b must be F32 or F16 and c I64 or I32"),
    (lambda: ops.set_rows(turned(5, 8), leaf(8, 2), i32(2)), V, "set_rows: rows must be contiguous"),
    (lambda: ops.set_rows(leaf(8, 5), turned(2, 8), i32(2)), V, "set_rows: rows must be contiguous"),
    (lambda: ops.add_id(leaf(4, 2, 3), leaf(5, 5), i32(2, 3)), V, "add_id: a must be [ne0, n_used, n_tokens]"),
    (lambda: ops.add_id(turned(2, 4), leaf(4, 5), i32(2)), V, "add_id: rows must be contiguous"),
    # arithmetic
    (lambda: ops.add(leaf(4, 3), leaf(4, 2)), V, "add: each size of b must divide that of a"),
    (lambda: ops.add(leaf(4), leaf(4, 2)), V, "add: each size of b must divide that of a"),
    (lambda: ops.sub(leaf(4, 3), leaf(3)), V, "sub: each size of b must divide that of a"),
    (lambda: ops.mul(leaf(4, 3), leaf(8, 3)), V, "mul: each size of b must divide that of a"),
    (lambda: ops.mul(leaf(4, 3), leaf(0)), V, "mul: each size of b must divide that of a"),
    (lambda: ops.div(leaf(4, 3), leaf(1, 1, 2)), V, "div: each size of b must divide that of a"),
    (lambda: ops.add_cast(f16(4, 2), leaf(2), types.F32), V, "add_cast: rows must be equally long"),
    (lambda: ops.add_cast(leaf(4), leaf(4), types.F32), T, "add_cast: a must be F16, BF16 or quantized, got F32"),
    (lambda: ops.scale(turned(4, 3), 2.0), V, "scale: rows of a must be contiguous and equally far apart"),
    (lambda: ops.scale(permuted(4, 3, 2), 2.0), V, "scale: rows of a must be contiguous and equally far apart"),
    (lambda: ops.scale(leaf(4), 1e39), V, "scale: parameters must fit their types, got s=1e+39"),
    (lambda: ops.scale_bias(turned(4, 3), 2.0, 1.0), V, "scale: rows of a must be contiguous and equally far apart"),
    (lambda: ops.unary(leaf(4), "sine"), V, "unary: function must be one of abs, sgn"),
    (lambda: ops.unary(leaf(4), "xielu"), V, "unary: function must be one of abs, sgn"),
    (lambda: ops.unary(turned(4, 3), "exp"), V, "exp: rows of a must be contiguous"),
    (lambda: ops.xielu(permuted(4, 3, 2), 1, 1, 1, 1), V, "xielu: a must be contiguous above dimension 1"),
    (lambda: ops.unary_back(leaf(4), leaf(5), "silu"), V, "unary_back: a and b must have the same shape"),
    (lambda: ops.unary_back(f16(4), leaf(4), "silu"), T, "unary_back: a must be F32 and b F32, F16 or BF16"),
    (lambda: ops.unary_back(leaf(4), leaf(4), "floor"), V, "unary_back: function must be one of"),
    (lambda: ops.glu(leaf(5), None, "swiglu"), V, "swiglu: ne[0] of a must be even"),
    (lambda: ops.glu(leaf(4), leaf(4), "silu"), V, "glu: function must be one of reglu"),
    (lambda: ops.glu(leaf(4), leaf(4), "swiglu", swapped=True), V, "swiglu: swapped must be False with two sources"),
    (lambda: ops.swiglu_oai(leaf(5, 2), None, 1.7, 7.0), V, "swiglu_oai: ne[0] of a must be even"),
    (lambda: ops.swiglu_clamp(leaf(4), f16(4), 7.0), V, "swiglu_clamp: a and b must have the same type and shape"),
    # norms
    (lambda: ops.norm(leaf(4), -1e-5), V, "norm: eps must not be negative"),
    (lambda: ops.norm(leaf(4), math.nan), V, "norm: eps must not be negative, got nan"),
    (lambda: ops.rms_norm(leaf(4), -1.0), V, "rms_norm: eps must not be negative"),
    (lambda: ops.group_norm(f16(4, 3, 2), 1, 1e-5), T, "group_norm: a must be F32, got F16"),
    (lambda: ops.l2_norm(f16(4), 1e-5), T, "l2_norm: a must be F32, got F16"),
    # products
    (lambda: ops.mul_mat(leaf(8, 3), leaf(9, 2)), V, "mul_mat: src0.ne[0] must equal src1.ne[0]"),
    (lambda: ops.mul_mat(leaf(8, 3, 2), leaf(8, 2, 3)), V, "mul_mat: src0.ne[2:] must divide src1.ne[2:]"),
    (lambda: ops.mul_mat(leaf(8, 3, 1, 2), leaf(8, 2, 1, 3)), V, "mul_mat: src0.ne[2:] must divide src1.ne[2:]"),
    (lambda: ops.mul_mat(leaf(8, 3, 2), leaf(8, 2)), V, "mul_mat: src0.ne[2:] must divide src1.ne[2:]"),
    (lambda: ops.mul_mat(turned(3, 8), leaf(8, 2)), V, "mul_mat: src0 must not be transposed"),
    (lambda: ops.mul_mat(leaf(8, 3), turned(2, 8)), V, "mul_mat: src1.nb[0] must be the 4 bytes of F32"),
    (lambda: ops.mul_mat_id(leaf(8, 3, 4), leaf(8, 2, 5), leaf(2, 5)), T, "mul_mat_id: ids must be I32"),
    (
        lambda: ops.mul_mat_id(leaf(8, 3, 4), leaf(9, 2, 5), i32(2, 5)),
        V,
        "mul_mat_id: src0.ne[0] must equal src1.ne[0]",
    ),
    (lambda: ops.mul_mat_id(leaf(8, 3, 4), leaf(8, 2, 5), i32(2, 4)), V, "mul_mat_id: ids.ne[1] must equal b.ne[2]"),
    (lambda: ops.mul_mat_id(leaf(8, 3, 4), leaf(8, 2, 5), i32(3, 5)), V, "mul_mat_id: b.ne[1] must divide ids.ne[0]"),
    (lambda: ops.mul_mat_id(leaf(8, 3, 4), leaf(8, 2, 5), i32(2, 5, 2)), V, "mul_mat_id: as and b must have 3 dim"),
    (lambda: ops.mul_mat_id(leaf(8, 3, 4, 2), leaf(8, 2, 5), i32(2, 5)), V, "mul_mat_id: as and b must have 3 dim"),
    (lambda: ops.mul_mat_id(leaf(8, 3, 4), leaf(8, 2, 5, 2), i32(2, 5)), V, "mul_mat_id: as and b must have 3 dim"),
    (lambda: ops.mul_mat_id(turned(3, 8), leaf(8, 1), i32(1)), V, "mul_mat_id: src0 must not be transposed"),
    (lambda: ops.out_prod(leaf(4, 3), leaf(5, 2)), V, "out_prod: a.ne[1] must equal b.ne[1]"),
    (lambda: ops.out_prod(leaf(4, 3, 2), leaf(5, 3, 3)), V, "out_prod: a.ne[2:] must divide b.ne[2:]"),
    (lambda: ops.out_prod(turned(3, 4), leaf(5, 3)), V, "out_prod: a must not be transposed"),
    (lambda: ops.out_prod(leaf(4, 3), f16(5, 3)), T, "out_prod: b must be F32, got F16"),
    (lambda: ops.out_prod(leaf(4, 3, type="BF16"), leaf(5, 3)), T, "out_prod: a must be F32, F16 or quantized"),
    (lambda: ops.solve_tri(leaf(4, 3), leaf(2, 3), True, True, False), V, "solve_tri: a must be square"),
    (lambda: ops.solve_tri(leaf(4, 4), leaf(2, 3), True, True, False), V, "solve_tri: a must be square"),
    (lambda: ops.solve_tri(f16(4, 4), leaf(2, 4), True, True, False), T, "solve_tri: a must be F32"),
    (lambda: ops.solve_tri(leaf(4, 4), leaf(2, 4), False, True, False), N, "solve_tri: left and lower must be True"),
    (lambda: ops.solve_tri(leaf(4, 4), leaf(2, 4), True, True, True), N, "solve_tri: left and lower must be True"),
    # attention
    (lambda: ops.soft_max(f16(4)), T, "soft_max: a must be F32, got F16"),
    (lambda: ops.soft_max(turned(4, 3)), V, "soft_max: a must be contiguous"),
    (lambda: ops.soft_max_ext(leaf(4, 3), i32(4, 3)), T, "soft_max: mask must be F16 or F32, got I32"),
    (lambda: ops.soft_max_ext(leaf(4, 3), leaf(5, 3)), V, "soft_max: mask must be contiguous, of 4 columns"),
    (lambda: ops.soft_max_ext(leaf(4, 3), leaf(4, 2)), V, "soft_max: mask must be contiguous, of 4 columns"),
    (lambda: ops.soft_max_ext(leaf(4, 3, 3), leaf(4, 3, 2)), V, "soft_max: mask must be contiguous, of 4 columns"),
    (lambda: ops.soft_max_ext(leaf(4, 3, 1, 3), leaf(4, 3, 1, 2)), V, "soft_max: mask must be contiguous"),
    (lambda: ops.soft_max_ext(leaf(4, 3, 2), leaf(4, 3, 0)), V, "soft_max: mask must be contiguous"),
    (lambda: ops.soft_max_ext(leaf(4, 3), apart(4, 3)), V, "soft_max: mask must be contiguous"),
    (lambda: ops.soft_max_ext(leaf(4, 3), None, 1.0, 8.0), V, "soft_max: max_bias must be 0 without a mask"),
    (lambda: ops.soft_max_ext(leaf(4, 3, 2), None, sinks=leaf(3)), V, "soft_max: sinks must be contiguous f32 [2]"),
    (lambda: ops.soft_max_ext(leaf(4, 3, 2), None, sinks=f16(2)), V, "soft_max: sinks must be contiguous f32 [2]"),
    (lambda: ops.diag_mask_inf(apart(4, 4), 1), V, "diag_mask_inf: a must be contiguous and n_past not negative"),
    (lambda: ops.diag_mask_inf(leaf(4, 4), -1), V, "diag_mask_inf: a must be contiguous and n_past not negative"),
    (lambda: ops.diag_mask_inf(f16(4, 4), 1), T, "diag_mask_inf: a must be F32"),
    (lambda: attention(q=f16(16, 3, 4)), T, "flash_attn_ext: q must be F32"),
    (lambda: attention(q=leaf(17, 3, 4)), V, "flash_attn_ext: q and k must have the same ne[0]"),
    (lambda: attention(v=f16(8, 6, 2)), V, "flash_attn_ext: q and k must have the same ne[0], k and v the same ne[1]"),
    (lambda: attention(q=leaf(16, 3, 3)), V, "flash_attn_ext: k's heads and ne[3] must divide q's"),
    (lambda: attention(q=leaf(16, 3, 4, 2), k=f16(16, 5, 2, 3), v=f16(8, 5, 2, 3)), V, "flash_attn_ext: k's heads and"),
    (lambda: attention(v=turned(5, 8, type="F16")), V, "flash_attn_ext: q and k must have the same ne[0]"),
    (lambda: attention(q=ops.transpose(leaf(3, 16, 4))), V, "flash_attn_ext: rows of q must be contiguous"),
    (lambda: attention(mask=leaf(5, 3)), T, "flash_attn_ext: mask must be F16, got F32"),
    (lambda: attention(mask=f16(6, 3)), V, "flash_attn_ext: mask must be contiguous, of 5 columns and at least 3 rows"),
    (lambda: attention(mask=f16(5, 2)), V, "flash_attn_ext: mask must be contiguous, of 5 columns and at least 3 rows"),
    (lambda: attention(mask=f16(5, 3, 3)), V, "flash_attn_ext: mask must be contiguous"),
    (lambda: attention(mask=f16(5, 3, 0)), V, "flash_attn_ext: mask must be contiguous"),
    (lambda: attention(mask=turned(3, 5, type="F16")), V, "flash_attn_ext: mask must be contiguous"),
    (lambda: attention(max_bias=8.0), V, "flash_attn_ext: max_bias must be 0 without a mask"),
    (lambda: attention(sinks=leaf(3)), V, "flash_attn_ext: sinks must be contiguous f32 [4]"),
    (lambda: attention(prec=20), V, "flash_attn_ext: prec must be 0 or 10"),
    (lambda: ops.flash_attn_back(leaf(4), leaf(4), leaf(4), leaf(4), True), N, "flash_attn_back: the gradient must be"),
    (lambda: ops.rope(leaf(16, 2, 3), i32(4), 16, 0), V, "rope_ext: b must be contiguous i32 [3], got I32[4, 1, 1, 1]"),
    (lambda: ops.rope(leaf(16, 2, 3), leaf(3), 16, 0), V, "rope_ext: b must be contiguous i32 [3], got F32"),
    (lambda: ops.rope(leaf(16, 2, 3), i32(3, 1, 2), 16, 0), V, "rope_ext: b must be contiguous i32 [3]"),
    (lambda: ops.rope(leaf(16, 2, 3), i32(3), 16, 1), V, "rope_ext: mode must be 0 or 2, got 1"),
    (lambda: ops.rope(leaf(16, 2, 3), i32(3), 15, 0), V, "rope_ext: n_dims must be even and fit ne[0] 16"),
    (lambda: ops.rope(leaf(16, 2, 3), i32(3), 18, 0), V, "rope_ext: n_dims must be even and fit ne[0] 16"),
    (
        lambda: ops.rope(leaf(16, 2, 3), i32(3), 12, 0, offset=6),
        V,
        "rope_ext: n_dims must be even and fit ne[0] 16 aft",
    ),
    (
        lambda: ops.rope(leaf(16, 2, 3), i32(3), 12, 0, offset=-2),
        V,
        "rope_ext: n_dims must be even and fit ne[0] 16 aft",
    ),
    (lambda: ops.rope(leaf(16, 2, 3, type="BF16"), i32(3), 16, 0), T, "rope_ext: a must be F32 or F16, got BF16"),
    (lambda: ops.rope(turned(2, 16), i32(1), 16, 0), V, "rope_ext: rows of a must be contiguous"),
    (
        lambda: ops.rope_ext(leaf(16, 2, 3), i32(3), leaf(7), 16, 0, *ROPE),
        V,
        "rope_ext: c must be contiguous f32 of at",
    ),
    (lambda: ops.rope_ext(leaf(16, 2, 3), i32(3), f16(8), 16, 0, *ROPE), V, "rope_ext: c must be contiguous f32 of at"),
    (lambda: ops.rope_ext(leaf(16, 2, 3), i32(3), None, 16, 8, *ROPE), V, "rope_ext: mode must be 0 or 2, got 8"),
    (lambda: ops.rope_ext_back(leaf(16, 2, 3), i32(2), None, 16, 0, *ROPE), V, "rope_ext_back: b must be contiguous"),
    (
        lambda: ops.rope_multi(leaf(16, 2, 3), i32(3), None, 16, (4, 2, 2, 0), 8, *ROPE),
        V,
        "rope_multi: b must be contiguous i32 [12]",
    ),
    (
        lambda: ops.rope_multi(leaf(16, 2, 3), i32(12), None, 16, (0, 0, 0, 4), 8, *ROPE),
        V,
        "rope_multi: mode must be one of [8, 24, 40] and sections 4 numbers",
    ),
    (lambda: ops.rope_multi(leaf(16, 2, 3), i32(12), None, 16, (4, 2, 2), 8, *ROPE), V, "rope_multi: mode must be one"),
    (
        lambda: ops.rope_multi(leaf(16, 2, 3), i32(12), None, 16, (4, 2, 2, 0), 24, *ROPE),
        V,
        "rope_multi: mode 24 needs n_dims = ne[0] / 2",
    ),
    (
        lambda: ops.rope_multi_back(leaf(16, 2, 3), i32(12), None, 16, (4, 2, 2, 0), 2, *ROPE),
        V,
        "rope_multi_back: mode must be one of",
    ),
    (lambda: indexer(q=f16(16, 4, 3, 2)), T, "lightning_indexer: q must be F32"),
    (lambda: indexer(k=leaf(16, 2, 5, 2)), V, "lightning_indexer: k must have ne [n, 1, n_kv, n_streams]"),
    (lambda: indexer(weights=leaf(3, 3, 1, 2)), V, "lightning_indexer: weights must have a value for each head"),
    (lambda: indexer(mask=leaf(5, 3, 1, 2)), T, "lightning_indexer: mask must be F16"),
    (lambda: indexer(mask=f16(5, 3, 1, 0)), V, "lightning_indexer: mask must have ne [n_kv, n_tokens, 1, m]"),
    # convolutions and pooling
    (
        lambda: ops.im2col(leaf(3, 3, 4, 5), leaf(8, 8, 3), 1, 1, 0, 0, 1, 1, True),
        V,
        "im2col: a.ne[2] must equal b.ne[2]",
    ),
    (lambda: ops.im2col(leaf(3, 4, 5), leaf(8, 3), 1, 0, 0, 0, 1, 0, False), V, "im2col: a.ne[1] must equal b.ne[1]"),
    (
        lambda: ops.im2col(leaf(3, 3), leaf(8, 8), 0, 1, 0, 0, 1, 1, True),
        V,
        "im2col: strides and dilations must be pos",
    ),
    (lambda: ops.im2col(leaf(3, 3), leaf(8, 8), 1, 1, -1, 0, 1, 1, True), V, "im2col: strides and dilations must be"),
    (
        lambda: ops.im2col(leaf(3, 3), leaf(2, 8), 1, 1, 0, 0, 1, 1, True),
        V,
        "im2col: b with padding 0 must be as large",
    ),
    (
        lambda: ops.im2col(leaf(3, 3), leaf(8, 8), 1, 1, 0, 0, 1, 1, True, types.BF16),
        T,
        "im2col: the result must be F32",
    ),
    (
        lambda: ops.im2col_back(leaf(9, 6, 6), leaf(3, 3, 2), (8, 8, 3, 1), 1, 1, 0, 0, 1, 1, True),
        V,
        "im2col_back: the kernel b must have the channels of the image",
    ),
    (
        lambda: ops.im2col_back(leaf(9, 6, 5), leaf(3, 3), (8, 8), 1, 1, 0, 0, 1, 1, True),
        V,
        "im2col_back: a must have ne",
    ),
    (
        lambda: ops.im2col_back(leaf(9, 6, 6), leaf(3, 3), (8, 8, 1, 1, 1), 1, 1, 0, 0, 1, 1, True),
        V,
        "im2col_back: sizes must be 1 to 4",
    ),
    (
        lambda: ops.im2col_3d(leaf(2, 2, 2, 6), leaf(5, 5, 5, 4), 3, *(1,) * 3, *(0,) * 3, *(1,) * 3),
        V,
        "im2col_3d: the 3 channels must divide",
    ),
    (
        lambda: ops.im2col_3d_back(leaf(8, 4, 4, 4), leaf(2, 2, 2), (5, 5), 1, *(1,) * 3, *(0,) * 3, *(1,) * 3),
        V,
        "im2col_3d_back: b with padding 0 must be as large",
    ),
    (lambda: ops.col2im_1d(leaf(10, 4), 1, 3, 0), V, "col2im_1d: a must have 2 dimensions and 3 channels must divide"),
    (lambda: ops.col2im_1d(leaf(9, 1), 1, 3, 2), V, "col2im_1d: p0 (2) must leave elements"),
    (lambda: ops.conv_1d(leaf(3, 4, 5), leaf(8, 3), 1, 0, 1), V, "im2col: a.ne[1] must equal b.ne[1]"),
    (lambda: ops.conv_1d_ph(leaf(3, 4, 5), leaf(8, 3), 1, 1), V, "im2col: a.ne[1] must equal b.ne[1]"),
    (lambda: ops.conv_2d(leaf(3, 3, 4, 5), leaf(8, 8, 3), 1, 1, 0, 0, 1, 1), V, "im2col: a.ne[2] must equal b.ne[2]"),
    (lambda: ops.conv_2d_sk_p0(leaf(3, 3, 4, 5), leaf(9, 9, 3)), V, "im2col: a.ne[2] must equal b.ne[2]"),
    (lambda: ops.conv_2d_s1_ph(leaf(3, 3, 4, 5), leaf(9, 9, 3)), V, "im2col: a.ne[2] must equal b.ne[2]"),
    (lambda: ops.conv_2d_direct(leaf(3, 3, 4, 5), leaf(8, 8, 3), 1, 1, 0, 0, 1, 1), V, "conv_2d: a.ne[2] must equal"),
    (lambda: ops.conv_2d_direct(leaf(3, 3, 3, 5), f16(8, 8, 3), 1, 1, 0, 0, 1, 1), T, "conv_2d: b must be F32"),
    (lambda: ops.conv_2d_direct(leaf(9, 3, 3, 5), leaf(8, 8, 3), 1, 1, 0, 0, 1, 1), V, "conv_2d: b with padding 0"),
    (
        lambda: ops.conv_2d_direct(leaf(3, 3, 3, 5), leaf(8, 8, 3), 1, 1, 0, 0, 1, 0),
        V,
        "conv_2d: strides and dilations",
    ),
    (
        lambda: ops.conv_2d_dw_direct(leaf(3, 3, 2, 3), leaf(8, 8, 3), 1, 1, 0, 0, 1, 1),
        V,
        "conv_2d_dw: a.ne[2] must be 1",
    ),
    (
        lambda: ops.conv_2d_dw_direct(leaf(3, 3, 1, 2), leaf(8, 8, 3), 1, 1, 0, 0, 1, 1),
        V,
        "conv_2d_dw: a.ne[2] must be 1",
    ),
    (lambda: ops.conv_2d_dw_direct(leaf(3, 3, 1, 3), permuted(8, 8, 3), 1, 1, 0, 0, 1, 1), V, "conv_2d_dw: b must be"),
    (
        lambda: ops.conv_3d_direct(leaf(2, 2, 2, 6), leaf(5, 5, 5, 3), *(1,) * 3, *(0,) * 3, *(1,) * 3, 3, 1, 3),
        V,
        "conv_3d: dimension 3 must be 3 channels times 3 outputs",
    ),
    (
        lambda: ops.conv_3d(leaf(2, 2, 2, 6), leaf(5, 5, 5, 4), 3, *(1,) * 3, *(0,) * 3, *(1,) * 3),
        V,
        "im2col_3d: the 3",
    ),
    (
        lambda: ops.conv_transpose_1d(leaf(3, 2, 5), leaf(8, 4), 1, 0, 1),
        V,
        "conv_transpose_1d: b must have 2 dimensions",
    ),
    (lambda: ops.conv_transpose_1d(leaf(3, 2, 4, 2), leaf(8, 4), 1, 0, 1), V, "conv_transpose_1d: b must have 2"),
    (lambda: ops.conv_transpose_1d(leaf(3, 2, 4), leaf(8, 4), 1, 1, 1), V, "conv_transpose_1d: p0 must be 0 and d0 1"),
    (lambda: ops.conv_transpose_1d(leaf(3, 2, 4), leaf(8, 4), 1, 0, 2), V, "conv_transpose_1d: p0 must be 0 and d0 1"),
    (lambda: ops.conv_transpose_1d(leaf(3, 2, 4), leaf(8, 4), 0, 0, 1), V, "conv_transpose_1d: the stride (0) must be"),
    (lambda: ops.conv_transpose_2d_p0(leaf(3, 3, 2, 5), leaf(8, 8, 4), 2), V, "conv_transpose_2d: a.ne[3] must equal"),
    (lambda: ops.conv_transpose_2d_p0(leaf(3, 3, 2, 4), leaf(8, 8, 4), -1), V, "conv_transpose_2d: the stride (-1)"),
    (
        lambda: ops.conv_transpose_1d(leaf(0, 2, 4), leaf(0, 4), 1, 0, 1),
        V,
        "conv_transpose_1d: the kernel a and the data",
    ),
    (
        lambda: ops.conv_transpose_2d_p0(leaf(1, 2, 1, 4), leaf(0, 4, 4), 2),
        V,
        "conv_transpose_2d: the kernel a and the",
    ),
    (lambda: ops.pool_1d(leaf(8), 2, 2, 2, 0), V, "pool_1d: op must be 0 (max) or 1 (mean), got 2"),
    (lambda: ops.pool_1d(leaf(8), 0, 0, 2, 0), V, "pool_1d: kernel and stride must be positive"),
    (lambda: ops.pool_1d(leaf(8), 0, 9, 1, 0), V, "pool_1d: the kernel (9) must fit a"),
    (lambda: ops.pool_2d(leaf(8, 8), 0, 2, 2, 0, 1, 0, 0), V, "pool_2d: kernel and stride must be positive"),
    (lambda: ops.pool_2d(leaf(8, 8), 0, 2, 2, 1, 1, math.nan, 0), V, "pool_2d: kernel and stride must be positive"),
    (lambda: ops.pool_2d(i32(8, 8), 0, 2, 2, 1, 1, 0, 0), T, "pool_2d: a must be F32 or F16"),
    (
        lambda: ops.pool_2d_back(leaf(4, 3), leaf(8, 8), 0, 2, 2, 2, 2, 0, 0),
        V,
        "pool_2d_back: a must have ne [4, 4, 1, 1]",
    ),
    (lambda: ops.arange(0.0, math.inf, 1.0), V, "arange: stop must be above start and step above 0"),
    (lambda: ops.pad_ext_circular(leaf(4), *(0,) * 7, -1), V, "pad_ext_circular: paddings must not be negative"),
    # recurrences
    (lambda: ops.ssm_conv(leaf(8, 4, 2), leaf(4, 5)), V, "ssm_conv: sx must have 3 dimensions, c 2"),
    (lambda: ops.ssm_conv(leaf(3, 4, 2), leaf(4, 4)), V, "ssm_conv: sx must have 3 dimensions, c 2"),
    (lambda: ops.ssm_conv(turned(4, 8), leaf(4, 4)), V, "ssm_conv: rows of sx must be packed"),
    (lambda: ops.ssm_conv(f16(8, 4), leaf(4, 4)), T, "ssm_conv: sx must be F32"),
    (lambda: scan(x=leaf(4, 3, 5, 3)), V, "ssm_scan: x must fit the states s"),
    (lambda: scan(dt=leaf(2, 4, 3)), V, "ssm_scan: dt must have ne [n_heads, n_tokens, n_seqs]"),
    (lambda: scan(A=leaf(7, 2)), V, "ssm_scan: A must have ne [d_state or 1, n_heads]"),
    (lambda: scan(B=leaf(8, 2, 5, 3)), V, "ssm_scan: B and C must be alike"),
    (lambda: scan(ids=i32(2)), V, "ssm_scan: ids must have a number for each sequence"),
    (lambda: scan(ids=leaf(3)), T, "ssm_scan: ids must be I32"),
    (lambda: scan(s=f16(8, 4, 2, 3)), T, "ssm_scan: s must be F32"),
    (lambda: scan(n_slots=2), V, "ssm_scan: n_slots (2) must be positive, and 1 unless A has one value"),
    (lambda: wkv6(v=leaf(8, 2, 5)), V, "rwkv_wkv6: v must have the shape of k"),
    (lambda: wkv6(state=leaf(128, 4)), V, "rwkv_wkv6: state must have ne [128, n_seqs]"),
    (lambda: wkv6(state=leaf(128, 0)), V, "rwkv_wkv6: state must have ne [128, n_seqs]"),
    (lambda: wkv6(tf=leaf(7)), V, "rwkv_wkv6: tf must have a value for each key"),
    (lambda: wkv6(k=permuted(8, 2, 6)), V, "rwkv_wkv6: k must be contiguous"),
    (lambda: wkv7(a=leaf(8, 3, 6)), V, "rwkv_wkv7: a must have the shape of"),
    (lambda: wkv7(state=leaf(64, 3)), V, "rwkv_wkv7: state must have ne [128, n_seqs]"),
    (lambda: wkv7(w=f16(8, 2, 6)), T, "rwkv_wkv7: w must be F32"),
    (lambda: gla(g=leaf(8, 2, 7)), V, "gated_linear_attn: g must have the shape of k"),
    (lambda: gla(state=leaf(128, 5)), V, "gated_linear_attn: state must have ne [128, n_seqs]"),
    (lambda: delta(k=leaf(8, 3, 5, 3)), V, "gated_delta_net: q and k must be alike"),
    (lambda: delta(g=leaf(2, 2, 5, 3)), V, "gated_delta_net: g.ne[0] must be 1 or that of v"),
    (lambda: delta(beta=leaf(2, 2, 5, 3)), V, "gated_delta_net: beta must have a value for each head"),
    (lambda: delta(state=leaf(64, 2, 2)), V, "gated_delta_net: state must have n x n values"),
    (lambda: delta(n_slots=0), V, "gated_delta_net: n_slots (0) must be positive"),
    (lambda: delta(q=leaf(8, 0, 5, 3), k=leaf(8, 0, 5, 3)), V, "gated_delta_net: q and k must be alike"),
    (lambda: ops.dsv4_hc_comb(leaf(25, 3), leaf(3), leaf(24), 0.1, 1), V, "dsv4_hc_comb: mixes must have ne [24"),
    (lambda: ops.dsv4_hc_comb(leaf(24, 3), leaf(3), leaf(24), 0.1, 0), V, "dsv4_hc_comb: n_iter (0) must be positive"),
    (lambda: ops.dsv4_hc_pre(leaf(8, 4, 3), leaf(4, 2)), V, "dsv4_hc_pre: weights must have a value for each stream"),
    (lambda: ops.dsv4_hc_pre_gated(leaf(8, 4, 3), leaf(8, 4, 2), 1.0), V, "dsv4_hc_pre: gate must have the shape of x"),
    (lambda: ops.dsv4_hc_post(leaf(8, 3), leaf(8, 4, 2), leaf(4, 3)), V, "dsv4_hc_post: x, post and comb must fit"),
    # windows
    (lambda: ops.win_part(leaf(4, 4, 4, 2), 2), V, "win_part: a must have 3 dimensions and w (2) be positive"),
    (lambda: ops.win_part(leaf(4, 4, 4), 0), V, "win_part: a must have 3 dimensions and w (0) be positive"),
    (lambda: ops.win_part(f16(4, 4, 4), 2), T, "win_part: a must be F32"),
    (lambda: ops.win_unpart(leaf(4, 2, 2, 3), 4, 4, 2), V, "win_unpart: a must have ne [C, 2, 2, 4]"),
    (lambda: ops.get_rel_pos(f16(4, 6), 3, 3), V, "get_rel_pos: a must have 2 dimensions, qh (3) equal kh (3)"),
    (lambda: ops.get_rel_pos(f16(4, 5), 3, 2), V, "get_rel_pos: a must have 2 dimensions, qh (3) equal kh (2)"),
    (lambda: ops.add_rel_pos(leaf(6, 4), leaf(2, 2, 2), leaf(2, 2, 2)), V, "add_rel_pos: a must have ne"),
    (lambda: ops.add_rel_pos(leaf(4, 4), f16(2, 2, 2), leaf(2, 2, 2)), T, "add_rel_pos: pw must be F32"),
    # optimizers
    (
        lambda: ops.opt_step_adamw(leaf(4), leaf(4), leaf(4), leaf(4), leaf(7)),
        V,
        "opt_step_adamw: a must be a parameter",
    ),
    (
        lambda: ops.opt_step_adamw(parameter(4), leaf(5), leaf(4), leaf(4), leaf(7)),
        V,
        "opt_step_adamw: gradient and mom",
    ),
    (
        lambda: ops.opt_step_adamw(parameter(4), leaf(4), leaf(4), leaf(5), leaf(7)),
        V,
        "opt_step_adamw: gradient and mom",
    ),
    (lambda: ops.opt_step_adamw(parameter(4), leaf(4), leaf(4), leaf(4), leaf(6)), V, "opt_step_adamw: params must be"),
    (
        lambda: ops.opt_step_adamw(parameter(4), f16(4), leaf(4), leaf(4), leaf(7)),
        T,
        "opt_step_adamw: grad must be F32",
    ),
    (lambda: ops.opt_step_sgd(leaf(4), leaf(4), leaf(2)), V, "opt_step_sgd: a must be a parameter"),
    (lambda: ops.opt_step_sgd(parameter(4), leaf(4), leaf(3)), V, "opt_step_sgd: params must be contiguous [2]"),
    # functions of one's own
    (lambda: ops.map_custom1(leaf(4), None), T, "map_custom1: fun must be a function, got None"),
    (lambda: ops.map_custom2(leaf(4), leaf(4), lambda dst: None), T, "map_custom2: fun must take (dst"),
    (lambda: ops.map_custom3(leaf(4), leaf(4), leaf(4), 5), T, "map_custom3: fun must be a function, got 5"),
    (
        lambda: ops.custom_4d(gg.F32, 4, 1, 1, 1, [leaf(4)] * 11, print),
        V,
        "custom_4d: a node must have at most 10 sources",
    ),
    (
        lambda: ops.custom_inplace(leaf(4), [leaf(4)] * 10, print),
        V,
        "custom_inplace: a node must have at most 10 sources",
    ),
]


@pytest.mark.parametrize(("build", "error", "text"), ROWS, ids=[text.split("'")[0][:60] for *_, text in ROWS])
def test_refused(build, error, text):
    with pytest.raises(error) as raised:
        build()
    message = str(raised.value)
    assert message.startswith(text) and ONE_LINE.fullmatch(message) and type(raised.value) is error


TAKE_ALL = {"conv_1d_dw", "conv_1d_dw_ph", "conv_2d_dw", "cont", "dup"}
"""Builders without a rule of their own."""


def test_every_builder_has_a_row():
    """By name, or for the functions of `unary` and `glu`, which share their rules, by that."""
    here = Path(__file__)
    tried = {
        name
        for path in (here, here.with_name("test_op_errors.py"))
        for name in re.findall(r"ops\.(\w+)", path.read_text())
    }
    rejected = json.loads(here.with_name("data").joinpath("rejects.json").read_text())
    tried |= {call.split("(")[0] for _, call in rejected} | TAKE_ALL
    alike = {name for name in ops.__all__ if ops.builder(name).__module__ in ("ggjit.ops.unary", "ggjit.ops.glu")}
    assert set(ops.__all__) - tried - alike == set()
    assert len(ROWS) + len(OTHER_ROWS) > 300


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("bad", [-1, 4])
def test_numbers_out_of_range_are_named(bad, n_threads):
    """Found when the graph runs: node, source, position and value; nothing outside the tensors is touched."""
    ids = gg.from_numpy(np.int32([[0, 1], [2, bad], [3, 1]]), name="ids")
    row = gg.from_numpy(np.int64([0, 1, 2, bad, 3]), name="ids")
    nodes = [
        ops.get_rows(leaf(65, 4), gg.from_numpy(np.int32([0, 1, 2, bad]), name="ids")),
        ops.set_rows(leaf(64, 4), leaf(64, 5), row),
        ops.mul_mat_id(leaf(67, 37, 4), leaf(67, 2, 3), ids),
        scan(s=leaf(8, 4, 2, 4), ids=gg.from_numpy(np.int32([0, 1, bad]), name="ids")),
    ]
    for node, position in zip(nodes, (3, 3, 3, 2), strict=True):
        node.name = "node"
        text = (
            f"{node.op.name}: node 'node': indices in source 'ids' must be valid rows, got {bad} at position {position}"
        )
        with pytest.raises(IndexError, match=re.escape(text)):
            gg.build(node).compute(n_threads=n_threads)


def test_attention_without_heads_is_empty():
    node = attention(q=leaf(16, 3, 0))
    assert node.ne == (8, 0, 3, 1) and node.op.supported(node)
    gg.build(node).compute()


class Changed(Leafs):
    """The leafs of a case, one of them of another shape, type or layout, or all of other sizes."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(0, {})
        self.random, self.which = rng, rng.randrange(-1, 5)

    def __call__(self, type, *ne, low=0, high=0):
        own, ne, rng = types.by_name(type), list(ne), self.random
        self.own.append(own)
        layout = "contiguous"
        if self.which == -1:
            ne = [self.sizes.setdefault(n, rng.choice([0, 1, n, n + 1, 2 * n])) for n in ne]
        elif self.which == len(self.own) - 1:
            at, layout = rng.randrange(len(ne)), rng.choice(("contiguous", *LAYOUTS))
            ne[at] = rng.choice([0, 1, 2, 3, ne[at], ne[at] + 1, 2 * ne[at]])
            ne += [rng.choice([0, 2, 3])] * rng.choice([0, 0, 4 - len(ne)])
            own = rng.choice([own, own, rng.choice(types.all_types())])
        ne[0] = -(-ne[0] // own.blck_size) * own.blck_size
        return laid_out(own, tuple(ne), "contiguous" if own.is_quantized else layout)

    ints = __call__


@pytest.mark.parametrize("op", [op for op in all_ops() if op.cases], ids=lambda op: op.name)
def test_changed_cases_are_built_or_refused_in_one_line(op):
    """ValueError, TypeError or NotImplementedError that begins with a name, supported or not."""
    rng = random.Random(op.name)
    for name, case in op.cases.items():
        for _ in range(10):
            with gg.Context(1 << 18, no_alloc=True):
                try:
                    node = case(Changed(rng))
                    node.op.supported(node)
                except (V, T, N) as error:
                    assert ONE_LINE.fullmatch(str(error)), (name, error)
