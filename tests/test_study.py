"""What holds of every topic, and of measuring, rows and ratios: nothing is lost or doubled."""

import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import torch

import limits
import visitor
from fusedlib.bench import machine
from press import record
from study import __main__ as command
from study import paths, rows, run
from study.cases import Row
from study.errors import SentenceError
from study.files import append_objects, read_objects
from study.run import SizesError

KEYS = json.loads(Path(__file__).with_name("case_keys.json").read_text())
"""By topic and profile, `quick` on a CPU and `full` on a GPU: how many cases there are, and the
sha256 of their races and providers, sorted. Rows that were recorded count by these."""
TOPICS = run.topics()

# --- what holds of every topic -------------------------------------------------------------------


@pytest.mark.parametrize("name", TOPICS)
def test_the_cases_of_a_topic_are_those_that_were_recorded(name):
    for profile, device in (("quick", "cpu"), ("full", "cuda")):
        races = run.races(name, profile, device=device)
        pairs = sorted(
            f"{race} {c.get('provider')}" for race, cases in races.items() for c in cases
        )
        digest = hashlib.sha256("\n".join(pairs).encode()).hexdigest()
        assert [len(pairs), digest] == KEYS[name][profile], f"{name}, {profile}"
        assert len({*pairs}) == len(pairs)


@pytest.mark.parametrize("name", TOPICS)
def test_a_race_s_cases_differ_in_their_provider_alone(name):
    for race in run.races(name, "full", device="cuda").values():
        alike = [{k: v for k, v in case.items() if k not in rows.HOW} for case in race]
        assert alike == [alike[0]] * len(race)


@pytest.mark.parametrize("name", TOPICS)
def test_an_unknown_size_and_a_value_that_does_not_fit_are_refused_in_a_sentence(name):
    quick = run.topic(name).PROFILES["quick"]
    with pytest.raises(SizesError, match=rf"^{name}: 'nobody' is unknown; known: device, "):
        run.races(name, nobody=1)
    for size, value in quick.items():
        number = isinstance(value, int | float) or (value and isinstance(value[0], int))
        for wrong in (["nobody"], -1) if not number else ("nobody", -1, [-1], [0.5]):
            given = [wrong] if isinstance(value, list) and wrong == -1 else wrong
            if isinstance(value, list) and not value and given == ["nobody"]:
                continue  # a list that is empty by default may hold anything of its kind
            with pytest.raises(SizesError, match=f"^{name}: "):
                run.races(name, **{size: given})
    with pytest.raises(SentenceError, match="profile must be quick or full"):
        run.races(name, "nobody")


@pytest.mark.skipif(torch.cuda.is_available(), reason="its cases would be measured")
@pytest.mark.parametrize("name", TOPICS)
def test_where_there_is_no_gpu_every_case_of_one_has_a_reason_and_no_time(name):
    module = run.topic(name)
    seen: set[Any] = set()
    for race in run.races(name, device="cuda").values():
        kind = tuple(race[0].get(name) for name in ("experiment", "launch", "device"))
        if kind in seen or race[0].get("device") == "cpu":  # a topic may compare with the host
            continue
        seen.add(kind)
        for row in module.measure(race[:2]):
            assert row.status in ("unavailable", "failed") and row.reason
            assert not [figure for figure in row.figures if figure.endswith("_ms")]


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A folder of results of this machine's own."""
    machine.key.cache_clear()  # another test may have asked for its name
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path))
    monkeypatch.delenv("FRESH", raising=False)
    return tmp_path / machine.key()


@pytest.fixture
def quick_compiler(monkeypatch, no_warm_compiler):
    """Graphs are made and run as they are: Inductor's C++ takes half a minute a model."""
    real = torch.compile

    def compiled(*call, mode=None, options=None, **settings):
        return real(*call, **settings | {"backend": "eager"})

    monkeypatch.setattr(torch, "compile", compiled)


SMALLER: dict[str, dict[str, Any]] = {
    "llama": {"train_steps": 3, "contexts": [16], "batches": [1]},
    "model_memory": {"model": "nano", "contexts": [16]},
    "precision": {"situations": ["batch 32"]},
}
"""Sizes where those of the profile take longest."""


