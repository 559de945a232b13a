"""Rows survive kills, full disks, editors and neighbours; one run at a time measures."""

import errno
import fcntl
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from study.files import (
    ResultsError,
    WriteError,
    append_objects,
    read_objects,
    write_whole,
)
from study.turns import LOCK, turn_on


def append(path: Path, row: dict) -> None:
    append_objects(path, [row])


# --- rows ----------------------------------------------------------------------------------------


EDITED = {  # how a file ends
    "no end": b'{"a": 1}\n{"a": 2}',
    "CRLF": b'{"a": 1}\r\n{"a": 2}\r\n',
    "CRLF, no end": b'{"a": 1}\r\n{"a": 2}',
    "CR": b'{"a": 1}\r{"a": 2}\r',
    "CR, no end": b'{"a": 1}\r{"a": 2}',
    "blanks": b'{"a": 1}\n{"a": 2}\n  ',
    "torn": b'{"a": 1}\n{"a": 2}\n{"a": ',
    "torn after CR": b'{"a": 1}\r{"a": 2}\r{"a": ',
    "nul bytes after a power cut": b'{"a": 1}\n{"a": 2}\n\0\0\0',
}


@pytest.mark.parametrize("edited", EDITED)
def test_no_row_of_a_file_that_somebody_edited_is_lost(tmp_path, edited):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(EDITED[edited])
    assert [row["a"] for row in read_objects(path)] == [1, 2]
    append(path, {"a": 3})
    assert [row["a"] for row in read_objects(path)] == [1, 2, 3]


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_half_written_rows_are_taken_back(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    append(path, {"a": 1})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResultsError, match="No space left on device.*FUSEDLIB_RESULTS"):
        append_objects(path, [{"a": 2}, {"a": 3}])
    assert path.read_text() == '{"a": 1}\n'


def test_a_full_disk_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = write_whole(tmp_path / "copy.ipynb", "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match=r"cannot write .*No space left.*Make room"):
        write_whole(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def _write_many(path: Path, writer: int) -> None:
    for i in range(40):
        append(path, {"writer": writer, "i": i, "samples": [writer] * 2000})


def test_two_processes_at_once_do_not_interleave(tmp_path):
    path = tmp_path / "rows.jsonl"
    workers = [multiprocessing.Process(target=_write_many, args=(path, w)) for w in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    rows = read_objects(path)
    assert len(rows) == 80
    for writer in (1, 2):
        assert [r["i"] for r in rows if r["writer"] == writer] == list(range(40))


# --- turns ---------------------------------------------------------------------------------------


def test_nobody_waits_longer_than_its_time(tmp_path, capsys):
    with (tmp_path / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        until = time.time() + 0.3
        with turn_on(tmp_path, "kernels", lambda: time.time() > until):
            pass
    assert "kernels: waits for another run" in capsys.readouterr().out


def test_what_a_measurement_starts_does_not_wait_for_it(tmp_path):
    with turn_on(tmp_path, "kernels"), turn_on(tmp_path, "memory", lambda: pytest.fail("waited")):
        pass


def test_a_file_system_without_locks_is_measured_on(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with turn_on(tmp_path, "kernels"):
        append(tmp_path / "rows.jsonl", {"a": 1})
    assert read_objects(tmp_path / "rows.jsonl") == [{"a": 1}]


def test_what_is_no_line_of_ours_is_left_to_people(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('[{"a":1},{"a":2}]')  # as pandas' to_json writes them
    append(path, {"a": 3})
    with pytest.raises(ResultsError, match="line 1 is not a JSON object"):
        read_objects(path)
    assert path.read_text() == '[{"a":1},{"a":2}]\n{"a": 3}\n'
