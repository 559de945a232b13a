"""A rival of one decorated function is in the rows, tables, figures and claims without an edit."""

import json

import pytest

from fusedlib import paths
from fusedlib.bench import rivals, swiglu
from fusedlib.bench.results import Carried, case_id
from fusedlib.study import display, recording, style

STUDY = "03_kernels"
RECORDED = paths.RECORDED / "nvidia-h200" / f"{STUDY}.jsonl"
CASE = (
    "experiment", "group", "provider", "tokens", "hidden_size", "intermediate_size", "dtype",
    "direction", "weight_gradients", "precision", "launch", "device", "repetitions",
)  # fmt: skip


@pytest.fixture
def swift(monkeypatch, tmp_path):
    """A rival a quarter faster than ours, beside the recorded rows of ours."""
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))
    before = set(rivals.labels())

    @rivals.rival("swiglu", "swift", label="Swift MLP")
    def swift(inputs):
        """Faster than light."""

    assert set(rivals.labels()) - before == {"swift"}
    code, carried = swiglu.study_code(), Carried.load()
    lines = []
    for line in RECORDED.open(encoding="utf-8"):
        row = json.loads(line)
        if row["experiment"] != swiglu.TASK or row["provider"] != "fused":
            continue
        if carried.code_of(row) == code.of(row):
            row |= {"provider": "swift", "path": None}
            for name in [n for n in row if n.endswith("median_ms")]:
                row[name] *= 0.8
            if row.get("samples_ms"):
                row["samples_ms"] = [0.8 * s for s in row["samples_ms"]]
            case = {name: row[name] for name in CASE}
            lines.append(json.dumps(row | {"case": case_id(STUDY, case), "code": code.of(case)}))
    assert lines, "no recorded row of ours is current"
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    (folder / RECORDED.name).write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path))
    return "Swift MLP"


def test_a_new_rival_is_everywhere(swift, monkeypatch):
    shown: list[tuple[dict, dict]] = []
    monkeypatch.setattr(display, "_emit", lambda data, meaning, *_: shown.append((data, meaning)))
    claims = {c.name: c for c in recording.analysis_of(paths.NOTEBOOKS / f"{STUDY}.ipynb").claims}
    tables = " ".join(d["text/html"] for d, m in shown if m["kind"] == "table")
    figures = [m for _, m in shown if m["kind"] == "figure"]
    assert swift in tables
    assert any(swift in m["alt"] for m in figures), "the figures' text names it by its label"
    assert any("swift" in m["data"] for m in figures), "and so do their data"
    told = claims["few-tokens"].verdicts
    assert not any(e.holds for v in told if v.machine == "nvidia-h200" for e in v.evaluations), (
        "the fastest rival is it now, and a claim that ours is faster is false"
    )


def test_a_new_rival_gets_a_free_colour_and_keeps_everybody_s(swift):
    assert style.label("swift") == swift
    places = [r.place for r in rivals.RIVALS.values() if r.name != "swift"]
    assert rivals.get("swiglu", "swift").place not in places
    assert style.colour("fused") == style.PALETTE[0]
