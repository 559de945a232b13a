"""`make record`: what it chooses, what it resumes, what it refuses, and what it leaves behind."""

import dataclasses
import json
import os
import tarfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from fusedlib.bench import machine as machines
from measure import study
from measure.recording import paths, provenance, results
from measure.recording.jsonl import read_objects
from played_clock import PlayedClock
from press import record, replay
from press.analysis import NoRowsError
from press.record import STUDY_S, Unit
from press.running.config import Config, ConfigError, Study
from study import run as topics
from visitor import search_path

CARD = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path / "rows"))
    monkeypatch.setenv("FUSEDLIB_BUILD", str(tmp_path / "build"))
    monkeypatch.setenv(machines.NAME, "card")
    monkeypatch.setattr(provenance, "commit", lambda: ("c" * 40, False))
    remembered = machines.key, machines.describe
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


def facts(**fields) -> machines.Machine:
    """Those of a card."""
    given = {"device_type": "cuda", "device_name": CARD}
    return dataclasses.replace(machines.describe(), **given | fields)


def describe(monkeypatch, commit: str | None = "c" * 40, dirty=False, **fields) -> None:
    """This machine has that card, and this code is of that commit."""
    given = facts(**fields)
    monkeypatch.setattr(machines, "describe", lambda: given)
    monkeypatch.setattr(provenance, "commit", lambda: (commit, dirty))


def config(*names: str) -> Config:
    studies = tuple(Study(n, n, "?", Path(f"{n}.ipynb"), {}) for n in names)
    return Config(studies, studies[0])


# --- units ---------------------------------------------------------------------------------------


@pytest.fixture
def studies(monkeypatch) -> Config:
    """Two studies: which cases they measure, their rows, `c` once before, and what their claims
    select."""
    cases = {"one": [*"abcdef"], "two": [*"xy"]}
    last = {
        "one": [("a", 40.0, "s1", "2"), ("b", 1.0, "s1", "2"), ("c", 3.0, None, "2"),
                ("d", 9.0, None, "2"), ("e", None, None, "2"), ("gone", 5.0, "s1", "2"),
                ("c", 8.0, "s1", "1")],
        "two": [("x", 2.0, "s1", "2"), ("y", 7.0, "s2", "2")],
    }  # fmt: skip
    claims = {"one": [{"a", "c"}, {"b", "d"}, {"c"}, {"c", "gone"}], "two": [{"x"}]}

    def rows(study):
        frame = pd.DataFrame(last[study], columns=["case", "took_s", "session", "measured_at"])
        return frame.assign(machine=pd.Categorical(["card"] * len(frame)))

    def analysed(notebook):
        selections = [pd.DataFrame({"case": sorted(c)}) for c in claims[notebook.stem]]
        return SimpleNamespace(claims=[SimpleNamespace(selection=s) for s in selections])

    monkeypatch.setattr(provenance, "packed", dict)
    monkeypatch.setattr(study, "full_cases", lambda study: dict.fromkeys(cases[study]))
    monkeypatch.setattr(replay, "analysis_of", analysed)
    monkeypatch.setattr(
        results, "Recorder", lambda study, profile: SimpleNamespace(rows=lambda: rows(study))
    )
    return config("one", "two")


def test_units_of_the_claim_that_takes_the_least_time_come_first(studies):
    units = record.units(studies)
    assert units == [
        Unit("two", ("x",), 1, 2.0),
        Unit("one", ("c",), 3, 3.0),
        Unit("one", ("a", "b"), 2, 41.0),  # for two claims, of 44 and of 50 seconds
        Unit("one", ("d",), 1, 9.0),
        Unit("one", ("e",), 0, 5.0),  # never timed: the median of the others
        Unit("one", ("f",), 0, 5.0),
        Unit("two", ("y",), 0, 7.0),
    ]
    assert {unit.study for unit in record.units(studies, ["two"])} == {"two"}


def test_the_time_is_for_whole_units_and_each_study_costs_its_own():
    units = [Unit("one", ("a",), 3, 60), Unit("two", ("x",), 2, 70), Unit("one", ("b",), 1, 30),
             Unit("three", ("z",), 1, 11), Unit("one", ("c",), 0, 10)]  # fmt: skip
    assert record.within(units, 0.9 * (60 + STUDY_S) / 60) == [units[2], units[4]]
    assert record.within(units, (60 + STUDY_S) / 60) == units[:1]
    assert record.within(units, (90 + STUDY_S) / 60) == [units[0], units[2]]
    # The third study would fit without what it takes besides; the fifth unit does.
    assert record.within(units, (101 + STUDY_S) / 60) == [units[0], units[2], units[4]]
    assert record.within(units, 60) == units
    for minutes in (1, 2, 3, 4):
        chosen = record.within(units, minutes)
        cost = sum(u.seconds for u in chosen) + STUDY_S * len({u.study for u in chosen})
        assert cost <= 60 * minutes
    assert record.within(units, 0) == []


