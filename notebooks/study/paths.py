"""Where things lie: the only module that builds a path of the project."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
REPORT = ROOT / "report"
# What PYTHONPATH must name for `fusedlib`, `study` and `press` to be found.
PACKAGES = ROOT, NOTEBOOKS, REPORT
RECORDED = REPORT / "results"
PUBLISHED = REPORT / "published"
TEMPLATES = REPORT / "templates"


def data_dir() -> Path:
    """Folder of the data sets: `$FUSEDLIB_DATA`, else `fusedlib` in the user's cache folder.

    That is `$XDG_CACHE_HOME` where it is an absolute path, else `~/.cache`.

    Raises:
        RuntimeError: this user has no home.
    """
    if given := os.environ.get("FUSEDLIB_DATA"):
        return Path(given)
    users = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (users if users.is_absolute() else Path("~/.cache").expanduser()) / "fusedlib"


def results_dir() -> Path:
    """Folder of the recorded rows: `$FUSEDLIB_RESULTS`, else `report/results`."""
    return Path(os.environ.get("FUSEDLIB_RESULTS") or REPORT / "results")


def build_dir() -> Path:
    """Folder of the build products: `$FUSEDLIB_BUILD`, else `report/build`."""
    return Path(os.environ.get("FUSEDLIB_BUILD") or REPORT / "build")
