"""Compiles the autotuner's candidates for one architecture without a GPU and says what came out.

Run in a process of its own, without Triton's interpreter:
    python autotune_ahead.py ARCHITECTURE
prints one JSON object a kernel, as `sass.show` says.
"""

import sys
from collections.abc import Iterator

from sass import show
from swiglu_ahead import BACKWARD, FORWARD, IN_PLACE, compiled

from fusedlib.kernels.autotune import candidates
from fusedlib.kernels.swiglu_configs import FEW_TOKENS


def made(arch: int) -> Iterator[tuple[dict, object]]:
    """(what is said of it, kernel)."""
    for spec in (FORWARD, BACKWARD, IN_PLACE):
        for tokens in (FEW_TOKENS, FEW_TOKENS + 1):
            for config in candidates.of(spec["kernel"], arch, tokens):
                label = f"{spec['kernel']} {config}"
                yield {"name": label, "arch": arch}, compiled(arch, spec, "half", config, True)


if __name__ == "__main__":
    show(made(int(sys.argv[1])))
