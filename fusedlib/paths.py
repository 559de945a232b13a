"""Where things lie: the only module that builds a path of the project."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
REPORT = ROOT / "report"
PUBLISHED = REPORT / "published"
TEMPLATES = REPORT / "templates"


def results_dir() -> Path:
    """Folder of the recorded rows: `$FUSEDLIB_RESULTS`, else `report/results`."""
    return Path(os.environ.get("FUSEDLIB_RESULTS") or REPORT / "results")


def build_dir() -> Path:
    """Folder of the build products: `$FUSEDLIB_BUILD`, else `report/build`."""
    return Path(os.environ.get("FUSEDLIB_BUILD") or REPORT / "build")


def data_dir() -> Path:
    """Folder of the data sets: `$FUSEDLIB_DATA`, else `fusedlib` in the user's cache folder."""
    if given := os.environ.get("FUSEDLIB_DATA"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusedlib"
