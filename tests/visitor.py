"""A visitor's process: rows, products and machine of its own, this checkout's code."""

import os
from pathlib import Path

from study import paths

LIGHTER = Path(__file__).parent / "lighter"
"""A folder before the installed packages; it holds what the study's processes do without."""


def search_path(*folders: Path) -> str:
    """PYTHONPATH of such a process, these folders first."""
    existing = filter(None, [os.environ.get("PYTHONPATH", "")])
    return os.pathsep.join([*map(str, (*folders, LIGHTER, *paths.PACKAGES)), *existing])


def environment(folder: Path) -> dict[str, str]:
    """Variables for a study whose rows go to folder/results/visitor and pages to folder/build."""
    return os.environ | {
        "FUSEDLIB_RESULTS": str(folder / "results"),
        "FUSEDLIB_BUILD": str(folder / "build"),
        "FUSEDLIB_MACHINE": "visitor",
        "PYTHONPATH": search_path(),
    }
