"""The SwiGLU kernels compiled ahead of time, every configuration for its architecture."""

import ahead
import pytest

pytest.importorskip("triton")
from fusedlib.kernels import swiglu_configs

pytestmark = pytest.mark.timeout(600)  # 40 seconds of one core, wherever nothing is cached
ARCHITECTURES = sorted(swiglu_configs.SHARED_MEMORY)


@pytest.fixture(scope="module")
def compiled() -> dict[int, list[dict]]:
    """Every kernel's figures by architecture."""
    return ahead.compiled_by_architecture("swiglu_ahead.py")


def faults(row: dict) -> list[str]:
    """What a kernel must not do on its architecture."""
    return ahead.faults(row, "ieee" not in row["name"] and "pointwise" not in row["name"])


def test_tables_have_every_architecture():
    assert set(swiglu_configs.FORWARD) == set(swiglu_configs.BACKWARD) == set(ARCHITECTURES)
    assert min(ARCHITECTURES, key=swiglu_configs.SHARED_MEMORY.get) == swiglu_configs.SMALLEST


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_kernels_fit_and_spill_nothing(compiled, architecture):
    rows = compiled[architecture]
    # Hopper has three widths for few tokens.
    known = 23 if architecture == 90 else 14
    assert len(rows) == len({row["name"] for row in rows}) == known
    assert [fault for row in rows for fault in faults(row)] == []


@pytest.mark.slow
def test_on_hopper_aligned_products_load_by_tma(compiled):
    rows = {row["name"]: row for row in compiled[90]}
    for name in (
        "fwd half",
        "bwd half",
        "bwd half in place",
    ):
        assert rows[name].get("UTMALDG"), name
    for name in ("fwd half unaligned", "fwd half few tokens 32 wide"):
        assert not rows[name].get("UTMALDG"), name


def test_faults_are_found():
    right = {"name": "fwd half", "arch": 90, "STACK": 0, "shared": 200_000, "HGMMA": 8}
    assert faults(right) == []
    for change in ({"STACK": 8}, {"STL": 1}, {"shared": 232_449}, {"HGMMA": 0}, {"arch": 89}):
        assert faults(right | change)
    assert faults({**right, "name": "fwd ieee"})