def test_what_is_there_is_left_out_and_bad_luck_is_tried_again(tmp_path):
    statuses = {"ok": "ok", "wrong": "wrong", "oom": "oom", "bad": "failed", "no": "unavailable"}
    rows = [{"case": case, "status": status} for case, status in statuses.items()]
    rows.insert(0, {"case": "ok", "status": "failed"})  # bad luck that was made good
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    units = [Unit("one", (case,), 0, 1.0) for case in (*statuses, "new")]
    assert [unit.cases[0] for unit in record.left(units, tmp_path)] == ["bad", "no", "new"]
    race = [Unit("one", ("ok", "new"), 0, 1.0), Unit("one", ("ok", "oom"), 0, 1.0)]
    assert record.left(race, tmp_path) == race[:1], "a race runs again as a whole"
    assert record.left(units, tmp_path / "none") == units


def test_what_no_claim_can_be_stated_over_yet_is_recorded_all_the_same(studies, monkeypatch):
    def unmeasured(notebook):
        raise NoRowsError("no row has context_length = 3072")

    stated = record.units(studies, ["one"])
    monkeypatch.setattr(replay, "analysis_of", unmeasured)
    unstated = record.units(studies, ["one"])
    assert {*unstated} == {dataclasses.replace(unit, claims=0) for unit in stated}


# --- its name ------------------------------------------------------------------------------------


FILES = {"fusedlib/a.py": "1", "notebooks/measure/b.py": "2", "notebooks/study.toml": "3"}


@pytest.fixture(autouse=True)
def code(monkeypatch):
    monkeypatch.setattr(provenance, "files", lambda: FILES)


def recorded(folder: Path, name: str, began: str, card=CARD, profile="full", **files: str):
    run = {"commit": "d" * 40, "device_name": card, "began": began}
    (folder / name).mkdir(parents=True)
    changed = FILES | {f"fusedlib/{stem}.py": content for stem, content in files.items()}
    content = {"schema": results.SCHEMA, "profile": profile, "runs": [run], "files": changed}
    (folder / name / results.DESCRIPTION).write_text(json.dumps(content))


def test_the_newest_recording_of_this_code_goes_on(tmp_path, monkeypatch):
    new = record.chosen_name("", tmp_path, facts())
    assert new.endswith("-ccccccc") and len(new) == len("2026-11-25-ccccccc")
    recorded(tmp_path, "z", "2026-11-24")
    recorded(tmp_path, "a", "2026-11-25")
    recorded(tmp_path, "other code", "2026-11-26", a="0")
    recorded(tmp_path, "toy", "2026-11-27", profile="quick")
    assert record.chosen_name("", tmp_path, facts()) == "a"
    assert record.chosen_name("z", tmp_path, facts()) == "z"
    assert record.chosen_name("new one", tmp_path, facts()) == "new one"
    monkeypatch.setattr(provenance, "files", lambda: FILES | {"notebooks/study.toml": "new"})
    assert record.chosen_name("", tmp_path, facts()) == "a", (
        "other cases, measured by the same code"
    )
    monkeypatch.setattr(provenance, "files", lambda: FILES | {"notebooks/measure/b.py": "new"})
    assert record.chosen_name("", tmp_path, facts()).endswith("-ccccccc")


@pytest.mark.parametrize(
    ("fields", "was"), [({"a": "0"}, "fusedlib/a.py"), ({"card": "NVIDIA H200"}, "NVIDIA H200")]
)
def test_a_recording_of_other_code_or_another_card_is_refused(tmp_path, fields, was):
    recorded(tmp_path, "x", "2026-11-25", **fields)
    with pytest.raises(ConfigError, match=was):
        record.chosen_name("x", tmp_path, facts())
    assert record.chosen_name("", tmp_path, facts()) != "x", "nor does it go on unasked"


# --- whether it may ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "busy", "message"),
    [
        ({"device_type": "cpu", "device_name": "i9"}, "", "i9"),
        ({"commit": None, "dirty": None}, "", "make pack"),
        ({"dirty": True}, "", "f0, f1"),
        ({}, "processes 12, 13 run", "12, 13"),
        ({}, "", ""),
    ],
    ids=["no gpu", "no commit", "dirty", "busy", "it may"],
)  # fmt: skip
def test_what_may_not_record_is_refused_with_the_reason(monkeypatch, fields, busy, message):
    describe(monkeypatch, **fields)
    monkeypatch.setattr(machines, "others_on_card", lambda most: busy)
    monkeypatch.setattr(provenance, "changed", lambda: [f"f{n}" for n in range(7)])
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        record.check_ready()


# --- the recording itself ------------------------------------------------------------------------

UNITS = [Unit("one", ("a", "b"), 2, 1.0), Unit("two", ("x",), 1, 1.0), Unit("one", ("c",), 0, 1.0)]


class Runs:
    """Stands for the runner: notes what it was told, and writes a row."""

    def __init__(self, folder: Path, fails: str = "") -> None:
        self.folder, self.fails = folder, fails
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.asked: list[tuple[list[str], float]] = []
        self.packed: list[list[str]] = []

    def __call__(self, study: str, cases: Path, until: float) -> bool:
        self.seen.append((study, dict(os.environ)))
        self.asked.append((cases.read_text().split(), until))
        self.packed.append(sorted(path.name for path in (self.folder / "out").glob("*")))
        at = self.folder / "rows" / "card" / "day"
        at.mkdir(parents=True, exist_ok=True)
        (at / f"{study}.jsonl").write_text("{}\n")
        return study == self.fails


