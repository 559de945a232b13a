"""WRONG ON PURPOSE: the published fused SwiGLU with its flaw, for topic `anatomy` alone.

Rebuilt from the published code's arithmetic. Tile n of h is

    published   silu(x[:, n] Wg[0, n]ᵀ) ⊙ (x[:, n] Wu[0, n]ᵀ)
    right       silu(Σ_k x[:, k] Wg[n, k]ᵀ) ⊙ (Σ_k x[:, k] Wu[n, k]ᵀ)

where [i, j] are square blocks: one block of K, and always W's first rows. Its backward does the
same for dx and gives the gate and up weights no gradient; a second version gives them one that is
as wrong. `whole_sum` puts the sum in, `weight_gradients` the gradients. It and its repairs are
rivals of a task of their own, and lie beside their notebook, so that `fusedlib` cannot import them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear, silu

from fusedlib.bench.attempt import Unavailable
from fusedlib.launch import INTERPRETED
from study.mlp import Inputs
from study.rivals import Bound, Task, Workload, rival

TASK = Task[[Inputs], Workload | Bound]("published swiglu")
BLOCK, TEST_BLOCK = 64, 16  # of the published kernel, and of its published test
kernels: Any = importlib.import_module("flawed_kernels") if find_spec("triton") else None


def block_of(tokens: int) -> int:
    """Rows, columns and K of the published kernel's tiles; its test's where tokens are few."""
    return BLOCK if tokens >= BLOCK else TEST_BLOCK


@dataclass(frozen=True)
class Variant:
    """The published kernel and its repairs.

    Attributes:
        whole_sum: whether the sum over K is there; without it the result is wrong.
        weight_gradients: whether gate and up weights receive a gradient.
        dot_precision: of the kernel's own products, "tf32" (Triton's default for fp32) or "ieee".
        block: rows, columns and, without the whole sum, K of a tile.
        emulated: plain PyTorch instead of Triton; errors only.
    """

    whole_sum: bool = False
    weight_gradients: bool = False
    dot_precision: str = "tf32"
    block: int = BLOCK
    emulated: bool = False


_torch: dict[str, Any] = {"dtypes": ("float32",)}
_triton: dict[str, Any] = {**_torch, "requires": ("triton",), "needs_cuda": True}
_tf32, _emulated = frozenset({"timed", "tf32"}), frozenset({"emulated"})


@rival(TASK, "published-kernel", traits=_tf32, **_triton)
def published(inputs: Inputs) -> Workload:
    """WRONG: one block of K, W's first rows, TF32, no gradient of gate and up weights."""
    return build(inputs, Variant())


@rival(TASK, "whole-sum", traits=_tf32, **_triton)
def whole_sum(inputs: Inputs) -> Workload:
    """The published tiles summed over all of K, in TF32; no gradient of gate and up weights."""
    return build(inputs, Variant(whole_sum=True))


@rival(TASK, "all-gradients", traits=_tf32, **_triton)
def all_gradients(inputs: Inputs) -> Workload:
    """The published tiles summed over all of K, in TF32, with every gradient."""
    return build(inputs, Variant(whole_sum=True, weight_gradients=True))


@rival(TASK, "ieee-products", traits=frozenset({"timed"}), **_triton)  # fmt: skip
def ieee(inputs: Inputs) -> Workload:
    """The published tiles summed over all of K, in IEEE fp32, with every gradient."""
    return build(inputs, Variant(True, True, dot_precision="ieee"))


@rival(TASK, "published-kernel-emulated", traits=_emulated, **_torch)  # fmt: skip
def emulated(inputs: Inputs) -> Workload:
    """WRONG: the published arithmetic in plain PyTorch."""
    return build(inputs, Variant(emulated=True))


@rival(TASK, "second-version-emulated", traits=_emulated, **_torch)  # fmt: skip
def second_version(inputs: Inputs) -> Workload:
    """WRONG: the published arithmetic with the published gradients of gate and up weights."""
    return build(inputs, Variant(weight_gradients=True, emulated=True))


