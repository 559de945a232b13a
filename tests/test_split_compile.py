"""The split kernels compiled ahead of time, every configuration for its architecture."""

import ahead
import pytest

pytest.importorskip("triton")
from fusedlib.kernels import swiglu_configs
from fusedlib.kernels.split import product as products

pytestmark = pytest.mark.timeout(600)
ARCHITECTURES = sorted(products.CONFIGS)


@pytest.fixture(scope="module")
def compiled() -> dict[int, list[dict]]:
    """Every kernel's figures by architecture."""
    return ahead.compiled_by_architecture("split_ahead.py")


def faults(row: dict) -> list[str]:
    """What a kernel must not do on its architecture."""
    found = ahead.faults(row, row["name"].startswith(("tl", "gluon")))
    if row["name"].startswith("gluon") and not row.get("UTMALDG"):
        found.append(f"{row['name']}: no TMA")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_kernels_fit_and_spill_nothing(compiled, architecture):
    rows = compiled[architecture]
    assert len(rows) == len({row["name"] for row in rows}) == (14 if architecture == 90 else 10)
    assert [fault for row in rows for fault in faults(row)] == []


def test_every_architecture_has_a_configuration():
    assert set(products.CONFIGS) == set(swiglu_configs.SHARED_MEMORY)


def test_faults_are_found():
    right = {
        "name": "gluon 00",
        "arch": 90,
        "STACK": 0,
        "shared": 200_000,
        "HGMMA": 8,
        "UTMALDG": 1,
    }
    assert faults(right) == []
    for change in ({"STACK": 8}, {"STL": 1}, {"shared": 232_449}, {"HGMMA": 0}, {"UTMALDG": 0}):
        assert faults(right | change)
    assert faults({**right, "name": "split rows"})
