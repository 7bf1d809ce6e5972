"""Random shapes, layouts and parameters for families of ops, against the float64 references.

tests/test_hypothesis_ops.py draws every op's cases again; here parameters are drawn too: axes, paddings, strides,
repeats, masks, positions, numbers of rows. In the quick run nothing is compiled that the cases do not have.
"""

import os

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_hypothesis_ops import FLOATS, check, quick, storage  # noqa: F401  (storage is a fixture)

from ggjit import ops, types
from ggjit.context import Context
from ggjit.dev.cases import ARENA
from ggjit.dev.probe import LAYOUTS, laid_out
from ggjit.op import NONE

N = 150 if os.environ.get("GGJIT_FULL_TESTS") else 12
SIZE = st.sampled_from((1, 2, 3, 5, 7, 13, 16, 17, 31, 33, 65))
SMALL = st.integers(1, 4)
NE = st.tuples(SIZE, SMALL, SMALL, SMALL)
BUILDERS = {}


class Maker:
    """Draws sizes and leafs."""

    def __init__(self, data) -> None:
        self.data, self.rng = data, np.random.default_rng(data.draw(st.integers(0, 99)))

    def draw(self, strategy):
        return self.data.draw(strategy)

    def one(self, *choices):
        return self.data.draw(st.sampled_from(choices))

    def leaf(self, ne, type="F32", low=-1.0, high=1.0, layouts=LAYOUTS):
        t = laid_out(types.by_name(type), tuple(ne), self.one("contiguous", *layouts))
        whole = t if t.op is NONE else t.view_src
        shape = whole.ne[::-1]
        integers = type[0] == "I"
        whole.set(self.rng.integers(low, high, shape) if integers else self.rng.uniform(low, high, shape))
        return t

    def numbers(self, ne, n, type="I32", layouts=LAYOUTS):
        """Numbers of rows below n."""
        return self.leaf(ne, type, 0, n, layouts)

    def divisors(self, ne):
        """A shape that repeats into ne."""
        return [self.draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])) for n in ne]


def family(function):
    """Register a function of a Maker that builds one node."""
    BUILDERS[function.__name__] = function
    return function


@family
def binary(m):
    ne, op = m.draw(NE), m.one(ops.add, ops.sub, ops.mul, ops.div)
    kind = m.one(*FLOATS)
    low = 0.5 if op is ops.div else -1
    return op(m.leaf(ne, kind), m.leaf(m.divisors(ne), m.one(kind, "F32"), low))


@family
def copies(m):
    a = m.leaf(m.draw(NE), m.one(*FLOATS))
    a = ops.permute(a, *m.draw(st.permutations(range(4))))
    b = m.leaf(m.draw(st.permutations(a.ne)), m.one(*FLOATS))
    return m.one(lambda: ops.cpy(a, b), lambda: ops.cont(a), lambda: ops.cast(a, b.type))()


@family
def views(m):
    a = m.leaf(m.draw(NE), m.one("F32", "F16"), layouts=())
    n0, n1 = m.draw(st.integers(1, a.ne[0])), m.draw(st.integers(1, a.nrows))
    row = a.nb[1] * m.draw(SMALL)
    offset = a.type.type_size * m.draw(st.integers(0, a.ne[0]))
    return ops.cont(ops.transpose(ops.view_2d(a, n0, n1, row, offset)))


@family
def repeated(m):
    ne = m.draw(NE)
    a = m.leaf(m.divisors(ne), m.one("F32", "F16", "I32"), -9, 9)
    return ops.repeat_4d(a, *ne)


@family
def repeated_back(m):
    ne = m.draw(NE)
    return ops.repeat_back(m.leaf(ne), m.leaf(m.divisors(ne)))


@family
def concat(m):
    ne, dim, kind = list(m.draw(NE)), m.draw(st.integers(0, 3)), m.one("F32", "F16", "I32")
    a = m.leaf(ne, kind, -9, 9)
    ne[dim] = m.draw(SIZE)
    return ops.concat(a, m.leaf(ne, kind, -9, 9), dim)


@family
def padded(m):
    a, sides = m.leaf(m.draw(NE)), m.draw(st.lists(st.integers(0, 5), min_size=8, max_size=8))
    return m.one(ops.pad_ext, ops.pad_ext_circular)(a, *sides)


@family
def rolled(m):
    a = m.leaf(m.draw(NE))
    return ops.roll(a, *[m.draw(st.integers(1 - n, n - 1)) for n in a.ne])


@family
def reflected(m):
    a = m.leaf(m.draw(NE), layouts=())
    return ops.pad_reflect_1d(a, *[m.draw(st.integers(0, a.ne[0] - 1)) for _ in range(2)])


@family
def reduced(m):
    a = m.leaf(m.draw(NE))
    return m.one(ops.sum, ops.sum_rows, ops.mean, ops.cumsum)(a)


