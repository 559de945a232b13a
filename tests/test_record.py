"""`make record`: what is measured first, by which name, who may record, and what is carried."""

import dataclasses
import json
import os
import tarfile
import time
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest

from fusedlib.bench import machine as machines
from played_clock import PlayedClock
from press import record
from press.record import TOPIC_S
from press.run import ChoiceError
from study import paths, provenance, rows
from study import run as topics
from study.errors import SentenceError
from study.files import read_objects
from visitor import search_path

CARD = "NVIDIA H100 80GB HBM3"
FILES = {"fusedlib/a.py": "1", "notebooks/study/b.py": "2", "notebooks/study/columns.toml": "3"}


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path / "rows"))
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


# --- which races, and when -----------------------------------------------------------------------


def listed(*races: tuple) -> pd.DataFrame:
    return pd.DataFrame(races, columns=["topic", "race", "cases", "claims", "seconds"])


def names(races: pd.DataFrame) -> str:
    return "".join(races["race"])


def test_races_of_the_claim_that_takes_the_least_time_come_first():
    races = record.races(["anatomy"])
    needed = (races["claims"] > 0).tolist()
    assert any(needed) and needed == sorted(needed, reverse=True), "those that none needs are last"
    every = topics.races("anatomy", "full", device="cuda")
    cases = dict(zip(races["race"], races["cases"], strict=True))
    assert cases == {race: len(cases) for race, cases in every.items()}
    with pytest.raises(SentenceError, match="topic 'anatomi' is unknown"):
        record.races(["anatomi"])


def test_a_second_machine_makes_a_race_s_time_no_longer_than_the_slower_one_s(monkeypatch):
    one = topics.races("anatomy", "full", device="cuda")
    lines = [{"race": race, "machine": "H200", "took_s": 2.0} for race, many in one.items()
             for _ in many]  # fmt: skip
    for others in ([], ["H100"], ["H100", "B200"]):
        known = pd.DataFrame([*lines, *(line | {"machine": name, "took_s": 3.0}
                                        for name in others for line in lines)])  # fmt: skip
        monkeypatch.setattr(record, "load", lambda topic, known=known: known)
        races = record.races(["anatomy"])
        assert (races["seconds"] == races["cases"] * (3.0 if others else 2.0)).all()


def test_the_time_is_for_whole_races_and_each_topic_costs_its_own():
    races = listed(("one", "a", 1, 3, 60), ("two", "x", 1, 2, 70), ("one", "b", 1, 1, 30),
                   ("three", "z", 1, 1, 11), ("one", "c", 1, 0, 10))  # fmt: skip
    assert names(record.within(races, 0.9 * (60 + TOPIC_S) / 60)) == "bc"
    assert names(record.within(races, (90 + TOPIC_S) / 60)) == "ab"
    # The third topic would fit without what it takes besides; the fifth race does.
    assert names(record.within(races, (101 + TOPIC_S) / 60)) == "abc"
    assert names(record.within(races, 60)) == "axbzc"
    assert names(record.within(races, 0)) == ""


def test_what_is_there_is_left_out(monkeypatch):
    monkeypatch.setattr(topics, "lacking", lambda topic, name: {"b"} if topic == "one" else set())
    races = listed(("one", "a", 1, 0, 1), ("one", "b", 1, 0, 1), ("two", "b", 1, 0, 1))
    assert [*record.left(races, "day").index] == [1]


# --- its name ------------------------------------------------------------------------------------


def recorded(folder: Path, name: str, began: str, card=CARD, profile="full", **files: str) -> None:
    changed = FILES | {f"fusedlib/{stem}.py": content for stem, content in files.items()}
    line = {"id": name, "set": name, "machine": "card", "profile": profile, "commit": "d" * 40,
            "device_name": card, "began": began, "files": changed}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / rows.RECORDINGS).open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_the_newest_recording_of_this_code_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "files", lambda: FILES)
    folder = tmp_path / "rows" / "card"
    new = record.chosen_name("", folder, facts())
    assert new.endswith("-ccccccc") and len(new) == len("2026-11-25-1200-ccccccc")
    recorded(folder.parent, "z", "2026-11-24")
    recorded(folder.parent, "a", "2026-11-25")
    recorded(folder.parent, "other code", "2026-11-26", a="0")
    recorded(folder.parent, "toy", "2026-11-27", profile="quick")
    recorded(folder.parent, "other card", "2026-11-27", card="NVIDIA H200")
    assert record.chosen_name("", folder, facts()) == "a"
    assert record.chosen_name("z", folder, facts()) == "z"
    assert record.chosen_name("new one", folder, facts()) == "new one"
    with pytest.raises(ChoiceError, match="fusedlib/a.py"):
        record.chosen_name("other code", folder, facts())
    with pytest.raises(ChoiceError, match="NVIDIA H200; this is NVIDIA H100"):
        record.chosen_name("other card", folder, facts())
    texts = FILES | {"notebooks/study/columns.toml": "new"}
    monkeypatch.setattr(provenance, "files", lambda: texts)
    assert record.chosen_name("", folder, facts()) == "a", "measured by the same code"
    monkeypatch.setattr(provenance, "files", lambda: FILES | {"notebooks/study/b.py": "new"})
    assert record.chosen_name("", folder, facts()).endswith("-ccccccc")


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
    commit = fields.pop("commit", "c" * 40), fields.pop("dirty", False)
    given = facts(**fields)
    monkeypatch.setattr(machines, "describe", lambda: given)
    monkeypatch.setattr(provenance, "commit", lambda: commit)
    monkeypatch.setattr(machines, "others_on_card", lambda most: busy)
    monkeypatch.setattr(provenance, "changed", lambda: [f"f{n}" for n in range(7)])
    with pytest.raises(ChoiceError, match=message) if message else nullcontext():
        record.check_ready()


