"""Random shapes, layouts and types for every op, against the float64 references.

Each registered case is drawn again with other sizes (1, primes, beside multiples of the vector width, 0), its leafs
permuted, transposed, cut out of larger tensors, of other plain types. What builders refuse is not counted. Only kernels
that the cases have are taken: nothing new is compiled. tests/test_hypothesis_families.py draws parameters as well.
"""

import functools
import math
import os
import warnings

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ggjit import types
from ggjit.context import Context
from ggjit.dev import warm
from ggjit.dev.cases import ARENA, CaseInputs, nmse, reference_of, values_of
from ggjit.dev.probe import LAYOUTS, laid_out
from ggjit.errors import OutOfArena
from ggjit.graph import Graph
from ggjit.op import NONE, all_ops
from ggjit.ops.views import overlaps

SIZES = (0, 1, 2, 3, 5, 7, 13, 15, 17, 31, 33, 47, 64, 65)
FLOATS = ("F32", "F16", "BF16")
PRECISION = {"F16": 1e-6, "BF16": 2e-5}
"""Least limits of results rounded to these types: for one value the square of half a unit in the last place."""
ROUNDING = 2e-6
"""Relative to the largest source: differences that sums which cancel may have, however small they are."""
MOST = 20_000
"""Elements of a leaf."""
EXAMPLES = 40 if os.environ.get("GGJIT_FULL_TESTS") else 4
"""Examples for each op."""


def quick(n: int):
    """Settings of n examples, always the same ones."""
    return settings(
        max_examples=n, derandomize=True, deadline=None, database=None,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def storage(tmp_path_factory):
    """Hypothesis keeps its files out of the repository."""
    hypothesis.configuration.set_hypothesis_home_dir(tmp_path_factory.mktemp("hypothesis"))


class Recorder(CaseInputs):
    """The leafs of a case as they are: which sizes may be drawn anew."""

    def __init__(self) -> None:
        super().__init__(0)
        self.sizes: dict[int, None] = {}
        self.fixed: set[int] = set()

    def __call__(self, type, *ne, **range):
        self.sizes |= dict.fromkeys(n for n in ne if n > 1)
        return super().__call__(type, *ne, **range)

    def ints(self, type, *ne, **range):
        self.sizes |= dict.fromkeys(n for n in ne if n > 1)
        return super().ints(type, *ne, **range)

    def array(self, values, type=None):
        self.fixed |= set(np.shape(values))
        return super().array(values, type)


@functools.cache
def free_sizes(op, name):
    """Sizes of the leafs of a case that are not those of given values."""
    with Context(ARENA):
        recorder = Recorder()
        op.cases[name](recorder)
        return [n for n in recorder.sizes if n not in recorder.fixed]


class Drawn(CaseInputs):
    """The leafs of a case with other sizes, layouts and types."""

    def __init__(self, data, seed: int, sizes: dict[int, int]) -> None:
        super().__init__(seed)
        self.data, self.sizes, self.n = data, sizes, 0
        self.strided, self.typed = (data.draw(st.sampled_from((None, 0, 1, 2, 3, "all"))) for _ in range(2))

    def _is_changed(self, which):
        return which == "all" or which == self.n

    def _leaf(self, type, ne, values):
        ne = tuple(self.sizes.get(n, n) for n in ne)
        kind = types.by_name(type)
        if kind.is_quantized:
            ne = (-(-ne[0] // kind.blck_size) * kind.blck_size, *ne[1:])
        assume(math.prod(ne) <= MOST)
        layout = self.data.draw(st.sampled_from(LAYOUTS)) if self._is_changed(self.strided) else "contiguous"
        self.n += 1
        t = laid_out(kind, ne, "contiguous" if kind.is_quantized and layout == "transposed" else layout)
        whole = t if t.view_src is None else t.view_src
        return t, whole if whole.nelements == 0 else whole.set(values(whole.ne[::-1]))

    def __call__(self, type, *ne, low=-1.0, high=1.0):
        if type in FLOATS and self._is_changed(self.typed):
            type = self.data.draw(st.sampled_from(FLOATS))
        return self._leaf(type, ne, lambda shape: self.rng.uniform(low, high, shape).astype(np.float32))[0]

    def ints(self, type, *ne, low=0, high=10):
        high = max(self.sizes.get(high, high), low + 1)
        return self._leaf(type, ne, lambda shape: self.rng.integers(low, high, shape))[0]


@functools.cache
def known_kernels():
    """The kernels of all cases: what the tests of the cases compile."""
    return set(warm.case_kernels())


def differences(want, got, largest):
    """NMSE, and the largest difference relative to the largest source."""
    if got.dtype.kind == "i":
        return (0.0 if np.array_equal(want, got) else math.inf), math.inf
    finite = np.isfinite(want)
    if not np.array_equal(want[~finite], got[~finite], equal_nan=True):
        return math.inf, math.inf
    apart = float(np.abs(want[finite] - got[finite]).max(initial=0))
    return nmse(want, got), apart / max(largest, 1.0)


def check(node, n_threads):
    """Compute a node and compare it with the references of all ops it is made from."""
    assume(set(warm.kernels_of(node, (1, 3))) <= known_kernels())
    graph = Graph(256).build_forward_expand(node)
    views = [t for t in graph.nodes if t.op.name == "view"]
    assume(all(t.src[0].is_contiguous for t in views))  # else they may show gaps
    assume(all(n % t.type.type_size == 0 for t in views for n in (*t.nb, t.params.offset)))  # bytes of another type
    assume(not any(overlaps(t.ne, t.nb, t.type.type_size) for t in views) or node.view_src is None)
    known = {t: values_of(t) for t in [*graph.leafs, *graph.nodes] if t.op is NONE}
    largest = max((float(np.abs(v[np.isfinite(v)]).max(initial=0)) for v in known.values()), default=0.0)
    if node.is_empty:
        graph.compute(n_threads)
        return
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            want = reference_of(node, known)
            assume(not any(np.isnan(v).any() for v in known.values()))  # bytes of gaps, or 0 / 0
            graph.compute(n_threads)
        except IndexError:  # numbers of rows that are not there
            assume(False)
        error, apart = differences(want, node.numpy(), largest)
    limit = max(node.op.nmse, PRECISION.get(node.type.name, 0.0), 1e-2 if node.type.is_quantized else 0.0)
    assert error <= limit or apart <= ROUNDING, f"{node}: error {error:.3g} exceeds {limit:.3g}, {apart:.3g} apart"


OWN = ("custom", "map_custom1", "map_custom2", "map_custom3")  # a user's function knows its layouts
INNER = (
    "dsv4_hc_comb_back",
    "get_rel_pos_back",
    "mul_mat_id_back",
    "recurrence_back",
)  # no builder checks their shapes
OPS = [op for op in all_ops() if op.cases and not op.view and op.name not in (*OWN, *INNER)]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@quick(EXAMPLES)
@given(data=st.data())
def test_cases_of_other_sizes(op, data):
    name = data.draw(st.sampled_from(list(op.cases)))
    free = free_sizes(op, name)
    changed = data.draw(st.lists(st.sampled_from(free), max_size=2, unique=True)) if free else []
    sizes = {n: data.draw(st.sampled_from(SIZES)) for n in changed}
    with Context(ARENA):
        try:
            node = op.cases[name](Drawn(data, data.draw(st.integers(0, 99)), sizes))
        except (ValueError, TypeError, NotImplementedError, OutOfArena):
            assume(False)
        assume(node.op is op and op.supported(node) and node.nelements <= 8 * MOST)
        check(node, data.draw(st.sampled_from((1, 3))))