@family
def sorted_rows(m):
    a = m.leaf(m.draw(NE), low=-1e3, high=1e3)
    assume(all(len(np.unique(row)) == len(row) for row in a.numpy().reshape(-1, a.ne[0])))
    return ops.argsort(a, m.one(0, 1))


@family
def normed(m):
    a = m.leaf(m.draw(NE))
    return m.one(ops.norm, ops.rms_norm, ops.l2_norm)(a, m.one(1e-5, 0.1, 1.0))


@family
def group_normed(m):
    a = m.leaf(m.draw(NE))
    return ops.group_norm(a, m.draw(st.integers(1, 5)), 1e-3)


@family
def masked(m):
    ne = (m.draw(SIZE), m.draw(st.integers(1, 5)), m.draw(SMALL), m.draw(SMALL))
    mask_ne = (ne[0], ne[1] + m.one(0, 3), *m.divisors(ne[2:]))
    mask = m.one(None, "F32", "F16")
    mask = None if mask is None else m.leaf(mask_ne, mask, -3, 0, layouts=())
    sinks = m.one(None, 1)
    sinks = None if sinks is None else m.leaf((ne[2],), layouts=())
    max_bias = 0.0 if mask is None else m.one(0.0, 8.0)
    return ops.soft_max_ext(m.leaf(ne, low=-4, high=4, layouts=()), mask, m.one(1.0, 0.3), max_bias, sinks=sinks)


@family
def triangles(m):
    n = m.draw(SIZE)
    a = m.leaf((n, n, m.draw(SMALL)), layouts=())
    return m.one(lambda: ops.tri(a, m.one(0, 1, 2, 3)), lambda: ops.diag_mask_zero(a, m.draw(SMALL)))()


@family
def product(m):
    k, kind = m.draw(SIZE), m.one("F32", "F16", "BF16")
    batch = m.draw(st.tuples(SMALL, SMALL))
    b = m.leaf((k, m.draw(st.integers(1, 20)), *batch), layouts=("rows apart",))
    return ops.mul_mat(m.leaf((k, m.draw(SIZE), *m.divisors(batch)), kind, layouts=("rows apart",)), b)


@family
def outer_product(m):
    n, batch = m.draw(SIZE), m.draw(st.tuples(SMALL, SMALL))
    a = m.leaf((m.draw(SIZE), n, *m.divisors(batch)), layouts=("rows apart", "permuted"))
    return ops.out_prod(a, m.leaf((m.draw(SIZE), n, *batch)))


@family
def experts(m):
    k, n_experts, tokens = m.draw(SIZE), m.draw(st.integers(1, 6)), m.draw(st.integers(1, 9))
    n_b = m.draw(st.integers(1, 3))
    a = m.leaf((k, m.draw(SIZE), n_experts), m.one("F32", "F16", "BF16"), layouts=("rows apart",))
    b = m.leaf((k, n_b, tokens), layouts=("rows apart",))
    return ops.mul_mat_id(a, b, m.numbers((n_b * m.one(1, 2), tokens), n_experts))


@family
def gathered(m):
    ne = m.draw(NE)
    return ops.get_rows(m.leaf(ne, m.one(*FLOATS)), m.numbers((m.draw(SIZE), *ne[2:]), ne[1]))


@family
def scattered(m):
    ne = m.draw(NE)
    n = m.draw(st.integers(1, ne[1]))
    ids = laid_out(types.by_name(m.one("I32", "I64")), (n, 1, 1), "contiguous")
    ids.set(m.rng.permutation(ne[1])[:n].reshape(1, 1, 1, n))
    b = m.leaf((ne[0], n, *ne[2:]), m.one("F32", "F16"), layouts=("rows apart", "permuted"))
    return ops.set_rows(m.leaf(ne, m.one("F32", "F16"), layouts=("rows apart",)), b, ids)


@family
def written_into(m):
    a = m.leaf(m.draw(NE), layouts=())
    ne = [m.draw(st.integers(1, n)) for n in a.ne]
    first = [m.draw(st.integers(0, n - k)) for n, k in zip(a.ne, ne, strict=True)]
    offset = sum(i * step for i, step in zip(first, a.nb, strict=True))
    return m.one(ops.set, ops.acc)(a, m.leaf(ne, layouts=("rows apart",)), *a.nb[1:], offset)


