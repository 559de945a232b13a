"""What a FLOP costs at the least: a plain square product under load, with its energy.

A step cannot take fewer joules than its products unless it makes cheaper ones: "product" is what a
FLOP of a plain square product takes at the card's power limit.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fusedlib.bench import sustained
from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.turns import Turn
from study import roofline
from study.cases import Case

PRODUCT = "product"


def products(
    device: str, dtypes: Sequence[str], *, size: int, seconds: float
) -> list[dict[str, Any]]:  # fmt: skip
    """A case a dtype: a product of two matrices of `size`² random numbers, fp32 by IEEE.

    Raises:
        ValueError: an unknown dtype, or a size below 1.
    """
    ceilings = roofline.cases(device, dtypes, gemm_size=size, copy_mib=1, repetitions=1)
    return [
        {**case, "experiment": PRODUCT, "seconds": seconds}
        for case in ceilings if case["ceiling"] == roofline.GEMM
    ]  # fmt: skip


def product(case: Case) -> dict[str, Any]:
    """Time, `flops`, `joules` and power of a plain product under load.

    Raises:
        Unavailable: away from CUDA.
    """
    require_cuda(case)
    with roofline.precision_of(case["precision"]):
        turn = Turn(roofline.square_product(case))
        figures = sustained.under_load(turn, case["device"], sustained.HEAT_S, case["seconds"])
    return {**figures, "median_ms": figures["burst_median_ms"], "flops": 2 * case["size"] ** 3}


def require_cuda(case: Case) -> None:
    """Refuse a run under load away from CUDA."""
    if torch.device(case["device"]).type != "cuda":
        raise Unavailable("sustained runs need a CUDA GPU")
