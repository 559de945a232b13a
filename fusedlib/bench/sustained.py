"""Under load: how fast, and at what energy, a rival runs when the card never rests.

Training keeps a card at its power limit, and the clock falls until the power fits. So each rival
works alone for about a second, heated first, and all that are timed together do so in rounds: A B
C, then C B A, so that drift hits all alike. Any race in turns can be run so: `loaded_cases` makes
its cases, `loaded_race` its race.

A step cannot take fewer joules than its products unless it makes cheaper ones: "product" is what a
FLOP of a plain square product takes under the same load.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fusedlib.bench import machine, race, roofline, timing
from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.race import Case, Checked, Race, Turn
from fusedlib.bench.statistics import summarize

EXPERIMENT, PRODUCT = "sustained", "product"
ROUNDS = 2
# A card that rested is heated; between two rivals it settles at the next one's power.
HEAT_S, SETTLE_S, REST_S = 1.0, 0.25, 0.5
BURST_MS = 30.0


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
        self.setup, self.device = setup, device
        self.busy_until = float("-inf")

    def check(self, case: Case) -> Checked:
        """As in turns: held against the truth first."""
        checked = self.setup.check(_in_turns(case))

        def turn(timed: Case) -> Turn:
            return self._loaded(checked.turn(_in_turns(timed)), timed["seconds"])

        return Checked(checked.figures, turn)

    def _loaded(self, turn: Turn, seconds: float) -> Turn:
        figures = {**turn.figures, "in_turns": False}

        def run() -> dict[str, float]:
            rested = time.perf_counter() - self.busy_until > REST_S
            heat_s = HEAT_S if rested else SETTLE_S
            figures.update(under_load(turn, self.device, heat_s, seconds))
            self.busy_until = time.perf_counter()
            return {"total": figures["burst_median_ms"]}

        return Turn(run, turn.prepare, turn.reset, figures, again=turn.again)


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


def under_load(turn: Turn, device: str, heat_s: float, seconds: float) -> dict[str, Any]:
    """Run a turn alone without a pause for `heat_s`, then measure `seconds` of the same.

    Returns:
        Per call `burst_median_ms`, with the other statistics and every burst's sample, and
        `joules`; the mean `power_w` and the median clock `sm_mhz` while it was measured.
    """

    issue = turn.issue or turn.run

    def once() -> None:
        turn.reset()
        issue()

    once_ms = timing.second_call_ms(once, device)
    calls = max(1, round(BURST_MS / max(once_ms, 1e-3)))
    load = partial(timing.sustained, once, device=device, calls=calls)
    if heat_s > once_ms / 1e3:  # that call has heated too
        load(heat_s=heat_s - once_ms / 1e3, seconds=0.0)
    with machine.energy() as used:
        taken = load(heat_s=0.0, seconds=seconds)
        timing.synchronize(device)
    figures = summarize(taken.samples_ms, "burst")
    power, mean_s = used.power_w, figures["burst_mean_ms"] / 1e3
    joules = None if power is None else power * mean_s
    return {
        **figures, "burst_calls": calls, "heat_s": heat_s, "power_w": power, "joules": joules,
        "sm_mhz": used.sm_mhz,
    }  # fmt: skip


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
        figures = under_load(turn, case["device"], HEAT_S, case["seconds"])
    return {**figures, "median_ms": figures["burst_median_ms"], "flops": 2 * case["size"] ** 3}