@family
def rotated(m):
    n, heads, tokens = 2 * m.draw(st.integers(1, 40)), m.draw(SMALL), m.draw(SMALL)
    mode = m.one(0, 2)
    n_dims = 2 * m.draw(st.integers(1, n // 2))
    a = m.leaf((n, heads, tokens, m.draw(SMALL)), m.one("F32", "F16"), layouts=("rows apart", "permuted"))
    ids = m.numbers((tokens,), 4000, layouts=())
    factors = m.one(None, m.leaf((n_dims // 2,), low=0.5, high=2, layouts=()))
    values = (4096, m.one(1e4, 5e5), m.one(1.0, 0.25), m.one(0.0, 1.0), m.one(1.0, 0.7), 32.0, 1.0)
    return ops.rope_ext(a, ids, factors, n_dims, mode, *values, offset=m.draw(st.integers(0, (n - n_dims) // 2)) * 2)


def _windows(m):
    """Kernel, stride, padding, dilation."""
    return m.draw(SMALL), m.draw(st.integers(1, 3)), m.draw(st.integers(0, 3)), m.draw(st.integers(1, 3))


@family
def pooled(m):
    a, op = m.leaf((m.draw(SIZE), m.draw(SIZE), m.draw(SMALL)), m.one("F32", "F16")), m.one(0, 1)
    (k0, s0, p0, _), (k1, s1, p1, _) = _windows(m), _windows(m)
    assume(p0 < k0 and p1 < k1)
    return m.one(
        lambda: ops.pool_1d(a, op, k0, s0, p0),
        lambda: ops.pool_2d(a, op, k0, k1, s0, s1, p0, p1),
    )()


@family
def convolved(m):
    (k0, s0, p0, d0), (k1, s1, p1, d1) = _windows(m), _windows(m)
    channels = m.draw(SMALL)
    b = m.leaf((m.draw(SIZE), m.draw(SIZE), channels, m.one(1, 2)))
    kind = m.one("F32", "F16")
    a = m.leaf((k0, k1, channels, m.draw(SMALL)), kind, layouts=())
    depth = m.leaf((k0, k1, 1, channels), kind)
    return m.one(
        lambda: ops.im2col(a, b, s0, s1, p0, p1, d0, d1, True),
        lambda: ops.conv_2d_direct(a, b, s0, s1, p0, p1, d0, d1),
        lambda: ops.conv_2d_dw_direct(depth, ops.cont(b), s0, s1, p0, p1, d0, d1),
    )()


@family
def transposed_convolution(m):
    c_in, c_out = m.draw(SMALL), m.draw(SMALL)
    k0, k1, s = m.draw(SMALL), m.draw(SMALL), m.draw(st.integers(1, 3))
    kind = m.one("F32", "F16")
    one = m.leaf((k0, c_out, c_in), kind), m.leaf((m.draw(SIZE), c_in))
    two = m.leaf((k0, k1, c_out, c_in), kind), m.leaf((m.draw(SIZE), m.draw(SIZE), c_in, m.one(1, 2)))
    return m.one(
        lambda: ops.conv_transpose_1d(*one, s, 0, 1),
        lambda: ops.conv_transpose_2d_p0(*two, s),
    )()


@family
def resized(m):
    a = m.leaf((m.draw(SIZE), m.draw(SMALL), m.draw(SMALL)))
    sizes = [m.draw(SIZE), m.draw(SIZE), a.ne[2] * m.one(1, 2), 1]
    return ops.interpolate(a, *sizes, m.one(0, 1, 2, 1 + 256, 2 + 256, 1 + 512))


@family
def gated(m):
    ne, kind = m.draw(NE), m.one(*FLOATS)
    name = m.one("reglu", "geglu", "swiglu", "geglu_erf", "geglu_quick")
    layouts = ("rows apart",)
    one = m.leaf((2 * ne[0], *ne[1:]), kind, -4, 4, layouts)
    two = m.leaf(ne, kind, -4, 4, layouts), m.leaf(ne, kind, -4, 4, layouts)
    return m.one(lambda: ops.glu(one, None, name, swapped=m.one(False, True)), lambda: ops.glu(*two, name))()


@family
def attention(m):
    """Head sizes and groups are those of the cases: a kernel is made for each."""
    dk, heads, heads_kv = 64, m.one(3, 9), 3
    n, n_kv = m.draw(st.integers(1, 20)), m.draw(st.integers(1, 70))
    q = m.leaf((dk, n, heads), layouts=("rows apart", "permuted"))
    k, v = (m.leaf((dk, n_kv, heads_kv), "F16", layouts=("rows apart", "permuted")) for _ in range(2))
    mask = m.one(None, m.leaf((n_kv, n + m.one(0, 5)), "F16", -3, 0, layouts=()))
    return ops.flash_attn_ext(q, k, v, mask, 0.125)


@pytest.mark.parametrize("name", BUILDERS)
@quick(N)
@given(data=st.data())
def test_family(name, data):
    with Context(ARENA):
        try:
            node = BUILDERS[name](Maker(data))
        except ValueError:
            assume(False)
        assume(node.op.supported(node))
        check(node, data.draw(st.sampled_from((1, 3))))
