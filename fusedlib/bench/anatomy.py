"""Study 05's cases: a published comparison, taken apart step by step.

`fusedlib.bench.dissection` measures them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any

from fusedlib.bench import kernel_sweep, results
from fusedlib.bench.problems import SwiGLUProblem

STUDY = "05_anatomy"
PUBLISHED_BLOCK = 64
TEST_BLOCK = 16  # of the published numerical test, whose problem is 16 by 16
_Case = Mapping[str, Any]


@dataclass(frozen=True)
class Variant:
    """The published kernel and its repairs.

    Attributes:
        whole_sum: whether the sum over K is there; without it the result is wrong.
        weight_gradients: whether gate and up weights receive a gradient.
        dot_precision: of the kernel's own products, "tf32" (Triton's default for fp32) or "ieee".
        block: rows, columns and, without the whole sum, K of a tile.
        emulated: plain PyTorch instead of Triton; errors only.
    """

    whole_sum: bool = False
    weight_gradients: bool = False
    dot_precision: str = "tf32"
    block: int = PUBLISHED_BLOCK
    emulated: bool = False


@dataclass(frozen=True)
class Step:
    """One change to the published comparison; each step keeps what the steps before it changed.

    `variant` None stands for our own kernels, `precision` for torch's setting on both sides.
    """

    name: str
    variant: Variant | None
    launch: str = "python"
    dtype: str = "float32"
    precision: str = "highest"
    directions: tuple[str, ...] = ("forward", "forward+backward")


_REPAIRED = Variant(whole_sum=True, weight_gradients=True)
_IEEE = replace(_REPAIRED, dot_precision="ieee")
STEPS = (
    Step("redone", Variant()),
    Step("reduction", replace(_REPAIRED, weight_gradients=False)),
    Step("gradients", _REPAIRED, directions=("forward+backward",)),
    Step("tf32", _REPAIRED, precision="high"),
    Step("precision", _IEEE),
    Step("launch", _IEEE, launch="graph"),
    Step("kernels", None, launch="graph"),
    Step("fusion", None, launch="graph", dtype="bfloat16"),
)

IMPLEMENTATIONS: dict[str, Variant | str] = {
    "published, emulated": Variant(emulated=True),
    "published with weight gradients, emulated": Variant(emulated=True, weight_gradients=True),
    "published": Variant(),
    "whole sum": _IEEE,
    "eager": "eager",
    "liger": "liger",
    "fused": "fused",
}


def code(*modules: ModuleType) -> str:
    """Fingerprint of all that measures this study and of the kernels; `modules` are the others."""
    import fusedlib.bench.anatomy as this

    parts = kernel_sweep.code() + results.code_fingerprint(this, *modules)
    return hashlib.sha256(parts.encode()).hexdigest()[:12]


def step_cases(
    tokens: Sequence[int], widths: Sequence[int], directions: Sequence[str], *, device: str,
    repetitions: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every step at every square size in these directions.

    Raises:
        ValueError: a size that is not positive or an unknown direction, no repetition, or a width
            that is no multiple of the published block.
    """
    if repetitions < 1:
        raise ValueError(f"repetitions must be at least 1, got {repetitions}")
    _check_widths(widths, PUBLISHED_BLOCK)
    found = []
    for rows in tokens:
        for width in widths:
            for step in sorted(STEPS, key=lambda s: s.dtype != "float32"):
                for direction in (d for d in directions if d in step.directions):
                    problem = SwiGLUProblem(
                        rows, width, width, step.dtype, direction, precision=step.precision
                    )
                    found.append(_step_case(step, problem, device, repetitions))
    return found


def _step_case(step: Step, problem: SwiGLUProblem, device: str, repetitions: int) -> dict[str, Any]:
    variant = step.variant or Variant(True, True, "own")
    settings = {**problem.fields(), **asdict(variant)}  # of both, the kernel's gradients count
    return {
        "experiment": "step", "step": step.name, "rival": "flawed" if step.variant else "fused",
        **settings, "launch": step.launch, "device": device, "repetitions": repetitions,
    }  # fmt: skip


def _check_widths(widths: Sequence[int], block: int) -> None:
    if bad := [w for w in widths if w < block or w % block]:
        raise ValueError(f"width {bad[0]} is no multiple of the kernel's block, {block}")


def correctness_cases(
    widths: Sequence[int], *, device: str, gradients_width: int
) -> list[dict[str, Any]]:
    """Errors of the published kernel against width, and which gradients arrive for everybody.

    One block of tokens each; the published test's own problem, all ones, comes first.

    Raises:
        ValueError: a width that is no multiple of the published block.
    """
    _check_widths([*widths, gradients_width], PUBLISHED_BLOCK)
    ones = [(w, TEST_BLOCK, "ones") for w in (TEST_BLOCK, 2 * TEST_BLOCK)]
    small = [w for w in (16, 32) if w < min(widths, default=0)]
    drawn = [(w, TEST_BLOCK, "random") for w in (*small, *widths)]
    drawn += [(w, PUBLISHED_BLOCK, "random") for w in widths]
    asked = [
        (name, *case) for case in ones + drawn for name in ("published, emulated", "published")
    ]
    asked += [
        (name, gradients_width, PUBLISHED_BLOCK, "random") for name in IMPLEMENTATIONS
        if (name, gradients_width, PUBLISHED_BLOCK, "random") not in asked
    ]  # fmt: skip
    return [
        {
            "experiment": "correctness", "implementation": name, "block": block, "inputs": inputs,
            **SwiGLUProblem(block, width, width, "float32").fields(), "device": device,
        }
        for name, width, block, inputs in asked
    ]  # fmt: skip


def memory_cases(tokens: int, widths: Sequence[int], *, device: str) -> list[dict[str, Any]]:
    """Peak of one forward and backward pass over the published sweep.

    Raises:
        ValueError: a width that is no multiple of the published block.
    """
    _check_widths(widths, PUBLISHED_BLOCK)
    return [
        {
            "experiment": "memory", "implementation": name, "device": device,
            **SwiGLUProblem(tokens, width, width, "float32").fields(),
        }
        for width in widths for name in ("liger", "published", "whole sum", "fused")
    ]  # fmt: skip


def label(case: _Case) -> str:
    """A case in a few words."""
    size = f"{case['tokens']}·{case['hidden_size']}"
    if case["experiment"] == "step":
        return f"{case['step']} {size} {case['direction']}"
    return f"{case['experiment']} {size} {case['implementation']}"
