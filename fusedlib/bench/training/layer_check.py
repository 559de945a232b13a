"""The layer of an arm against the reference in float64: h and every gradient, before it trains."""

from typing import Any

import torch
from torch import Tensor

from fusedlib import reference
from fusedlib.bench import check
from fusedlib.bench.training.arms import ARMS, Arm, autocast
from fusedlib.bench.training.network import Packed, Separate

# TF32 has fp16's 11 bits; see `fusedlib.bench.check` for the rule.
FLOORS = {"fp32": torch.float32, "tf32": torch.float16, "bf16": torch.bfloat16}


def verdict(
    arm: Arm, precision: str, hidden: int, width: int, batch_size: int, device: str
) -> dict[str, Any]:
    """Errors as figures, and which backward ran; `status` and `reason` where the arm is wrong.

    x and dh are normal, weights as a layer draws them. A gradient counts as missing where the arm
    trains its weights and none arrives. The rule is `check`'s, with plain PyTorch in the same
    precision as the measure. Call it within `arms.settings`.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    x, dh = (
        torch.randn(batch_size, n, generator=generator, device=device) for n in (hidden, width)
    )
    layer, eager = (_drawn(a, hidden, width, device) for a in (arm, ARMS["eager"]))
    true = _truth(eager, x, dh)
    usual = check.errors(_results(eager, x, dh, precision)[0], true)
    found, backward = _results(layer, x, dh, precision)
    errors = check.errors(found, true)
    wrong = check.misses(errors, usual, FLOORS[precision])
    wrong += _missing(layer)
    figures: dict[str, Any] = {f"{name}_error": e.norm for name, e in errors.items()}
    figures |= {"layer_backward": backward, "missing_gradients": _missing(layer)}
    return figures | ({"status": "wrong", "reason": "; ".join(wrong)} if wrong else {})


def _drawn(arm: Arm, hidden: int, width: int, device: str) -> Separate | Packed:
    torch.manual_seed(0)
    return arm.layer(hidden, width, device)


def _truth(layer: Separate | Packed, x: Tensor, dh: Tensor) -> dict[str, Tensor]:
    operands = {"x": x, **{f"w_{name}": w for name, w in layer.weights().items()}}
    leaves = {name: t.detach().double().requires_grad_() for name, t in operands.items()}
    h = reference.swiglu(**leaves)
    h.backward(dh.double())
    gradients = {f"d_{name}": t.grad for name, t in leaves.items() if t.grad is not None}
    return {"h": h.detach(), **gradients}


def _results(
    layer: Separate | Packed, x: Tensor, dh: Tensor, precision: str
) -> tuple[dict[str, Tensor], str]:
    """h and the gradients that arrived, by the reference's names, and the name of h's backward."""
    x = x.clone().requires_grad_()
    with autocast(precision, str(x.device)):
        h = layer(x)
    backward = h.grad_fn.name() if h.grad_fn is not None else "none"
    h.backward(dh.to(h.dtype))
    found = {"h": h.detach(), "d_x": x.grad}
    found |= {f"d_w_{name}": gradient for name, gradient in layer.gradients().items()}
    return {name: t for name, t in found.items() if t is not None}, backward


def _missing(layer: Separate | Packed) -> list[str]:
    """What trained weights lack."""
    if not any(p.requires_grad for p in layer.parameters()):
        return []
    return [f"no gradient arrived at w_{n}" for n, g in layer.gradients().items() if g is None]
