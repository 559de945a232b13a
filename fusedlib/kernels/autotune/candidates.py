"""The tiles that are tried on a card that the table was not measured on: a few a kernel.

`tests/test_autotune_compile.py` compiles every one for its architecture: nothing spilled, shared
memory within the card's. That bounds them: 128·64 with two accumulators (the forward) or 128·128
with one (the backward) is what 8.x has registers for; on 10.0 a persistent forward of 128·128
spills 8 bytes with eight warps, a backward with four 816 (triton 3.6.0).
"""

from __future__ import annotations

from fusedlib.kernels.swiglu_configs import FEW_TOKENS, Config

# Many tokens: taller, wider and squarer tiles, deeper blocks with fewer of them in flight.
FORWARD = {
    80: (
        Config(64, 64, 32, 4, 4),
        Config(64, 64, 64, 4, 3),
        Config(128, 32, 64, 4, 3),
        Config(64, 128, 32, 8, 3),
        Config(128, 64, 64, 8, 3),
    ),
    90: (
        Config(64, 64, 64, 4, 4, persistent=True, descriptors=True),
        Config(128, 64, 64, 8, 4, persistent=True, descriptors=True),
        Config(128, 128, 64, 8, 3),
    ),
    100: (
        Config(128, 64, 64, 4, 4),
        Config(128, 64, 64, 8, 4, persistent=True, descriptors=True),
    ),
}
BACKWARD = {
    80: (
        Config(64, 64, 64, 4, 3),
        Config(64, 128, 32, 4, 4),
        Config(128, 64, 32, 4, 4),
        Config(128, 64, 64, 8, 3),
        Config(128, 128, 32, 8, 4),
    ),
    90: (
        Config(64, 128, 64, 4, 4, persistent=True, descriptors=True),
        Config(128, 64, 64, 4, 4, persistent=True, descriptors=True),
        Config(128, 128, 64, 8, 4),
    ),
    100: (
        Config(128, 64, 64, 8, 4),
        Config(128, 128, 64, 8, 4, persistent=True, descriptors=True),
    ),
}

# At most FEW_TOKENS: reading the weights is all the work, so what differs is how many bytes of them
# a program asks for at a time (width · depth) and how many programs there are.
FEW_FORWARD = (
    Config(64, 16, 64, 4, 4),
    Config(64, 16, 128, 4, 4),
    Config(64, 32, 64, 4, 4),
    Config(32, 32, 64, 4, 4),
    Config(16, 32, 64, 4, 4),
    Config(16, 64, 64, 4, 4),
)
FEW_BACKWARD = (
    Config(64, 16, 128, 4, 4),
    Config(64, 32, 64, 4, 4),
    Config(64, 64, 64, 4, 4),
    Config(32, 32, 128, 4, 4),
    Config(16, 64, 64, 4, 4),
)

_MANY = {"_swiglu_fwd_kernel": FORWARD, "_swiglu_bwd_kernel": BACKWARD}
_FEW = {"_swiglu_fwd_kernel": FEW_FORWARD, "_swiglu_bwd_kernel": FEW_BACKWARD}


def of(kernel: str, architecture: int, tokens: int) -> tuple[Config, ...]:
    """What to try for a kernel of that name; nothing for one that is not tuned.

    Args:
        kernel: its name.
        architecture: the table's key, as `swiglu_configs.architecture` gives it.
        tokens: of the call.
    """
    if tokens <= FEW_TOKENS:
        return _FEW.get(kernel, ())
    return _MANY.get(kernel, {}).get(80 if architecture == 89 else architecture, ())
