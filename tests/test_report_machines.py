"""The paper's tables of machines and recordings: what is counted, and what differs today."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusedlib.bench import machine as this
from measure.recording import paths, provenance, results
from press import machine_tables

NOW = {f"fusedlib/f{n:02}.py": f"{n:040}" for n in range(12)}
RUN = {
    "environment": "e", "device_type": "cuda", "device_name": "NVIDIA H200", "cpu": "Xeon",
    "device_memory_gib": 140.0, "power_limit_w": 700.0, "cpu_cores": 16, "memory_gib": 125.9,
    "python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0", "numpy": "2.5.2", "cuda": "13.0",
    "driver": "580", "os": "Linux",
}  # fmt: skip


def put(folder: Path, name: str, rows: dict[str, list[dict]], files: dict, *runs: dict, **more):
    """A recording of `<machine>/<name>`."""
    at = folder / name
    at.mkdir(parents=True)
    described = {
        "schema": 2,
        "profile": "full",
        "runs": [RUN | run for run in runs],
        "files": files,
    }
    (at / results.DESCRIPTION).write_text(json.dumps(described | more))
    for study, lines in rows.items():
        full = [{"case": f"{n}", "status": "ok", **line} for n, line in enumerate(lines)]
        (at / f"{study}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in full))


def day(text: str, **more) -> dict:
    return {"measured_at": f"2026-11-{text}T10:00:00+00:00", **more}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """Two recordings of one machine and one of another, of code of three states, and ours."""
    monkeypatch.setattr(paths, "RECORDED", tmp_path)
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path))
    monkeypatch.setenv(this.NAME, "me")
    for function in (this.key, this.describe):
        function.cache_clear()
    monkeypatch.setattr(provenance, "files", lambda: NOW)
    old = {name: f"old {name}" for name in (*NOW, "fusedlib/gone.py")}
    first, second = ({"commit": c * 40, "began": f"2026-11-2{n}"} for n, c in enumerate("ab", 1))
    put(tmp_path, "h200/first", {"01_x": [day("22"), day("21")], "02_y": [day("23")]}, old,
        first, second)  # fmt: skip
    put(tmp_path, "h200/second", {"01_x": [day("24")]},
        NOW | {"fusedlib/f03.py": "2" * 40}, second | {"driver": "590"})  # fmt: skip
    put(tmp_path, "h100/only", {"01_x": [day("25")] * 4}, NOW, second | {"commit": None})
    put(tmp_path, "me/day-quick", {"02_y": [day("26")]}, {}, first, profile="quick")
    yield tmp_path
    for function in (this.key, this.describe):
        function.cache_clear()


def test_a_line_a_recording_with_its_days_commits_and_what_differs(folder):
    lines = machine_tables.recorded().set_index(["machine", "recording"])
    assert lines.index.tolist() == [
        ("h100", "only"), ("h200", "first"), ("h200", "second"), ("me", "day-quick")
    ]  # fmt: skip
    first = lines.loc[("h200", "first")]
    assert (first["studies"], first["rows"]) == ("01, 02", 3)
    assert (first["first"], first["newest"]) == ("2026-11-21", "2026-11-23")
    assert first["commits"] == "aaaaaaa, bbbbbbb"
    assert lines["differ"].tolist() == [0, 13, 1, 12], "changed, and gone; without hashes, all"
    assert lines["rows"].tolist() == [4, 3, 1, 1]
    assert lines["profile"].tolist() == ["full", "full", "full", "quick"]
    assert lines["own"].tolist() == [False, False, False, True]
    assert lines.loc[("h100", "only"), "commits"] == "unknown"
