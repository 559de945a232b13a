"""What the published times are made of, counted: the optimizer's traffic and the data pipeline."""

from dataclasses import dataclass

from fusedlib.study import published
from fusedlib.study.anatomy.tables import L4_BYTES_PER_S
from fusedlib.study.training.tables import LOGS

OPTIMIZER_PASSES = 27
"""Reads and writes of each weight by torch's `_multi_tensor_adadelta` (torch 2.11 to 2.13): eleven
operations over lists of tensors, of which six read one and write it (2 each), and five read two and
write one (3 each)."""

FP32 = 4
LAYER_WEIGHTS = 2 * 9216 * 4096
BATCH_SIZE = 64


@dataclass(frozen=True)
class Difference:
    """Published seconds an epoch, and what counting says of them.

    Attributes:
        liger_s: median training epoch in Liger's log.
        kernel_s: the same in that of the published kernel, which trains neither gate nor up.
        optimizer_s: what reading and writing those weights by the optimizer takes on that card.
        data_s: what 60,000 training images take at the pace of the published test epoch.
        steps: in an epoch.
    """

    liger_s: float
    kernel_s: float
    optimizer_s: float
    data_s: float
    steps: int

    @property
    def apart_ms(self) -> float:
        """Difference of the two logs, ms a step."""
        return 1e3 * (self.liger_s - self.kernel_s) / self.steps


def difference() -> Difference:
    """From the published logs and the card's data sheet."""
    told = published.load("mnist")
    logs = [told[told["table"] == name] for name in LOGS]
    train = [float(log["train_ms"].median()) / 1e3 for log in logs]
    images, tested = 60_000, int(told["images"].iloc[0])
    steps = -(-images // BATCH_SIZE)
    moved = OPTIMIZER_PASSES * FP32 * LAYER_WEIGHTS
    test_s = float(logs[1]["test_ms"].median()) / 1e3
    return Difference(
        train[0], train[1], steps * moved / L4_BYTES_PER_S, images / tested * test_s, steps
    )
