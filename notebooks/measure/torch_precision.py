"""What torch itself does: sums in half precision, matmul precision settings, and autocast.

experiment      question
torch_sum       is a sum of half-precision terms accumulated in half precision?
torch_matmul    what do set_float32_matmul_precision and the reduced-precision reductions change?
autocast        which operations run in half precision, which in fp32, which follow their input?
autocast_model  the dtypes inside a small network trained under autocast
"""

import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedlib.bench.attempt import Unavailable
from measure import accumulation, formats
from measure.accumulation import DTYPES, Figures
from measure.racing.cases import Case
from measure.racing.settings import matmul_settings

NAMES = {dtype: name for name, dtype in DTYPES.items()}


# --- sums -----------------------------------------------------------------------------------------

SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.sum": torch.sum,
    "torch.sum, dtype=float32": lambda x: torch.sum(x, dtype=torch.float32),
    "torch.cumsum": lambda x: torch.cumsum(x, 0)[-1],
    "torch.dot with ones": lambda x: torch.dot(x, torch.ones_like(x)),
}
ONE_BY_ONE = "one by one"


def measure_sum(case: Case) -> Figures:
    """Error of one way of summing, and the same in unit roundoffs of the terms' format."""
    dtype, provider = case["dtype"], case["provider"]
    terms = accumulation.rounded_terms(case["distribution"], case["n_terms"], case["seeds"], dtype)
    wide = terms.astype(np.float64)
    if provider == ONE_BY_ONE:
        value = accumulation.sequential(terms, dtype)
    else:
        columns = torch.from_numpy(terms.T.copy()).to(case["device"], DTYPES[dtype])
        value = np.array([SUMS[provider](column).item() for column in columns])
    exact, magnitude = accumulation.exact_sums(wide), np.abs(wide).sum(axis=0)
    figures = accumulation.error_figures(value, exact, magnitude)
    roundoff = formats.get(dtype).unit_roundoff
    return figures | {"error_in_roundoffs": figures["relative_error_high"] / roundoff}


# --- matrix products ------------------------------------------------------------------------------


def measure_matmul(case: Case) -> Figures:
    """Error |out - ref| / |ref| (Frobenius) against float64, and what share of it the setting
    changed; `best_possible_error` is that of the exact product rounded once.
    """
    device = case["device"]
    if device == "cuda" and not torch.cuda.is_available():
        raise Unavailable("needs a CUDA GPU: the setting only concerns cuBLAS")
    generator = torch.Generator().manual_seed(0)
    m, n, k = (case[name] for name in "mnk")
    dtype = DTYPES[case["dtype"]]
    left = torch.randn(m, k, generator=generator).to(device, dtype)
    right = torch.randn(k, n, generator=generator).to(device, dtype)
    with matmul_settings("highest", reduced=False):
        plain = left @ right
    with matmul_settings(case["precision"], case["reduced_reduction"]):
        out = left @ right
    reference = left.double() @ right.double()
    return {
        "relative_error": float((out - reference).norm() / reference.norm()),
        "best_possible_error": float(
            (reference.to(dtype).double() - reference).norm() / reference.norm()
        ),
        "changed_fraction": float((out != plain).double().mean()),
    }


# --- autocast -------------------------------------------------------------------------------------

_IMAGE = (2, 8, 8, 8)


def _ones(like: Tensor, *shape: int) -> Tensor:
    return torch.ones(*shape, device=like.device)


def _module(make: Callable[[], nn.Module]) -> Callable[[Tensor], Tensor]:
    return lambda x: make().to(x.device)(x)


# Every operation takes x of shape [2, 8, 8, 8]; parameters and second operands are fp32, as in
# training.
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": _module(lambda: nn.Linear(8, 8)),
    "matmul": lambda x: x @ _ones(x, 8, 8),
    "conv2d": _module(lambda: nn.Conv2d(8, 8, 3)),
    "attention (sdpa)": lambda x: F.scaled_dot_product_attention(x, x, x),
    "layer_norm": _module(lambda: nn.LayerNorm(8)),
    "rms_norm": _module(lambda: nn.RMSNorm(8)),
    "batch_norm": _module(lambda: nn.BatchNorm2d(8)),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "cross_entropy": lambda x: F.cross_entropy(
        x.flatten(1), torch.zeros(2, dtype=torch.long, device=x.device)
    ),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "cumsum": lambda x: x.cumsum(0),
    "exp": lambda x: x.exp(),
    "log": lambda x: x.abs().log(),
    "pow": lambda x: x.pow(2.0),
    "relu": lambda x: x.relu(),
    "gelu": lambda x: F.gelu(x),
    "silu": lambda x: F.silu(x),
    "x + fp32": lambda x: x + _ones(x, 8),
    "x + x": lambda x: x + x,
}


def classify(for_fp32: str, for_half: str, half: str, promoted: bool = False) -> str:
    """Name what autocast did from the output dtypes of an fp32 and a half-precision input.

    `promoted` says that the half-precision input gives fp32 without autocast too.
    """
    if promoted and (for_fp32, for_half) == ("fp32", "fp32"):
        return "fp32, also without autocast"
    kinds = {
        (half, half): "half",
        ("fp32", "fp32"): "fp32",
        ("fp32", half): "follows its input",
    }
    return kinds.get((for_fp32, for_half), f"{for_fp32} from fp32, {for_half} from {half}")


def _gives_fp32_alone(
    operation: Callable[[Tensor], Tensor], dtype: torch.dtype, device: str
) -> bool:
    """Whether a half-precision input gives fp32 without autocast; many operations refuse to mix."""
    try:
        with torch.no_grad():
            return operation(torch.ones(_IMAGE, dtype=dtype, device=device)).dtype == torch.float32
    except RuntimeError:
        return False


def measure_autocast(case: Case) -> Figures:
    """Output dtypes of one operation under autocast, for an fp32 and a half-precision input."""
    dtype, device = case["dtype"], case["device"]
    operation = OPERATIONS[case["provider"]]
    with warnings.catch_warnings(), torch.no_grad(), torch.autocast(device, dtype=DTYPES[dtype]):
        warnings.simplefilter("ignore")  # rms_norm warns that mixed dtypes are slow
        outputs = [
            NAMES[operation(torch.ones(_IMAGE, dtype=given, device=device)).dtype]
            for given in (torch.float32, DTYPES[dtype])
        ]
    promoted = outputs[1] == "fp32" and _gives_fp32_alone(operation, DTYPES[dtype], device)
    return {"kind": classify(outputs[0], outputs[1], dtype, promoted)}


MODEL_PARTS = (
    "parameters", "first linear's output", "layer norm's output", "logits", "loss", "gradients",
)  # fmt: skip


def measure_autocast_model(case: Case) -> Figures:
    """One training step of linear, ReLU, layer norm, linear, cross entropy: a part's dtype."""
    device, dtype = case["device"], DTYPES[case["dtype"]]
    first, norm, last = (
        m.to(device) for m in (nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    )
    x, target = torch.randn(2, 8, device=device), torch.zeros(2, dtype=torch.long, device=device)
    with torch.autocast(device, dtype=dtype):
        hidden = first(x)
        normed = norm(hidden.relu())
        logits = last(normed)
        loss = F.cross_entropy(logits, target)
    loss.backward()
    assert first.weight.grad is not None
    parts = (first.weight, hidden, normed, logits, loss, first.weight.grad)
    dtypes = {name: NAMES[part.dtype] for name, part in zip(MODEL_PARTS, parts, strict=True)}
    return {"output_dtype": dtypes[case["provider"]]}