@pytest.mark.usefixtures("quick_compiler", "one_thread")
@pytest.mark.parametrize("name", TOPICS)
def test_the_profile_quick_gives_every_case_a_row_on_a_cpu(name, here):
    sizes = {"device": "cpu"} | SMALLER.get(name, {})
    found = run.run(name, **sizes)
    mine = found[found["profile"] == "quick"]
    races = run.races(name, **sizes)
    asked = {(race, case.get("provider")) for race, cases in races.items() for case in cases}
    provider = [None if pd.isna(name) else name for name in mine["provider"]]
    assert {*zip(mine["race"], provider, strict=True)} == asked and len(mine) == len(asked)
    assert mine.loc[mine["status"] != "ok", "reason"].notna().all()
    assert (mine["status"] == "ok").any() and not (mine["status"] == "failed").any()
    wrong = mine[mine["status"] != "ok"]
    assert "median_ms" not in wrong or wrong["median_ms"].isna().all()
    before = (here / f"{name}.jsonl").read_bytes()
    run.run(name, **sizes)
    assert (here / f"{name}.jsonl").read_bytes() == before, "nothing is measured twice"


def test_listed_races_are_measured_in_the_order_of_their_list(here, monkeypatch):
    seen: list[str] = []

    def measure(race):
        seen.append(rows.key("memory", race[0]))
        return [Row(case) for case in race]

    monkeypatch.setattr(run.topic("memory"), "measure", measure)
    first, *between, last = run.races("memory", device="cpu")
    run.run("memory", device="cpu", only=[last, between[0], "no race", first])
    assert seen == [last, between[0], first]


@pytest.mark.parametrize("name", TOPICS)
def test_no_recorded_row_has_fields_that_its_race_does_not_tell(name):
    """A race's key is the hash of what its topic's cases have, whoever wrote the row. Rows of an
    experiment that is no longer measured stay as they are.
    """
    fields = {
        field for profile in ("quick", "full") for race in run.races(name, profile).values()
        for case in race for field in case
    } - rows.HOW  # fmt: skip
    races = run.races(name, "full", device="cuda").values()
    measured = {race[0].get("experiment") for race in races}
    for folder in rows.folders(here=False):
        path = folder / f"{name}.jsonl"
        for row in read_objects(path) if path.exists() else ():
            if row.get("experiment") not in measured:
                continue
            case = {n: row[n] for n in fields if row.get(n) is not None}
            assert rows.key(name, case) == row["race"]


def test_sizes_stand_before_and_after_options(monkeypatch):
    """As its own help has them: `python -m study kernels --profile full models='[…]'`."""
    asked = []
    monkeypatch.setattr(run, "run", lambda *topic, **how: asked.append((topic, how["models"])))
    for words in (
        ["--profile", "full", "models=['8·8·8']"],
        ["models=['8·8·8']", "--profile", "full"],
    ):
        monkeypatch.setattr(sys, "argv", ["study", "kernels", *words])
        command.main()
    assert asked == 2 * [(("kernels", "full"), ["8·8·8"])]


# --- measuring -----------------------------------------------------------------------------------

TINY = "tiny"
"""A topic of two races at each of some sizes; what its providers do is in `DO`."""
DO: dict[str, Any] = {}


def tiny() -> ModuleType:
    module = ModuleType("study.tiny")

    def cases(profile="quick", **sizes):
        s = run.sized(module.PROFILES, profile, sizes)
        return [
            {"size": size, "way": way, "device": "cpu", "provider": name,
             "repetitions": s.repetitions}
            for size in s.sizes for way in ("a", "b") for name in s.providers
        ]  # fmt: skip

    def measure(race):
        found = []
        for case in race:
            status, figures = DO.get(case["provider"], lambda case: ("ok", {"median_ms": 1.0}))(
                case
            )
            found.append(Row(case, status, None if status == "ok" else "so it is", figures))
        session = {"session": f"{time.time_ns()}"}
        return [Row(r.case, r.status, r.reason, {**r.figures, **session}) for r in found]

    def available(case):
        if case["provider"] in DO.get("absent", ()):
            raise RuntimeError("not there")

    quick = {"device": "cpu", "sizes": [1, 2], "providers": ["x", "y"], "repetitions": 1}
    module.PROFILES = {"quick": quick, "full": quick | {"sizes": [1, 2, 3]}}
    module.cases, module.measure, module.available = cases, measure, available
    return module


