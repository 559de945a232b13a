"""Compiles the autotuner's candidates for one architecture without a GPU and says what came out.

Run in a process of its own, without Triton's interpreter:
    python autotune_ahead.py ARCHITECTURE
prints one JSON object a kernel, as swiglu_ahead.py does.
"""

import json
import sys

from swiglu_ahead import BACKWARD, FORWARD, IN_PLACE, compiled, figures

from fusedlib.kernels.autotune import candidates
from fusedlib.kernels.swiglu_configs import FEW_TOKENS


def main() -> None:
    arch = int(sys.argv[1])
    for spec in (FORWARD, BACKWARD, IN_PLACE):
        for tokens in (FEW_TOKENS, FEW_TOKENS + 1):
            for config in candidates.of(spec["kernel"], arch, tokens):
                row = figures(compiled(arch, spec, "half", config, True))
                print(
                    json.dumps({"name": f"{spec['kernel']} {config}", "arch": arch, **row}),
                    flush=True,
                )


if __name__ == "__main__":
    main()
