"""The fingerprints of what measures the kernels cover every file of theirs.

Of a package its `__init__`: `sources.kernel_modules` says why.
"""

from pathlib import Path

import pytest

from fusedlib import paths
from fusedlib.bench import anatomy, kernel_sweep, memory, sources
from fusedlib.bench.end_to_end import cases as end_to_end
from fusedlib.bench.training import cases as training


def test_every_kernel_file_is_a_source():
    folder = paths.ROOT / "fusedlib" / "kernels"
    files = {*folder.glob("*.py"), *folder.glob("*/__init__.py")} - {folder / "__init__.py"}
    named = {Path(str(module.__file__)) for module in sources.kernel_modules()}
    assert named == files and folder / "swiglu.py" in named


@pytest.mark.parametrize(
    "study", [kernel_sweep, memory, anatomy, end_to_end, training], ids=lambda s: s.STUDY
)
@pytest.mark.parametrize("kernel", ["swiglu", "split_product"])
def test_rows_of_another_kernel_are_older_rows(study, kernel, monkeypatch):
    before = study.code()
    modules = list(sources.kernel_modules())
    rest = [m for m in modules if not m.__name__.endswith(f".{kernel}")]
    assert len(rest) == len(modules) - 1
    monkeypatch.setattr(sources, "kernel_modules", lambda: iter(rest))
    assert study.code() != before
