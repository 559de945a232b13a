"""Under load: how fast, and at what energy, a rival runs when the card never rests.

Training keeps a card at its power limit, and the clock falls until the power fits. So each rival
works alone for about a second, heated first, and all that are timed together do so in rounds: A B
C, then C B A, so that drift hits all alike. Any race in turns can be run so: `loaded_cases` makes
its cases, `loaded_race` its race.

A step cannot take fewer joules than its products unless it makes cheaper ones: "product" is what a
FLOP of a plain square product takes under the same load.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fusedlib.bench import sustained
from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.turns import Checked, Turn
from measure.racing import race, roofline
from measure.racing.cases import Case
from measure.racing.race import Race

EXPERIMENT, PRODUCT = "sustained", "product"
ROUNDS = 2


def loaded_cases(cases: Iterable[Case], *, seconds: float) -> list[dict[str, Any]]:
    """Cases of a race in turns as cases under load, every second round in the opposite order.

    Args:
        cases: of one experiment, whose name becomes the field `race`.
        seconds: of a measurement, after heating.
    """
    listed = list(cases)
    return [
        {**case, "experiment": EXPERIMENT, "race": case["experiment"], "round": number,
         "seconds": seconds}
        for number in range(1, ROUNDS + 1) for case in (listed if number % 2 else listed[::-1])
    ]  # fmt: skip


def _in_turns(case: Case) -> dict[str, Any]:
    """The case as the race in turns knows it."""
    return {**case, "experiment": case["race"]}


class Setup:
    """Another setup, whose turns last for a case's `seconds`."""

    def __init__(self, setup: race.Setup, device: str) -> None:
        self.setup, self.load = setup, sustained.Load(device)

    def check(self, case: Case) -> Checked:
        """As in turns: held against the truth first."""
        checked = self.setup.check(_in_turns(case))

        def turn(timed: Case) -> Turn:
            return self.load.turn(checked.turn(_in_turns(timed)), timed["seconds"])

        return Checked(checked.figures, turn)


def loaded_race(turns: Race) -> Race:
    """How a study that races in turns races under load, with `loaded_cases`.

    What a turn issues must not wait for the card, or it rests between two calls.
    """

    def available(case: Case) -> None:
        turns.available(_in_turns(case))
        _require_cuda(case)

    return replace(
        turns, setup=lambda case: Setup(turns.setup(_in_turns(case)), case["device"]),
        available=available, settings=lambda case: turns.settings(_in_turns(case)),
        fields=(*turns.fields, "race"), warmup=0, rounds=lambda case: 1, seconds=0.0, most=None,
        bursts=False,
    )  # fmt: skip


def _require_cuda(case: Case) -> None:
    if torch.device(case["device"]).type != "cuda":
        raise Unavailable("sustained runs need a CUDA GPU")


# --- what a FLOP costs at the least ---------------------------------------------------------------


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
    _require_cuda(case)
    with roofline.precision_of(case["precision"]):
        turn = Turn(roofline.square_product(case))
        figures = sustained.under_load(turn, case["device"], sustained.HEAT_S, case["seconds"])
    return {**figures, "median_ms": figures["burst_median_ms"], "flops": 2 * case["size"] ** 3}
