"""The file of tuned tiles: read, merged, broken, unwritable, written by two processes at once."""

import json
import multiprocessing
import os
from dataclasses import asdict

import pytest

pytest.importorskip("triton")
from autotune_stand_ins import (
    FIRST,
    SECOND,
    Clock,
    Kernel,
    another_process,
    choose,
    matrices,
    tiles,
)

from fusedlib import paths
from fusedlib.kernels.autotune import store, trials
from fusedlib.kernels.swiglu_configs import Config


def test_another_process_reads_and_does_not_tune(monkeypatch, card_folder):
    Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    choose(kernel)
    another_process(monkeypatch)
    clock = Clock(monkeypatch, kernel := Kernel(), {SECOND: 0.1})
    assert choose(kernel) == FIRST and not clock.asked


def test_what_another_process_stored_meanwhile_decides(monkeypatch, card_folder):
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    choose(kernel)
    (key,) = tiles(card_folder)
    (card_folder / store.NAME).unlink()
    another_process(monkeypatch)

    def meanwhile(call):
        store.put(key, {"config": asdict(SECOND)})
        return clock(call)

    monkeypatch.setattr(trials, "milliseconds", meanwhile)
    assert choose(kernel) == SECOND and choose(kernel) == SECOND


@pytest.mark.parametrize("content", [b"", b'{"tiles": {', b"\xff\xfe", b"[]", b'{"tiles": 3}'])
def test_a_broken_file_is_said_once_and_made_anew(monkeypatch, card_folder, content):
    card_folder.mkdir()
    (card_folder / store.NAME).write_bytes(content)
    Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    with pytest.warns(store.TilesWarning, match=f"{store.NAME} cannot be used") as said:
        assert choose(kernel) == FIRST
    assert len(said) == 1 and len(tiles(card_folder)) == 1


@pytest.mark.parametrize(
    "entry",
    [
        {"config": asdict(Config(7, 7, 7, 3, 1))},
        {"config": {"block_m": 64}},
        {"config": 3},
        {},
        "a word",
    ],
)
def test_an_entry_that_is_no_candidate_is_replaced(monkeypatch, card_folder, entry):
    Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    choose(kernel)
    (key,) = tiles(card_folder)
    content = {"tiles": {key: entry, "another": {"config": {}, "note": 1}}, "newer": True}
    (card_folder / store.NAME).write_text(json.dumps(content), encoding="utf-8")
    another_process(monkeypatch)
    assert choose(kernel) == FIRST
    written = json.loads((card_folder / store.NAME).read_text(encoding="utf-8"))
    assert written["tiles"][key]["config"] == asdict(FIRST)
    assert written["newer"] and written["tiles"]["another"] == content["tiles"]["another"]


def test_fields_of_a_later_version_are_ignored_and_kept(monkeypatch, card_folder):
    Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    choose(kernel)
    (key,) = tiles(card_folder)
    entry = {"config": asdict(SECOND) | {"cluster": 2}, "watts": 300}
    (card_folder / store.NAME).write_text(json.dumps({"tiles": {key: entry}}), encoding="utf-8")
    another_process(monkeypatch)
    clock = Clock(monkeypatch, kernel, {})
    assert choose(kernel) == SECOND and not clock.asked and tiles(card_folder) == {key: entry}


def test_a_folder_that_cannot_be_written_costs_a_warning(monkeypatch, card_folder):
    card_folder.write_text("in the way", encoding="utf-8")
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    with pytest.warns(store.TilesWarning, match="FUSEDLIB_CACHE") as said:
        assert choose(kernel) == FIRST
        assert choose(kernel, matrices(hidden=64)) == FIRST
    assert {"read" in str(w.message) for w in said} == {True, False} and len(said) == 2
    assert all(str(card_folder) in str(w.message) for w in said)
    asked = clock.asked
    assert choose(kernel) == FIRST and clock.asked == asked


def test_a_write_that_fails_leaves_the_old_file_and_no_other(monkeypatch, card_folder):
    Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    choose(kernel)
    before = tiles(card_folder)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(store.TilesWarning, match="No space left"):
        assert choose(kernel, matrices(hidden=64)) == FIRST
    assert tiles(card_folder) == before
    assert {p.name for p in card_folder.iterdir()} == {store.NAME, store.NAME + ".lock"}


def _put(card_folder: str, who: int, several: int) -> list:
    os.environ["FUSEDLIB_CACHE"] = card_folder
    own = [store.put(f"{who} {i}", {"who": who}) for i in range(several)]
    shared = [store.put(f"shared {i}", {"who": who}) for i in range(several)]
    assert all(entry == {"who": who} for entry in own)
    return shared


def test_two_processes_lose_nothing_and_agree(tmp_path):
    several = 40
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.starmap(_put, [(str(tmp_path), who, several) for who in (1, 2)])
    assert found[0] == found[1]
    assert len(tiles(tmp_path)) == 3 * several
    assert {p.name for p in tmp_path.iterdir()} == {store.NAME, store.NAME + ".lock"}


def test_where_the_file_lies(monkeypatch, tmp_path):
    for name in ("FUSEDLIB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.cache_dir() == tmp_path / ".cache" / "fusedlib"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert paths.cache_dir() == tmp_path / ".cache" / "fusedlib"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert paths.cache_dir() == tmp_path / "xdg" / "fusedlib"
    monkeypatch.setenv("FUSEDLIB_CACHE", str(tmp_path / "own"))
    assert paths.cache_dir() == tmp_path / "own"
