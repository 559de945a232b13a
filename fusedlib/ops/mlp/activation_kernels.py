# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""The activations of a gated MLP in its kernels: the one place where their formulas stand.

    act(g) = g s(g)        act'(g) = s + g s'(g)

| name      | s                        | s'           |
|-----------|--------------------------|--------------|
| silu      | σ(g)                     | s (1 − s)    |
| gelu_tanh | σ(z), z = g (a + b g²)   | s (1 − s) z' |
| gelu      | Φ(g) = ½ (1 + erf(g/√2)) | φ(g)         |

a = 2 √(2/π), b = 0.044715 a: σ(z) = ½ (1 + tanh(z/2)). Φ and φ are the normal distribution's.
`fusedlib.ops.mlp.activation.ACTIVATIONS` has the same in plain PyTorch. A new one is an entry
there and a branch here.

What `fusedlib.ops.mlp.tiles` says of errors with silu holds of gelu with 1.13 for 1.1 and 0.8 for
½; by tanh with |z| for |gate| in t, and exact gelu errs by 2⁻²² |gate| and its derivative by
2·2⁻²² in place of t |silu| and t.
"""

import triton
import triton.language as tl


@triton.jit
def activate(gate, sigmoid: tl.constexpr, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """act(gate) and s of fp32 numbers; `sigmoid` is a function of the kernel's language."""
    if ACTIVATION == "gelu":
        s = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        s = sigmoid(gate * (1.5957691216057308 + 0.07135481627260025 * (gate * gate)))
    else:
        tl.static_assert(ACTIVATION == "silu", "an activation that the kernels do not know")
        s = sigmoid(gate)
    return gate * s, s


@triton.jit
def slope(gate, activated, s, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """act'(gate), of what `activate` gave."""
    if ACTIVATION == "gelu":
        result = s + gate * (0.3989422804014327 * tl.exp(-0.5 * gate * gate))
    elif ACTIVATION == "gelu_tanh":
        # From |gate| = 16 on s is 0 or 1, whatever z' is, which must not overflow.
        inner = 1.5957691216057308 + 0.21406444881780074 * tl.minimum(gate * gate, 256.0)
        result = s + activated * (1 - s) * inner
    else:
        tl.static_assert(ACTIVATION == "silu", "an activation that the kernels do not know")
        result = s + activated * (1 - s)
    return result