def build(inputs: Inputs, variant: Variant) -> Workload:
    """The published kernel, or one of its repairs, on these inputs; y = h Wdᵀ by torch.

    Raises:
        Unavailable: a Triton variant, and the inputs are not on a CUDA GPU.
        ValueError: a shape that it does not take.
    """
    tokens, width = inputs.x.shape
    block = tokens if variant.emulated else block_of(tokens)
    variant = replace(variant, block=block)
    if inputs.w_gate.shape != (width, width) or width % variant.block:
        raise ValueError(
            f"the published kernel takes square weights, in blocks of {variant.block}; "
            f"got {tuple(inputs.w_gate.shape)}"
        )
    if not variant.emulated and kernels is None:
        raise Unavailable("the package triton is not installed")
    if not variant.emulated and inputs.x.device.type != "cuda" and not INTERPRETED:
        raise Unavailable(f"Triton kernels need a CUDA GPU, this is {inputs.x.device.type}")
    w_gate_up = torch.cat([inputs.w_gate, inputs.w_up]).detach().requires_grad_()
    leaves = {"x": inputs.x, "w_gate_up": w_gate_up, "w_down": inputs.w_down}
    kind = _Emulated if variant.emulated else _Kernels

    def forward() -> Tensor:
        return linear(kind.apply(inputs.x, w_gate_up, variant), inputs.w_down)

    return Workload(forward, leaves)


class _Kernels(Function):
    """The Triton kernels; WRONG unless the variant has the whole sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_gate_up: Tensor, variant: Variant) -> Tensor:
        ctx.save_for_backward(x, w_gate_up)
        ctx.variant = variant
        return kernels.forward(x, w_gate_up, **_options(variant))

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w_gate_up = ctx.saved_tensors
        found = kernels.backward(x, w_gate_up, dh, **_options(ctx.variant))
        if not ctx.variant.whole_sum:
            return found, None, None  # as published: the weights' gradient is None
        d_weights = found.mT @ x if ctx.variant.weight_gradients else None
        return found @ w_gate_up, d_weights, None


def _options(variant: Variant) -> dict[str, Any]:
    return {
        "whole_sum": variant.whole_sum, "precision": variant.dot_precision, "block": variant.block
    }  # fmt: skip


class _Emulated(Function):
    """The published arithmetic in plain PyTorch, in the inputs' dtype; WRONG beyond one block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_gate_up: Tensor, variant: Variant) -> Tensor:
        ctx.save_for_backward(x, w_gate_up)
        ctx.variant = variant
        gate, up = _blocks(x, w_gate_up, variant.block)
        return (silu(gate) * up).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w_gate_up = ctx.saved_tensors
        block = ctx.variant.block
        gate, up = _blocks(x, w_gate_up, block)
        d, s = dh.reshape(gate.shape), torch.sigmoid(gate)
        d_gate, d_up = d * up * (s + gate * s * (1 - s)), d * gate * s
        w_gate, w_up = _first_rows(w_gate_up, block)
        dx = torch.einsum("tnj,jnk->tnk", d_gate, w_gate) + torch.einsum("tnj,jnk->tnk", d_up, w_up)
        if not ctx.variant.weight_gradients:
            return dx.reshape(x.shape), None, None
        # The second published version: dhᵀ x where d_up belongs, and nothing for the gate, whose
        # part it reads beyond the end of dh.
        d_weights = torch.cat([torch.zeros_like(x.mT @ x), dh.mT @ x])
        return dx.reshape(x.shape), d_weights, None


def _blocks(x: Tensor, w_gate_up: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """gate and up as published, [tokens, number of the block, block]."""
    split = x.reshape(x.shape[0], -1, block)
    gate, up = (torch.einsum("tnk,jnk->tnj", split, rows) for rows in _first_rows(w_gate_up, block))
    return gate, up


def _first_rows(w_gate_up: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The first `block` rows of gate and of up, [block, number of the block, block]."""
    width = w_gate_up.shape[1]
    gate, up = (
        w_gate_up[at : at + block].reshape(block, width // block, block) for at in (0, width)
    )
    return gate, up
