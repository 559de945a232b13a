"""A visitor's process: rows, products and machine of its own, this checkout's code."""

import os
from pathlib import Path

from fusedlib import paths


def environment(folder: Path) -> dict[str, str]:
    """Variables for a study whose rows go to folder/results/visitor and pages to folder/build."""
    return os.environ | {
        "FUSEDLIB_RESULTS": str(folder / "results"),
        "FUSEDLIB_BUILD": str(folder / "build"),
        "FUSEDLIB_MACHINE": "visitor",
        "PYTHONPATH": os.pathsep.join([str(paths.ROOT), os.environ.get("PYTHONPATH", "")]),
    }
