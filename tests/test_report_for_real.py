"""A notebook and the paper's sections, run as `make report` does, and the pages made from them."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import limits
import visitor
from page_checks import loads
from press import run

NAMES = "06_attention"


def make_report(folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "press", "report", "--only", NAMES]
    return subprocess.run(
        command, env=visitor.environment(folder), capture_output=True, text=True, check=False,
        timeout=limits.PROCESS_S,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def first(folder) -> subprocess.CompletedProcess:
    return make_report(folder)


@pytest.mark.slow
def test_a_report_is_made_and_loads_nothing(folder, first):
    assert first.returncode == 0, first.stderr
    build = folder / "build"
    html = (build / "report.html").read_text(encoding="utf-8")
    assert (build / "report.pdf").read_bytes().startswith(b"%PDF")
    assert not loads(html)
    assert "gave nothing to show" not in html and "failed; what it showed" not in html
    for name in (NAMES, *(part.name for part in run.sections())):
        assert not loads((build / "notebooks" / f"{name}.html").read_text(encoding="utf-8"))
        copy = nbformat.read(build / "notebooks" / f"{name}.ipynb", as_version=4)
        assert any(cell.get("outputs") for cell in copy.cells)


@pytest.mark.slow
def test_a_second_report_keeps_what_did_not_change_and_gives_the_same_pages(folder, first):
    pages = {path: path.read_bytes() for path in (folder / "build").rglob("*.html")}
    rows = {path: path.read_bytes() for path in (folder / "results").rglob("*.jsonl")}
    again = make_report(folder)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("unchanged, kept") == 1 + len(run.sections())
    assert {path: path.read_bytes() for path in pages} == pages
    assert {path: path.read_bytes() for path in rows} == rows
