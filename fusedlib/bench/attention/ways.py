"""Who is measured: one function a way to compute the same attention, in `WAYS`.

Each gets the operands and returns a `Workload`. `fused` says that no T × T matrix is kept. A
backend of torch that refuses these operands is `Unavailable`, for the reasons that torch itself
gives.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedlib.bench.attention.problem import Operands
from fusedlib.bench.providers import Workload
from fusedlib.bench.results import Unavailable
from fusedlib.models.transformer import plain_attention

# How torch begins its refusal, on CUDA and elsewhere.
_REFUSED = ("No available kernel", "No viable backend")
_Build = Callable[[Operands], Workload]


@dataclass(frozen=True)
class Way:
    """A registered way: its name, how it is made, how it is set, and what kind it is."""

    name: str
    build: _Build
    settings: str
    fused: bool
    compiled: bool


WAYS: dict[str, Way] = {}


def way(name: str, *, fused: bool, compiled: bool = False) -> Callable[[_Build], _Build]:
    """Register a way; the first line of its docstring says in its rows how it is set."""

    def register(build: _Build) -> _Build:
        told = (build.__doc__ or "").partition("\n")[0].rstrip(".")
        WAYS[name] = Way(name, build, told, fused, compiled)
        return build

    return register


def get(name: str) -> Way:
    """The way of that name.

    Raises:
        ValueError: unknown, with the list of known ones.
    """
    if name not in WAYS:
        raise ValueError(f"unknown way {name!r} to compute attention; known: {', '.join(WAYS)}")
    return WAYS[name]


@way("plain", fused=False)
def plain(operands: Operands) -> Workload:
    """Every step an operation of its own, as in `fusedlib.models.transformer`."""
    leaves = operands.leaves()
    return Workload(lambda: plain_attention(*leaves.values()), leaves)


@way("inductor", fused=False, compiled=True)
def inductor(operands: Operands) -> Workload:
    """The plain one through torch.compile, default mode, fullgraph=True, dynamic=False."""
    leaves = operands.leaves()
    compiled = torch.compile(plain_attention, fullgraph=True, dynamic=False)
    return Workload(lambda: compiled(*leaves.values()), leaves)


def _backend(operands: Operands, backend: SDPBackend) -> Workload:
    query, key, value = operands.query, operands.key, operands.value

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            forward()
        except RuntimeError as error:
            if not str(error).startswith(_REFUSED):
                raise
            raise Unavailable(_refusal(error, told)) from error
    return Workload(forward, operands.leaves())


def _refusal(error: RuntimeError, told: list[warnings.WarningMessage]) -> str:
    """Torch's reasons: it warns of each before it raises, and of the other backends too."""
    said = [str(w.message).partition(" (Triggered internally")[0].strip() for w in told]
    reasons = [
        text for text in said
        if "not used because" not in text and "has been runtime disabled" not in text
    ]  # fmt: skip
    return " ".join(dict.fromkeys(reasons)) or str(error).strip().splitlines()[0]


for _name, _kind, _fused in (
    ("math", SDPBackend.MATH, False),
    ("flash", SDPBackend.FLASH_ATTENTION, True),
    ("efficient", SDPBackend.EFFICIENT_ATTENTION, True),
    ("cudnn", SDPBackend.CUDNN_ATTENTION, True),
):
    _told = f"scaled_dot_product_attention, backend {_kind.name}"
    WAYS[_name] = Way(_name, partial(_backend, backend=_kind), _told, _fused, False)


@way("flex", fused=True, compiled=True)
def flex(operands: Operands) -> Workload:
    """FlexAttention with a causal block mask, torch.compile, fullgraph=True, dynamic=False."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = operands.query.device
    if device.type != "cuda":
        raise Unavailable(f"torch has FlexAttention's backward pass on CUDA only, not {device}")
    query, key, value = operands.query, operands.key, operands.value
    length = query.shape[-2]
    mask = create_block_mask(_causal, None, None, length, length, device=str(device))
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def forward() -> Tensor:
        mixed = compiled(query, key, value, block_mask=mask)
        assert isinstance(mixed, Tensor)  # it gives the logsumexp too, when asked for it
        return mixed

    return Workload(forward, operands.leaves())


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
