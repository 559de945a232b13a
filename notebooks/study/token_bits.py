"""Log-probabilities of one sequence in a whole model, alone and beside other tokens.

Nobody's result is called wrong: they differ by rounding. What trains on what another batch size has
sampled takes the difference for a change of the policy. `situation` is what stands beside, and
`tokens` how many there are in all:

batch    other sequences of the same length
longer   later tokens of the same sequence, which it does not see
padding  two sequences filled up to twice the length on the left, as a sampler does
packed   another document before it in one row, with positions that begin anew
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fusedlib
from fusedlib.bench.arguments import require_known, require_least
from fusedlib.bench.attempt import forget_compiled
from fusedlib.bench.turns import Figures
from study import patched, rivals
from study.cases import Case, grid
from study.patched import BASELINE, BATCH_INVARIANT, TASK
from study.settings import DTYPES

PROVIDERS = (BASELINE, "inductor", "liger", "fused", BATCH_INVARIANT, "huggingface-invariant")
"""The last is Hugging Face's inside of `fusedlib.batch_invariant`, which sets torch's products."""
LAYERS = 4


def cases(
    situations: list[str], *, model: str, probe: int, dtypes: list[str], device: str
) -> list[dict[str, Any]]:  # fmt: skip
    """A case an implementation, dtype and situation, `packed 300`; a `probe` has so many tokens."""
    require_known("model", model, patched.CONFIGS)
    require_known("dtype", dtypes, DTYPES)
    require_least(2, probe=probe)
    beside = [_beside(text, probe) for text in situations]
    shared = {"experiment": "token bits", "direction": "forward", "model": model, "seed": 0}
    shared |= {"context_length": probe, "device": device}
    return grid(shared, dtype=dtypes, provider=PROVIDERS, beside=beside)


def _beside(text: str, probe: int) -> dict[str, Any]:
    """A situation and the number of tokens in all, twice the probe's at least."""
    name, _, count = str(text).partition(" ")
    require_known("situation", name, SITUATIONS)
    if not count.isdecimal() or int(count) < 2 * probe or (name == "batch" and int(count) % probe):
        raise ValueError(
            f"situation {text!r} must be a name and a number of tokens of at least twice the "
            f"probe's {probe}, in a batch a multiple of it: {name} {4 * probe}"
        )
    return {"situation": name, "tokens": int(count)}


class _Inputs(NamedTuple):
    """What a model is called with, and where the probe stands in it."""

    ids: Tensor
    row: int = 0
    start: int = 0
    mask: Tensor | None = None
    positions: Tensor | None = None


def _batch(ids: Tensor, probe: int, count: int) -> _Inputs:
    return _Inputs(ids[: count * probe].view(-1, probe))


def _longer(ids: Tensor, probe: int, count: int) -> _Inputs:
    return _Inputs(ids[None, :count])


def _padding(ids: Tensor, probe: int, count: int) -> _Inputs:
    length = count // 2
    rows = ids.new_zeros(2, length)
    rows[0, -probe:], rows[1] = ids[:probe], ids[-length:]
    mask = torch.ones_like(rows)
    mask[0, :-probe] = 0
    return _Inputs(rows, 0, length - probe, mask, (mask.cumsum(1) - 1).clamp(min=0))


def _packed(ids: Tensor, probe: int, count: int) -> _Inputs:
    before = count - probe
    row = torch.cat([ids[probe:count], ids[:probe]])[None]
    numbers = torch.arange(count, device=ids.device)
    return _Inputs(
        row, 0, before, None, torch.where(numbers < before, numbers, numbers - before)[None]
    )


SITUATIONS: dict[str, Callable[[Tensor, int, int], _Inputs]] = {
    "batch": _batch, "longer": _longer, "padding": _padding, "packed": _packed,
}  # fmt: skip


class _Model:
    """A model with an implementation in it, and its log-probabilities of the probe alone."""

    def __init__(self, model: str, dtype: str, device: str, provider: str, probe: int) -> None:
        if provider == "inductor":
            forget_compiled()
        built: Any = patched.build(model, dtype, device, layers=LAYERS).eval()
        self.model, self.call = built, rivals.get(TASK, _arm(provider)).build(built)
        self.inside: Callable[[], AbstractContextManager[Any]] = (
            fusedlib.batch_invariant if provider.endswith("-invariant") else nullcontext
        )
        self.ours = provider in ("fused", BATCH_INVARIANT)
        self.probe = probe
        self.ids = patched.tokens(model, 1, 8192, device)[0]
        self.alone = self.log_probs(_Inputs(self.ids[None, :probe]))

    @torch.no_grad()
    def log_probs(self, given: _Inputs) -> Tensor:
        """Of the probe's tokens but the first, fp32; fusedlib's by `linear_log_probs`."""
        more = {"attention_mask": given.mask, "position_ids": given.positions}
        more = {name: t for name, t in more.items() if t is not None}
        here = slice(given.start, given.start + self.probe - 1)
        wanted = self.ids[1 : self.probe]
        with self.inside(), torch._dynamo.config.patch(recompile_limit=64):  # a graph a shape
            if self.ours:
                hidden = self.model.model(given.ids, **more).last_hidden_state
                rows = given.ids.roll(-1, 1)
                found = fusedlib.linear_log_probs(hidden, self.model.lm_head.weight, rows)
                return found.log_probs[given.row, here]
            logits = self.call(given.ids, **more).logits[given.row, here]
        return logits.float().log_softmax(-1).gather(-1, wanted[:, None])[:, 0]


_model = lru_cache(maxsize=len(PROVIDERS))(_Model)  # those of a race, for the next race


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here."""
    patched.require_possible({**case, "provider": _arm(case["provider"])})


def measure(case: Case) -> Figures:
    """The share of log-probabilities with other bits than alone; the largest change, in nats."""
    named = (case[name] for name in ("model", "dtype", "device", "provider", "context_length"))
    model = _model(*named)
    given = SITUATIONS[case["situation"]](model.ids, model.probe, case["tokens"])
    found = model.log_probs(given)
    return {
        "changed_fraction": float((found != model.alone).double().mean()),
        "largest_change": float((found - model.alone).abs().max()),
    }


def _arm(provider: str) -> str:
    return BASELINE if provider == "huggingface-invariant" else provider
