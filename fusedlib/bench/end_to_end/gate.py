"""Before the clock: a provider's MLP in a model, against the model's own in float64.

The model has the case's widths and tokens, and `LAYERS` blocks. Logits and every gradient, by the
state dict's names, may be off by twice what the model's own MLP makes in the same precision, plus a
floor: the rule of `fusedlib.bench.check`.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from fusedlib.bench import check
from fusedlib.bench.end_to_end import running
from fusedlib.bench.end_to_end.cases import Case
from fusedlib.models import mlps
from fusedlib.models.transformer import Transformer, config, loss

LAYERS = 2
FLOORS = {"fp32": torch.float32, "bf16 autocast": torch.bfloat16, "bf16": torch.bfloat16}


def verdict(case: Case) -> dict[str, Any]:
    """Errors as figures: `logits_error`, `gradients_error` (the largest, in norm), `loss_error`.

    `status` and `reason` where the provider is wrong.
    """
    context, device = case["context_length"], case["device"]
    torch.manual_seed(0)
    shape = config(
        case["model"], num_layers=LAYERS, context_length=context, attention=case["attention"]
    )
    dtype = getattr(torch, running.WEIGHTS[case["precision"]])
    model = Transformer(shape, device=device, dtype=dtype)
    tokens, targets = torch.randint(
        shape.vocab_size, (2, case["batch_size"], context), device=device
    )
    made = mlps.make(model, case["mlp"])
    true = _results(copy.deepcopy(model).double(), tokens, targets, None)
    usual = check.errors(_results(model, tokens, targets, case), true)
    model.zero_grad(set_to_none=True)
    found = check.errors(_results(mlps.place(model, made), tokens, targets, case), true)
    wrong = misses(found, usual, FLOORS[case["precision"]])
    gradients = [e.norm for name, e in found.items() if name not in ("logits", "loss")]
    figures: dict[str, Any] = {
        "logits_error": found["logits"].norm, "loss_error": found["loss"].norm,
        "gradients_error": max(gradients),
    }  # fmt: skip
    return figures | ({"status": "wrong", "reason": "; ".join(wrong[:5])} if wrong else {})


def misses(
    found: dict[str, check.Errors], usual: dict[str, check.Errors], dtype: torch.dtype
) -> list[str]:
    """What the rule rejects, one line a tensor; the loss is a mean of the logits' and not held."""
    floor = check.FLOOR_ROUNDOFFS * torch.finfo(dtype).eps / 2
    wrong = []
    for name in usual:
        if name == "loss":
            continue
        if name not in found:
            wrong.append(f"no gradient arrived at {name}")
            continue
        for measure in ("norm", "worst"):
            value = getattr(found[name], measure)
            allowed = check.TIMES_EAGER * getattr(usual[name], measure) + floor
            if not value <= allowed:
                wrong.append(f"{name}: {measure} error {value:.2e}, allowed {allowed:.2e}")
    return wrong


def _results(
    model: Transformer, tokens: Tensor, targets: Tensor, case: Case | None
) -> dict[str, Tensor]:
    call = model if case is None else running.autocast(case, model)
    logits = call(tokens)
    value = loss(logits, targets)
    value.backward()
    found = {name: g for name, g in mlps.gradients(model).items() if g is not None}
    return {"logits": logits.detach(), "loss": value.detach(), **found}