def test_a_study_after_the_other_is_told_what_to_measure_until_when(tmp_path, monkeypatch):
    monkeypatch.setenv("FRESH", "1")
    monkeypatch.setattr(record, "time", PlayedClock())
    run, before = Runs(tmp_path), dict(os.environ)
    assert record.record(UNITS, "day", 10, run) is False
    assert [study for study, _ in run.seen] == ["one", "two"], "each once"
    for _, variables in run.seen:
        assert variables[results.RECORDING] == "day"
        assert "FRESH" not in variables, "it goes on with the recording"
    assert run.asked == [(["a", "b", "x", "c"], 600)] * 2
    assert dict(os.environ) == before
    assert not (tmp_path / "out").exists(), "nothing is packed unasked"


@pytest.mark.parametrize("fails", ["one", "two"])
def test_one_that_fails_stops_no_other_and_is_told(tmp_path, fails):
    run = Runs(tmp_path, fails)
    assert record.record(UNITS, "day", 10, run) is True
    assert [study for study, _ in run.seen] == ["one", "two"]


def test_when_the_time_is_over_no_other_study_begins(tmp_path, monkeypatch):
    clock, run = PlayedClock(), Runs(tmp_path)
    monkeypatch.setattr(record, "time", clock)
    assert record.record(UNITS, "day", 10, lambda *asked: clock.sleep(601) or run(*asked)) is False
    assert [study for study, _ in run.seen] == ["one"]


def test_it_is_packed_after_each_study(tmp_path, capsys):
    run = Runs(tmp_path)
    record.record(UNITS, "day", 10, run, tmp_path / "out")
    assert run.packed == [[], ["card.day.tar.xz"]], "the first study is safe before the second"
    assert capsys.readouterr().out.count(f"packed {tmp_path}/out/card.day.tar.xz") == 2
    with tarfile.open(tmp_path / "out" / "card.day.tar.xz") as archive:
        archive.extractall(tmp_path / "home", filter="data")
    files = {str(p.relative_to(tmp_path / "home")) for p in (tmp_path / "home").rglob("*.jsonl")}
    assert files == {"card/day/one.jsonl", "card/day/two.jsonl"}
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["card.day.tar.xz"], "no half a file"


def test_what_an_interrupted_study_measured_is_packed(tmp_path):
    """17 rows of study 05 stayed on a machine that was given back."""
    runs = Runs(tmp_path)

    def run(*asked):
        runs(*asked)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record.record(UNITS, "day", 10, run, tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "card.day.tar.xz") as archive:
        assert any(name.endswith("one.jsonl") for name in archive.getnames())


def test_an_archive_is_whole_or_the_one_before(tmp_path, monkeypatch):
    folder = tmp_path / "card" / "day"
    folder.mkdir(parents=True)
    (folder / "one.jsonl").write_text("{}\n")
    path = record.pack(folder, tmp_path / "out")
    before = path.read_bytes()

    def full(self, *_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "add", full)
    with pytest.raises(OSError, match="No space"):
        record.pack(folder, tmp_path / "out")
    assert path.read_bytes() == before


def test_what_is_carried_says_commit_files_and_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    describe(monkeypatch)
    monkeypatch.setattr(provenance, "files", lambda: {"fusedlib/norm.py": "1" * 40})
    units = record.units
    monkeypatch.setattr(record, "units", lambda config: UNITS)
    path = record.carry(config("one", "two"))
    assert path == tmp_path / "code.json"
    packed = provenance.packed()
    assert (packed["commit"], packed["files"]) == ("c" * 40, {"fusedlib/norm.py": "1" * 40})
    monkeypatch.setattr(record, "units", units)
    assert record.units(config("one", "two")) == UNITS, "as they are read where there is no git"
    describe(monkeypatch, dirty=True)
    with pytest.raises(ConfigError, match="differs from commit"):
        record.carry(config("one", "two"))


# --- a study's part, in a process of its own -----------------------------------------------------


def test_the_process_of_a_topic_measures_the_listed_races_until_the_time_is_over(
    tmp_path, monkeypatch
):
    races = topics.races("precision", "full", device="cuda")
    stops = [race for race, cases in races.items() if cases[0]["experiment"] == "stagnation"][:2]
    listed = tmp_path / "cases.txt"
    listed.write_text("\n".join(stops))
    monkeypatch.setenv(results.RECORDING, "day")
    monkeypatch.setenv("PYTHONPATH", search_path())
    path = tmp_path / "rows" / "card" / "precision.jsonl"
    assert record.measure("precision", listed, 1.0) is False
    assert not path.exists(), "the time was over"
    assert record.measure("precision", listed, time.time() + 600) is False
    assert [row["race"] for row in read_objects(path)] == stops
    known = read_objects(tmp_path / "rows" / "recordings.jsonl")
    assert [(line["set"], line["profile"]) for line in known] == [("day", "full")]
    assert record.measure("precison", listed, time.time() + 600) is True