@pytest.fixture
def measured(monkeypatch, here):
    """Run the tiny topic; its rows, those of this run and those before."""
    monkeypatch.setitem(sys.modules, "study.tiny", tiny())
    monkeypatch.setattr(run, "topics", lambda: [TINY])
    monkeypatch.setattr("test_study.DO", {})

    def one(**options):
        path = here / "tiny.jsonl"
        before = len(read_objects(path)) if path.exists() else 0
        run.run(TINY, **options)
        return [(r["size"], r["way"], r["provider"], r["status"]) for r in read_objects(path)][
            before:
        ]

    return one


def test_a_race_that_lacks_a_row_is_measured_whole_and_no_other(measured):
    assert len(measured(sizes=[1], providers=["x"])) == 2
    assert measured(sizes=[1], providers=["x"]) == []
    assert measured(sizes=[1, 2], providers=["x"]) == [
        (2, "a", "x", "ok"), (2, "b", "x", "ok"),
    ]  # fmt: skip
    both = measured(sizes=[1], providers=["x", "y"])
    assert [row[:3] for row in both] == [
        (1, "a", "x"), (1, "a", "y"), (1, "b", "x"), (1, "b", "y"),
    ]  # fmt: skip


def test_more_repetitions_are_measured_and_fewer_are_there(measured):
    assert len(measured(sizes=[1], repetitions=2)) == 4
    assert measured(sizes=[1]) == []
    assert len(measured(sizes=[1], repetitions=3)) == 4


def test_a_size_that_somebody_types_holds_though_it_is_that_of_the_profile_quick(
    measured, here, monkeypatch
):
    """A notebook's knob that nobody turned has that value too."""
    monkeypatch.setattr(sys, "argv", ["study", TINY, "--profile", "full", "sizes=[1, 2]"])
    command.main()
    assert {row["size"] for row in read_objects(here / "tiny.jsonl")} == {1, 2}
    assert {row[0] for row in measured(profile="full", sizes=[1, 2])} == {3}


def test_what_failed_is_tried_again_and_what_is_unavailable_once_it_can_be_had(measured):
    DO["x"], DO["y"] = (lambda case: ("failed", {})), (lambda case: ("unavailable", {}))
    DO["absent"] = ["y"]
    assert len(measured(sizes=[1], providers=["y"])) == 2
    assert measured(sizes=[1], providers=["y"]) == []
    DO["absent"] = []
    assert len(measured(sizes=[1], providers=["y"])) == 2
    assert len(measured(sizes=[2], providers=["x"])) == len(measured(sizes=[2], providers=["x"]))
    del DO["x"]
    assert {row[3] for row in measured(sizes=[2], providers=["x"])} == {"ok"}
    assert measured(sizes=[2], providers=["x"]) == []


def test_who_was_tried_and_refused_is_tried_again_by_other_code_alone(measured, monkeypatch):
    DO["y"] = lambda case: ("unavailable", {})
    assert len(measured(sizes=[1], providers=["y"])) == 2
    assert measured(sizes=[1], providers=["y"]) == []
    monkeypatch.setattr(run.provenance, "commit", lambda: ("another", False))
    assert len(measured(sizes=[1], providers=["y"])) == 2
    assert measured(sizes=[1], providers=["y"]) == []


def test_fresh_begins_a_new_set_and_keeps_the_old_rows(measured, here):
    measured()
    again = measured(fresh=True)
    assert len(again) == 8 and len(read_objects(here / "tiny.jsonl")) == 16
    sets = [line["set"] for line in read_objects(here / rows.RECORDINGS)]
    assert len({*sets}) == 2
    shown = rows.load(TINY, here=True)
    assert len(shown) == 8 and {*shown["set"]} == {sets[-1]}
    assert len(rows.load(TINY, here=True, sessions=True)) == 16


def test_when_time_is_over_the_race_ends_and_no_other_begins(measured):
    ends = time.time() + 0.3

    def slow(case):
        time.sleep(0.2)
        return "ok", {"median_ms": 1.0}

    DO["x"] = DO["y"] = slow
    assert [row[:3] for row in measured(until=ends)] == [(1, "a", "x"), (1, "a", "y")]
    assert len(measured()) == 6


def test_an_interrupt_keeps_every_race_that_ended(measured, here):
    def stopped(case):
        if (case["size"], case["way"]) == (2, "a"):
            raise KeyboardInterrupt
        return "ok", {"median_ms": 1.0}

    DO["y"] = stopped
    with pytest.raises(KeyboardInterrupt):
        measured()
    assert len(read_objects(here / "tiny.jsonl")) == 4
    del DO["y"]
    assert len(measured()) == 4


