"""What all tests share: what a machine lacks is said, never passed over."""

import sys
from importlib.util import find_spec

import pytest

# A GPU node that only measures may lack what turns notebooks into pages; `make test` never does.
RENDERING = ("typst", "pypandoc", "nbconvert")
MISSING = [name for name in RENDERING if find_spec(name) is None]
collect_ignore_glob = ["test_report_*.py"] if MISSING else []


@pytest.fixture(autouse=True)
def same_numbers():
    """What a test draws does not depend on those that ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def card_folder(monkeypatch, tmp_path):
    """Where a process that sees a made-up card keeps its tiles; not there yet."""
    from autotune_stand_ins import play_card  # needs Triton

    play_card(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


def pytest_report_header():
    return f"the report's tests are left out: no {', '.join(MISSING)}" if MISSING else None


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
