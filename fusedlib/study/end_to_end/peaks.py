"""Peak rates of cards by their data sheets: dense products, no sparsity."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """Rates of a card in FLOP/s, and where they stand.

    Attributes:
        name: of the card as its maker writes it.
        fp32: without tensor cores.
        bf16: of the tensor cores, sums in fp32.
        source: which sheet says so, and what was worked out from it.
    """

    name: str
    fp32: float
    bf16: float
    source: str


# By a part of the device's name, as the driver or the published tables give it.
PEAKS = {
    "NVIDIA H200": Peak(
        "NVIDIA H200 (SXM)", 67e12, 989.5e12,
        "NVIDIA H200 data sheet; bf16 is given with sparsity, the half of it is dense",
    ),
    "RTX PRO 6000 WK": Peak(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 125e12, 500e12,
        "NVIDIA RTX PRO 6000 Blackwell data sheet; of 4000 TOPS in sparse fp4 an eighth is dense "
        "bf16",
    ),
}  # fmt: skip


def of(device_name: str) -> Peak | None:
    """The card's peaks; None for one whose sheet is not in the table."""
    known = (peak for part, peak in PEAKS.items() if part in device_name)
    return next(known, None)


def peak(device_name: str, form: str) -> float | None:
    """FLOP/s of a card in "fp32" or "bf16", None where the card is not in the table."""
    found = of(device_name)
    return None if found is None else {"fp32": found.fp32, "bf16": found.bf16}[form]