# --- the recording itself ------------------------------------------------------------------------

RACES = listed(("one", "a", 2, 2, 1), ("two", "x", 1, 1, 1), ("one", "c", 1, 0, 1))


class Runs:
    """Stands for what measures: notes what it was told, and writes a row."""

    def __init__(self, folder: Path, fails: str = "") -> None:
        self.folder, self.fails = folder, fails
        self.seen: list[tuple[str, str, list[str], float]] = []
        self.packed: list[list[str]] = []

    def __call__(self, topic: str, name: str, races: Path, until: float) -> bool:
        self.seen.append((topic, name, races.read_text().split(), until))
        self.packed.append(sorted(path.name for path in (self.folder / "out").glob("*")))
        if not (self.folder / "rows" / rows.RECORDINGS).exists():
            recorded(self.folder / "rows", name, "2026-11-25")
        at = self.folder / "rows" / "card"
        at.mkdir(parents=True, exist_ok=True)
        (at / f"{topic}.jsonl").write_text(json.dumps({"recording": name}) + "\n")
        return topic == self.fails


def test_a_topic_after_the_other_is_told_what_to_measure_until_when(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "time", PlayedClock())
    run = Runs(tmp_path)
    assert record.record(RACES, "day", 10, run) is False
    assert run.seen == [("one", "day", ["a", "c"], 600), ("two", "day", ["x"], 600)]
    assert not (tmp_path / "out").exists(), "nothing is packed unasked"


def test_one_that_fails_stops_no_other_and_is_told(tmp_path):
    run = Runs(tmp_path, "one")
    assert record.record(RACES, "day", 10, run) is True
    assert [topic for topic, *_ in run.seen] == ["one", "two"]


def test_when_the_time_is_over_no_other_topic_begins(tmp_path, monkeypatch):
    clock, run = PlayedClock(), Runs(tmp_path)
    monkeypatch.setattr(record, "time", clock)
    assert record.record(RACES, "day", 10, lambda *asked: clock.sleep(601) or run(*asked)) is False
    assert [topic for topic, *_ in run.seen] == ["one"]


def test_it_is_packed_after_each_topic_and_can_be_added_elsewhere(tmp_path, monkeypatch):
    run = Runs(tmp_path)
    record.record(RACES, "day", 10, run, tmp_path / "out")
    [packed] = (tmp_path / "out").iterdir()
    assert run.packed == [[], [packed.name]], "the first topic is safe before the second"
    assert packed.name == "card.day.tar.xz"
    with tarfile.open(packed) as archive:
        names = archive.getnames()
    assert names == ["recordings.jsonl", "card/one.jsonl", "card/two.jsonl"]
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path / "home"))
    (tmp_path / "home" / "card").mkdir(parents=True)
    assert topics.add(packed) == 2 and topics.add(packed) == 0


def test_what_an_interrupted_topic_measured_is_packed(tmp_path):
    """17 rows of a study stayed on a machine that was given back."""
    runs = Runs(tmp_path)

    def run(*asked):
        runs(*asked)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record.record(RACES, "day", 10, run, tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "card.day.tar.xz") as archive:
        assert "card/one.jsonl" in archive.getnames()


def test_what_is_carried_says_commit_files_and_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "files", lambda: {"fusedlib/norm.py": "1" * 40})
    with monkeypatch.context() as patch:
        patch.setattr(record, "races", lambda: RACES)
        path = record.carry()
    assert path == tmp_path / "code.json"
    packed = provenance.packed()
    assert (packed["commit"], packed["files"]) == ("c" * 40, {"fusedlib/norm.py": "1" * 40})
    assert record.races().equals(RACES), "as they are read where there is no git"
    monkeypatch.setattr(provenance, "commit", lambda: ("c" * 40, True))
    with pytest.raises(ChoiceError, match="differs from commit"):
        record.carry()


def test_the_process_of_a_topic_measures_the_listed_races_until_the_time_is_over(
    tmp_path, monkeypatch
):
    races = topics.races("memory", "full", device="cuda")
    chosen = next(iter(races))
    listed = tmp_path / "races.txt"
    listed.write_text(chosen)
    monkeypatch.setenv("PYTHONPATH", search_path())
    path = tmp_path / "rows" / "card" / "memory.jsonl"
    assert record.measure("memory", "day", listed, 1.0) is False
    assert not path.exists(), "the time was over"
    assert record.measure("memory", "day", listed, time.time() + 600) is False
    assert {row["race"] for row in read_objects(path)} == {chosen}
    assert record.measure("memori", "day", listed, time.time() + 600) is True
    assert os.environ[machines.NAME] == "card"
