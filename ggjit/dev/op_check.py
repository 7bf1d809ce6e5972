"""The generic check of an op, for the tests and for ops of one's own: `gg.check_op("cube")`.

Every case that the op carries is computed by the compiled program, compared with the float64 reference, computed again
with other numbers of threads, which must give the same bits, and differentiated: gradients are compared with central
differences of the reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ggjit import ops
from ggjit.arguments import check_threads
from ggjit.counts import counted
from ggjit.dev.cases import run_case
from ggjit.dev.gradients import gradient_errors
from ggjit.name_hints import closest
from ggjit.op import REGISTRY, Op, by_name

THREADS = (1, 2, 3)


@dataclass(frozen=True)
class CaseReport:
    """What the check of a case found.

    Attributes:
        name: of the case.
        error: sum((want - got)^2) / sum(want^2).
        limit: of the error.
        gradient: the largest relative error of a leaf's gradient, None if there is none to compare.
        gradient_limit: of that error.
        note: why there is no gradient.
        problems: what is wrong, empty if all is well.
    """

    name: str
    error: float
    limit: float
    gradient: float | None = None
    gradient_limit: float | None = None
    note: str = ""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpReport:
    """What the check of an op found; printed, a table of its cases."""

    op: Op
    threads: tuple[int, ...]
    cases: tuple[CaseReport, ...]

    @property
    def problems(self) -> list[str]:
        """All that is wrong."""
        return [f"{case.name}: {problem}" for case in self.cases for problem in case.problems]

    @property
    def passed(self) -> bool:
        """Is nothing wrong?"""
        return not self.problems

    def __str__(self) -> str:
        width = max(4, *(len(case.name) for case in self.cases))
        lines = [f"{self.op.name}: {counted(len(self.cases), 'case')} with {', '.join(map(str, self.threads))} threads"]
        lines.append(f"{'case':{width}}  {'error':>8}  {'limit':>8}  {'gradient':>8}  {'limit':>8}")
        for c in self.cases:
            gradient = (
                f"{'-':>8}  {'-':>8}  {c.note}" if c.gradient is None else f"{c.gradient:8.1e}  {c.gradient_limit:8.1e}"
            )
            lines.append(f"{c.name:{width}}  {c.error:8.1e}  {c.limit:8.1e}  {gradient}".rstrip())
        return "\n".join([*lines, *(self.problems or ["all passed"])])

    __repr__ = __str__


def check_case(op: Op, name: str, threads: Sequence[int] = THREADS, gradient: bool = True) -> CaseReport:
    """Check one case of an op.

    Args:
        op: the op.
        name: one of `op.cases`.
        threads: numbers of threads to compute it with.
        gradient: compare its gradients too.

    Returns:
        The errors and what is wrong.
    """
    one = run_case(op, name, threads[0])
    problems = [] if one.passed else [f"error {one.error:.3g} exceeds the limit {one.limit:.3g} ({one.node})"]
    for n in threads[1:]:
        more = run_case(op, name, n)
        if not np.array_equal(one.result.view(np.uint8), more.result.view(np.uint8)):
            problems.append(f"{n} threads change the bits")
    worst, limit, note = None, None, ""
    if gradient:
        worst, limit, note = _gradient(op, name, threads[-1])
    if worst is not None and limit is not None and not worst <= limit:
        problems.append(f"error {worst:.3g} of a gradient exceeds the limit {limit:.3g}")
    return CaseReport(name, one.error, one.limit, worst, limit, note, tuple(problems))


def _gradient(op: Op, name: str, n_threads: int) -> tuple[float | None, float | None, str]:
    """The largest error of a gradient, its limit, and why there is none."""
    if not op.has_backward:
        return None, None, "no backward rule"
    try:
        errors = gradient_errors(op, name, n_threads=n_threads)
    except NotImplementedError as error:
        if not str(error).startswith("build_backward_expand: "):
            raise
        return None, None, str(error).removeprefix("build_backward_expand: ")
    if not errors:
        return None, None, "no float source"
    worst = max(errors, key=lambda e: e.error / e.limit)
    return worst.error, worst.limit, ""


def _named(name: str) -> Op:
    """The op of a name.

    Raises:
        ValueError: there is none; the text says which ops the builder of that name makes, or which name is the closest.
    """
    try:
        return by_name(name)
    except ValueError:
        pass
    if name in ops.__all__:  # silu is a unary op, swiglu a glu
        family = vars(inspect.getmodule(ops.builder(name)))
        made = sorted({repr(one.name) for one in family.values() if isinstance(one, Op) and one.cases})
        hint = f"; gg.{name} makes a node of another op, one of {', '.join(made)}"
        hint = f"; {name} is checked as {made[0]}" if len(made) == 1 else hint
    else:
        hint = closest(name, [*REGISTRY, *ops.__all__])
    raise ValueError(f"check_op: op must be an Op or the name of one, got {name!r}{hint}")


def check_op(op: Op | str, threads: Sequence[int] = THREADS, *, gradients: bool = True) -> OpReport:
    """Check all cases of an op against its reference.

    Args:
        op: an op or its name.
        threads: numbers of threads to compute each case with.
        gradients: compare gradients with central differences, where the op has a backward rule.

    Returns:
        A report: `passed`, `problems`, and a table when printed.

    Raises:
        ValueError: no op has this name, or it carries no cases or no reference.
        NotImplementedError: no kernel takes the types and layout of a case.
    """
    found = _named(op) if isinstance(op, str) else op
    if not isinstance(found, Op):
        raise TypeError(f"check_op: op must be an Op or the name of one, got {type(found).__name__} {found!r}")
    if not found.cases or not found.has_reference:
        what = "cases" if not found.cases else "reference"
        raise ValueError(
            f"check_op: an op must carry cases and a reference, got no {what} ({found.name!r}); "
            "`@OP.reference` and `@OP.case(name)` add them"
        )
    many = [check_threads("check_op", n, "threads") for n in ([threads] if isinstance(threads, int) else threads)]
    if not many:
        raise ValueError("check_op: threads must be some numbers of threads, got none")
    return OpReport(found, tuple(many), tuple(check_case(found, n, many, gradients) for n in found.cases))