def test_a_lost_device_ends_the_run_and_blames_who_lost_it_alone(measured, here, monkeypatch):
    lost = []

    def synchronize():
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def crashes(case):
        if (case["size"], case["way"]) == (1, "b"):
            lost.append(case)
        return ("failed" if lost else "ok"), {}

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    DO["x"] = DO["y"] = crashes
    with pytest.raises(SentenceError, match="x .* illegal memory access"):
        measured()
    with pytest.raises(SentenceError, match="illegal memory access"):
        measured()
    written = [(r["size"], r["way"], r["provider"]) for r in read_objects(here / "tiny.jsonl")]
    assert written == [(1, "a", "x"), (1, "a", "y"), (1, "b", "x")]
    lost.clear()
    DO.clear()
    assert [row[:2] for row in measured()[::2]] == [(2, "a"), (2, "b"), (1, "b")]


def test_replayed_rows_are_read_and_nothing_is_measured(measured, here, monkeypatch):
    measured(sizes=[1])
    monkeypatch.setenv(rows.REPLAY, "all")
    assert measured(sizes=[1, 2]) == []
    assert len(rows.load(TINY, here=True)) == 4
    monkeypatch.setenv(rows.REPLAY, "committed")
    assert rows.load(TINY, here=True).empty


def test_a_visitor_s_rows_are_no_part_of_the_repository(measured, here):
    tracked = (paths.RECORDED / rows.RECORDINGS).read_bytes()
    measured(sizes=[1])
    assert (here / ".gitignore").read_text() == "*\n"
    assert (paths.RECORDED / rows.RECORDINGS).read_bytes() == tracked
    assert rows.load(TINY).empty and len(rows.load(TINY, here=True)) == 4


def test_a_named_machine_s_recordings_stand_beside_all_others(measured, here, monkeypatch):
    monkeypatch.setenv("FUSEDLIB_MACHINE", "nvidia-new")
    monkeypatch.setattr(machine, "key", lambda: "nvidia-new")
    run.run(TINY, sizes=[1], into="2030-01-01-abc")
    [line] = read_objects(here.parent / rows.RECORDINGS)
    assert (line["machine"], line["set"]) == ("nvidia-new", "2030-01-01-abc")
    assert line["files"] and line["commit"]


def test_what_a_set_has_is_carried_away_as_one_file_and_added_once(measured, here, monkeypatch):
    monkeypatch.setenv("FUSEDLIB_MACHINE", "nvidia-new")
    monkeypatch.setattr(machine, "key", lambda: "nvidia-new")
    for into, sizes in (("old", [1]), ("new", [1, 2])):
        run.run(TINY, sizes=sizes, into=into)
    file = record.pack("new", here.parent / "packed")
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(here.parent / "home"))
    assert [run.add(file), run.add(file)] == [8, 0]
    home = here.parent / "home"
    assert {line["set"] for line in read_objects(home / rows.RECORDINGS)} == {"new"}
    assert len(read_objects(home / "nvidia-new" / "tiny.jsonl")) == 8


def packed(at, **files):
    """A file as `add` takes it, of lines by the names of their files."""
    with tarfile.open(at, "w") as archive:
        for name, lines in files.items():
            content = "".join(json.dumps(line) + "\n" for line in lines).encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return at


def test_nothing_is_added_of_another_recording_of_a_known_name_or_of_a_strange_file(
    monkeypatch, tmp_path
):
    home = tmp_path / "home"
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(home))
    rows_of = {"nvidia-new/tiny.jsonl": [{"recording": "day", "race": "a"}]}
    line = {"id": "day", "machine": "nvidia-new", "host": "one", "began": "noon"}
    assert run.add(packed(tmp_path / "one", **{rows.RECORDINGS: [line]}, **rows_of)) == 1
    before = {path: path.read_bytes() for path in home.rglob("*.jsonl")}
    other = {rows.RECORDINGS: [{**line, "host": "two"}]}
    strange = {rows.RECORDINGS: [{**line, "id": "night"}], "../tiny.jsonl": [{"race": "b"}]}
    for files, said in ((other, "recording day of nvidia-new is there"), (strange, "'../tiny")):
        more = {"nvidia-new/other.jsonl": [{"recording": "day", "race": "b"}]}
        with pytest.raises(SentenceError, match=said):
            run.add(packed(tmp_path / "two", **more, **files))
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")} == before


