"""The paper's tables of machines and recordings: what is counted, and what differs today."""

import json

import pandas as pd
import pytest

from fusedlib.bench import machine as this
from press import machine_tables
from study import paths, provenance

NOW = {f"fusedlib/f{n:02}.py": f"{n:040}" for n in range(12)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two recordings of one machine, and one of another, of code of three states."""
    monkeypatch.setattr(paths, "RECORDED", tmp_path)
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path))
    monkeypatch.setenv(this.NAME, "me")
    this.key.cache_clear()
    monkeypatch.setattr(provenance, "files", lambda: NOW)
    old = {name: f"old {name}" for name in (*NOW, "fusedlib/gone.py")}
    runs = [
        ("h200", "first", "first", "a" * 40, "2026-11-21", old),
        ("h200", "first.2", "first", "b" * 40, "2026-11-22", old),
        ("h200", "second", "second", "b" * 40, "2026-11-24", NOW | {"fusedlib/f03.py": "2" * 40}),
        ("h100", "only", "only", None, "2026-11-25", NOW),
    ]  # fmt: skip
    names = "machine", "id", "set", "commit", "began", "files"
    lines = [dict(zip(names, run, strict=True)) | {"profile": "full"} for run in runs]
    (tmp_path / "recordings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [("h200", "kernels", "first", "22"), ("h200", "kernels", "first.2", "21"),
            ("h200", "memory", "first", "23"), ("h200", "kernels", "second", "24"),
            *[("h100", "memory", "only", "25")] * 4]  # fmt: skip
    for machine, topic, recording, day in rows:
        (tmp_path / machine).mkdir(exist_ok=True)
        row = {"recording": recording, "measured_at": f"2026-11-{day}T10:00:00+00:00"}
        with (tmp_path / machine / f"{topic}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    yield tmp_path
    this.key.cache_clear()


def test_a_line_a_recording_with_its_days_commits_and_what_differs(folder):
    lines = machine_tables.recorded().set_index(["machine", "recording"])
    assert lines.index.tolist() == [("h100", "only"), ("h200", "first"), ("h200", "second")]
    first = lines.loc[("h200", "first")]
    assert (first["topics"], first["rows"]) == ("kernels, memory", 3)
    assert (first["first"], first["newest"]) == ("2026-11-21", "2026-11-23")
    assert first["commits"] == "aaaaaaa, bbbbbbb"
    assert lines["differ"].tolist() == [0, 13, 1], "changed, and gone"
    assert lines.loc[("h100", "only"), "commits"] == "unknown"


def test_rows_of_a_folder_that_a_variable_names_have_their_recordings(folder, monkeypatch):
    monkeypatch.setattr(paths, "RECORDED", folder / "repository")
    monkeypatch.setenv(this.NAME, "h200")
    this.key.cache_clear()
    assert {*machine_tables.recorded().query("rows > 0")["recording"]} == {"first", "second"}


def test_machines_are_listed_once_with_what_is_known_of_them():
    hardware = machine_tables.hardware()
    assert {"nvidia-h100", "nvidia-h200"} <= {*hardware["machine"]}
    assert hardware.drop_duplicates().equals(hardware)
    packages = machine_tables.packages()
    assert isinstance(packages, pd.DataFrame) and {"topic", "machine"} <= {*packages.columns}
