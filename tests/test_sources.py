"""The fingerprints cover every file of a study's room and, where it measures them, of the kernels.

Of a package its `__init__`: `sources.kernel_modules` says why.
"""

from pathlib import Path

import pytest

from fusedlib import paths
from fusedlib.bench import anatomy, kernel_sweep, memory, sources
from fusedlib.bench.attention import cases as attention
from fusedlib.bench.end_to_end import cases as end_to_end
from fusedlib.bench.model_memory import cases as model_memory
from fusedlib.bench.profiles import cases as profiles
from fusedlib.bench.training import cases as training

ROOMS = [end_to_end, attention, profiles, model_memory, training]


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


@pytest.mark.parametrize("study", ROOMS, ids=lambda s: s.STUDY)
def test_a_study_s_room_is_in_its_fingerprint_whole(study, monkeypatch):
    before, original = study.code(), sources.modules_of
    folder = Path(study.__file__).parent
    own = list(original(study.__package__))
    assert {Path(str(m.__file__)) for m in own} == set(folder.glob("*.py")) - {
        folder / "__init__.py"
    }
    monkeypatch.setattr(
        sources, "modules_of", lambda name: list(original(name))[name == study.__package__ :]
    )
    assert study.code() != before


def test_a_package_that_is_not_there_is_told():
    with pytest.raises(ModuleNotFoundError, match=r"no package 'fusedlib\.nowhere'"):
        list(sources.modules_of("fusedlib.nowhere"))