def test_make_record_measures_every_race_the_claims_of_least_time_first():
    races = record.races(TOPICS)
    asked = {(name, race) for name in TOPICS for race in run.races(name, "full", device="cuda")}
    assert {*zip(races["topic"], races["race"], strict=True)} == asked
    with_claims = (races["claims"] > 0).tolist()
    assert with_claims == sorted(with_claims, reverse=True) and {*with_claims} == {True, False}
    assert (races["seconds"] >= 0).all()


def test_numbers_that_json_has_not_are_named(measured, here):
    DO["x"] = lambda case: ("ok", {"median_ms": float("nan")})
    measured(sizes=[1], providers=["x"])
    row = read_objects(here / "tiny.jsonl")[0]
    assert row["median_ms"] is None and row["nonfinite"] == ["median_ms=nan"]


def test_what_is_wrong_and_timed_all_the_same_has_times_of_another_name(measured, here):
    DO["x"] = lambda case: ("ok", {"median_ms": 1.0, "y_error": 0.9, "wrong": "y: error 0.9"})
    measured(sizes=[1], providers=["x"])
    row = read_objects(here / "tiny.jsonl")[0]
    assert (row["status"], row["reason"]) == ("wrong", "y: error 0.9")
    assert "median_ms" not in row and row["published_protocol_median_ms"] == 1.0


PROGRAM = """
import sys, time
sys.path[:0] = {paths!r}
import test_study
from study import run
sys.modules["study.tiny"] = test_study.tiny()
run.topics = lambda: ["tiny"]

def slow(case):
    time.sleep(0.05)
    return "ok", {{"median_ms": 1.0}}

test_study.DO.update(x=slow, y=slow)
run.run("tiny", sizes=list(range(1, 7)))
"""


def started(folder: Path) -> "subprocess.Popen[bytes]":
    given = os.environ | {"FUSEDLIB_RESULTS": str(folder), "PYTHONPATH": visitor.search_path()}
    for name in ("FRESH", rows.REPLAY):
        given.pop(name, None)
    program = PROGRAM.format(paths=[str(Path(__file__).parent)])
    return subprocess.Popen([sys.executable, "-c", program], env=given)


def test_runs_that_are_killed_anywhere_lose_no_row_and_double_none(here, monkeypatch):
    draw = random.Random(7)
    for _ in range(2):
        child = started(here.parent)
        while not (here / "tiny.jsonl").exists():
            assert child.poll() is None, "it ended before it had written a row"
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.5))
        child.send_signal(signal.SIGKILL)
        child.wait()
    written = (here / "tiny.jsonl").read_bytes()
    assert started(here.parent).wait(limits.PROCESS_S) == 0
    assert (here / "tiny.jsonl").read_bytes().startswith(written), "nothing recorded is lost"
    lines = read_objects(here / "tiny.jsonl")
    pairs = [(row["race"], row["provider"]) for row in lines]
    assert len(pairs) == len({*pairs}) == 24


def test_two_runs_measure_one_after_the_other_and_nothing_twice(here):
    both = [started(here.parent), started(here.parent)]
    assert [child.wait(limits.PROCESS_S) for child in both] == [0, 0]
    pairs = [(row["race"], row["provider"]) for row in read_objects(here / "tiny.jsonl")]
    assert len(pairs) == len({*pairs}) == 24


def test_a_torn_last_line_is_measured_again(measured, here):
    measured(sizes=[1])
    path = here / "tiny.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert len(measured(sizes=[1])) == 2, "its race, whole"
    assert len(rows.load(TINY, here=True)) == 4


# --- rows and ratios -----------------------------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Write rows by hand into a repository's results; each a dictionary that says what matters."""
    monkeypatch.setattr(paths, "RECORDED", tmp_path)
    monkeypatch.setitem(sys.modules, "study.tiny", ModuleType("study.tiny"))

    def write(*given: dict[str, Any]) -> None:
        for at, row in enumerate(given):
            line = {"machine": "nvidia-h200", "recording": "one", "race": "r", "provider": "x",
                    "session": None, "status": "ok", "measured_at": f"2030-01-{at + 1:02}",
                    **row}  # fmt: skip
            name = line.pop("machine")
            known = {"id": line["recording"], "set": line["recording"].partition(".")[0],
                     "machine": name, "profile": line.pop("profile", "full")}  # fmt: skip
            append_objects(tmp_path / rows.RECORDINGS, [known])
            append_objects(tmp_path / name / "tiny.jsonl", [line])

    return write


