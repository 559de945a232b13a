"""What draws the next token, and whether it draws by the probabilities."""

from typing import Any

import torch
from torch import Tensor

from measure.compilers.arms import Call

TEMPERATURE = 0.8
LIVE, DRAWS, MOST_MISFIT = 8, 500, 36.0
"""Tokens with a probability, draws, and the chi-square of 7 degrees that one in 10⁵ exceeds."""


def multinomial(logits: Tensor) -> Tensor:
    """One token a row by torch.multinomial."""
    return torch.multinomial(torch.softmax(logits.float() / TEMPERATURE, -1), 1)


def exponential_race(logits: Tensor) -> Tensor:
    """One token a row: of independent e ~ Exp(1) the token of the largest p / e wins, that is the
    one whose exponential clock of rate p rings first, which it does with probability p.
    """
    p = torch.softmax(logits.float() / TEMPERATURE, -1)
    return torch.argmax(p / torch.empty_like(p).exponential_(1.0), -1, keepdim=True)


SAMPLERS: dict[str, Call] = {"multinomial": multinomial, "race": exponential_race}


def misfit(sample: Call, vocabulary: int, dtype: torch.dtype, device: Any) -> float:
    """Chi-square of `DRAWS` draws among `LIVE` tokens against their probabilities, which differ;
    infinite where another token was drawn.
    """
    logits = torch.full((1, vocabulary), -1e4, dtype=dtype, device=device)
    live = torch.arange(LIVE, device=device) * (vocabulary // LIVE)
    logits[0, live] = TEMPERATURE * torch.arange(1, LIVE + 1, device=device).log().to(dtype)
    drawn = []
    for _ in range(DRAWS):
        torch.compiler.cudagraph_mark_step_begin()
        drawn.append(sample(logits).clone())
    counts = torch.bincount(torch.cat(drawn).flatten(), minlength=vocabulary)[live].double()
    if counts.sum() < DRAWS:
        return float("inf")
    expected = DRAWS * torch.softmax(logits.double() / TEMPERATURE, -1)[0, live]
    return float(((counts - expected) ** 2 / expected).sum())
