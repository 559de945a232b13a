"""Study 03's problems: the published sweep and grid, language-model shapes, fp32 precision."""

from collections.abc import Sequence

from fusedlib import functional, reference
from fusedlib.bench import (
    check,
    compare,
    graphs,
    plain_products,
    problems,
    providers,
    results,
    roofline,
    sources,
    timing,
)
from fusedlib.bench.problems import SwiGLUProblem

STUDY = "03_kernels"
DIRECTIONS = problems.DIRECTIONS


def code() -> str:
    """Fingerprint of what measures and of the kernels that are measured."""
    measuring = (check, compare, graphs, plain_products, problems, providers, roofline, timing)
    return results.code_fingerprint(*measuring, reference, functional, *sources.kernel_modules())


def square(
    tokens: Sequence[int], widths: Sequence[int], dtype: str, *, precision: str = "highest",
    frozen: bool = False,
) -> list[SwiGLUProblem]:  # fmt: skip
    """Hidden = intermediate = each width, at each number of tokens, in all directions.

    `frozen` adds the backward pass without weight gradients, which the published grid has too.
    """
    return [
        problem for count in tokens for width in widths
        for problem in every_direction(
            (count, width, width), dtype, precision=precision, frozen=frozen
        )
    ]  # fmt: skip


def shaped(shapes: Sequence[str], dtype: str, *, precision: str = "highest",
           frozen: bool = False) -> list[SwiGLUProblem]:  # fmt: skip
    """Shapes given as "tokens·hidden·intermediate" (or with x between), in all directions.

    Raises:
        ValueError: a text that is not three whole numbers.
    """
    found = []
    for text in shapes:
        parts = text.replace("x", "·").split("·")
        if len(parts) != 3 or not all(p.isdecimal() for p in parts):
            raise ValueError(f"a shape is tokens·hidden·intermediate, got {text!r}")
        sizes = tuple(int(p) for p in parts)
        found += every_direction(sizes, dtype, precision=precision, frozen=frozen)
    return found


def every_direction(
    sizes: Sequence[int], dtype: str, *, precision: str = "highest", frozen: bool = False
) -> list[SwiGLUProblem]:
    """One shape in all directions."""
    wanted = [(direction, True) for direction in DIRECTIONS]
    wanted += [("backward", False)] if frozen else []
    tokens, hidden, inner = sizes
    return [
        SwiGLUProblem(tokens, hidden, inner, dtype, direction, trained, precision)
        for direction, trained in wanted
    ]