def shown(frame: pd.DataFrame) -> dict[str, Any]:
    return {
        provider: (value, apart)
        for provider, value, apart in zip(
            frame["provider"], frame["median_ms"], frame["apart"], strict=True
        )
    }


def test_the_newest_session_of_a_race_is_shown_and_who_it_lacks_stands_apart(recorded):
    recorded(
        {"session": "s1", "median_ms": 1.0}, {"session": "s1", "provider": "y", "median_ms": 2.0},
        {"session": "s1", "provider": "z", "median_ms": 3.0},
        {"recording": "two", "session": "s2", "median_ms": 4.0},
        {"recording": "two", "session": "s2", "provider": "y", "median_ms": 5.0},
        {"recording": "two.2", "provider": "w", "status": "unavailable", "median_ms": None},
    )  # fmt: skip
    frame = rows.load(TINY)
    found = shown(frame)
    assert found["x"] == (4.0, False) and found["y"] == (5.0, False) and found["z"] == (3.0, True)
    assert found["w"][1] is False, "of the same set of recordings"
    assert len(rows.load(TINY, sessions=True)) == 6
    compared = rows.ratio(frame, over="x")
    assert compared["provider"].tolist() == ["y"], "who stands apart enters no ratio"


def test_of_a_machine_with_rows_in_full_those_alone_are_shown(recorded):
    recorded(
        {"median_ms": 1.0},
        {"recording": "small", "race": "other", "profile": "quick", "median_ms": 2.0},
        {"machine": "mine", "recording": "mine", "profile": "quick", "median_ms": 3.0},
    )
    assert sorted(rows.load(TINY)["median_ms"]) == [1.0, 3.0]
    assert {*rows.load(TINY)["machine"]} == {"H200", "mine"}


def test_a_ratio_is_the_median_over_paired_rounds_of_one_session(recorded):
    recorded(
        {"session": "s", "median_ms": 2.0, "samples_ms": [1.0, 2.0, 9.0]},
        {"session": "s", "provider": "y", "median_ms": 6.0, "samples_ms": [2.0, 8.0, 9.0]},
        {"session": "s", "provider": "z", "status": "wrong", "median_ms": None},
        {"machine": "nvidia-h100", "session": "s", "provider": "y", "median_ms": 1.0},
    )
    frame = rows.load(TINY)
    of, over = rows.ratio(frame, of="x"), rows.ratio(frame, over="x")
    assert of["provider"].tolist() == over["provider"].tolist() == ["y"]
    assert of["ratio"].tolist() == [2.0] and over["ratio"].tolist() == [0.5]
    for wrong in ({}, {"of": "x", "over": "y"}):
        with pytest.raises(ValueError, match="one of"):
            rows.ratio(frame, **wrong)


def test_samples_that_are_no_pairs_are_divided_by_their_medians(recorded):
    recorded(
        {"session": "s", "median_ms": 2.0, "samples_ms": [1.0, 2.0, 9.0], "in_turns": False},
        {"session": "s", "provider": "y", "median_ms": 6.0, "samples_ms": [2.0, 8.0, 9.0],
         "in_turns": False},
        {"race": "memory", "peak_mib": 10.0}, {"race": "memory", "provider": "y", "peak_mib": 5.0},
        {"race": "apart", "median_ms": 2.0, "samples_ms": [1.0, 2.0, 9.0]},
        {"race": "apart", "provider": "y", "median_ms": 6.0, "samples_ms": [2.0, 6.0, 9.0]},
    )  # fmt: skip
    frame = rows.load(TINY)
    alone = frame[frame["race"] == "apart"]
    assert rows.ratio(alone, of="x")["ratio"].tolist() == [3.0], "each ran in a process of its own"
    assert rows.ratio(frame[frame["race"] == "r"], of="x")["ratio"].tolist() == [3.0]
    assert rows.ratio(frame, over="x", value="peak_mib")["ratio"].tolist() == [2.0]


def test_a_row_of_a_recording_that_nobody_knows_is_refused(recorded, tmp_path):
    recorded({})
    append_objects(tmp_path / "nvidia-h200" / "tiny.jsonl", [{"race": "r", "recording": "gone"}])
    with pytest.raises(LookupError, match="gone"):
        rows.load(TINY)
