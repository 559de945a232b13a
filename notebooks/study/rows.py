"""Recorded rows as a plain pandas frame.

    report/results/<machine>/<topic>.jsonl     rows, a line of JSON each
    report/results/recordings.jsonl            what the rows of a recording share, a line each

A row has its case's fields and its figures side by side, and names its `recording` and its `race`:
the cases that differ in their `provider` alone. Rows of one `session` were timed in turns.

    rows = load("kernels").query("group == 'models' and direction == 'forward'")
    ratio(rows, of="fused").pivot_table("ratio", "model", "provider")
"""

import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fusedlib.bench import machine as machines
from study import paths
from study.files import read_objects

HOW = frozenset({"provider", "repetitions", "seconds", "limit_s"})
"""Fields of a case that say who is measured and for how long, and not what: no race has them."""
RECORDINGS = "recordings.jsonl"
REPLAY = "FUSEDLIB_REPLAY"
"""Set to "committed" nothing is measured, and the repository's rows alone are seen."""
ASSEMBLED = "assembled"
"""Name of a recording that was put together from several runs, none of which had all cases."""
_OF_RECORDING = ("set", "profile", "commit", "began", "device_type", "device_name", "gpu_uuid")


def key(topic: str, case: Mapping[str, Any]) -> str:
    """The identity of a case's race: a hash of the topic and of the fields that are not None."""
    fields = {n: v for n, v in case.items() if n not in HOW and v is not None}
    text = json.dumps([topic, fields], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load(topic: str, *, sessions: bool = False, here: bool = False) -> pd.DataFrame:
    """Rows of a topic, whatever became of them, with what its `derive` adds.

    Of each machine and race the newest session, with those rows of its set that have no session,
    as memory or what could not run. Providers that it lacks have their own newest row, where
    `apart` is True: they enter no ratio. Of a machine with rows of the profile full, those.

    Args:
        sessions: every row that there is.
        here: also this machine's own, which are not part of the repository.

    Returns:
        A row a case. Beside the case's fields and figures: `machine` ("H200"), `recording` and the
        `set` of recordings that it belongs to, `race`, `session`, `status` (ok, wrong, unavailable,
        oom, failed), `reason`, and of the recording `profile`, `commit`, `began`, `device_name`.

    Raises:
        ResultsError: a line that is damaged.
    """
    rows = list(_of_machines(topic, here=here))
    full = {row["machine"] for row in rows if row["profile"] == "full"}
    rows = [row for row in rows if row["profile"] == "full" or row["machine"] not in full]
    frame = pd.DataFrame(rows if sessions else newest(rows))
    if frame.empty:
        frame = pd.DataFrame(columns=["machine", "race", "provider", "session", "status", "apart"])
    module = importlib.import_module(f"study.{topic}")
    frame = module.derive(frame) if hasattr(module, "derive") else frame
    frame.attrs = {"topic": topic}
    return frame


def ratio(
    rows: pd.DataFrame, *, of: str | None = None, over: str | None = None, value: str = "median_ms"
) -> pd.DataFrame:
    """How many times as fast, in the same session: `of` as each other, or each as `over`.

    Args:
        rows: as `load` gives them; those without a figure are left out.
        of: a provider; each other one's row says how many times as fast `of` is.
        over: a provider; each other one's row says how many times as fast it is.
        value: what is compared, smaller being better. Of times of one session the ratio is the
            median over paired rounds; other figures, such as memory, are divided.

    Returns:
        The rows but those of `of` or `over`, each with `ratio`; who had no partner is left out.
    """
    if (of is None) == (over is None):
        raise ValueError("ratio takes one of `of` and `over`: whose speed, or beside whose")
    base = of or over
    keys = ["machine", "set", "race", "session"]
    measured = rows[rows[value].notna()] if value in rows else rows.iloc[:0]
    lines = measured.astype(object).where(measured.notna(), None).to_dict("records")
    partners: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        if line["provider"] == base:
            partners.setdefault(tuple(line[name] for name in keys), line)
    at, ratios = [], []
    for number, line in enumerate(lines):
        partner = partners.get(tuple(line[name] for name in keys))
        if partner is not None and line["provider"] != base:
            times = _times_as_fast(line, partner, value)
            at.append(number)
            ratios.append(1 / times if of else times)
    return measured.iloc[at].assign(ratio=np.array(ratios, dtype=float))


def _times_as_fast(row: Mapping[str, Any], baseline: Mapping[str, Any], value: str) -> float:
    samples = value.replace("median_ms", "samples_ms")
    ours, theirs = row.get(samples), baseline.get(samples)
    paired = isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs)
    if paired and row["session"] is not None and row.get("in_turns") is not False:
        return float(np.median(np.asarray(theirs) / np.asarray(ours)))
    return float(baseline[value] / row[value])


def recordings() -> pd.DataFrame:
    """Every recording: `id`, `set`, machine, profile, commit, host, versions, date, `files`."""
    here = os.environ.get(REPLAY) != "committed"
    known = _recordings(paths.RECORDED, here=here)
    known |= _recordings(paths.results_dir(), here=here) if here else {}
    return pd.DataFrame(known.values())


def newest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each machine and race the newest session and what belongs to it; others `apart`."""
    races: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        races.setdefault((row["machine"], row["race"]), []).append(row)
    return [row for race in races.values() for row in _newest_of(race)]


def _newest_of(race: list[dict[str, Any]]) -> list[dict[str, Any]]:
    race = sorted(race, key=lambda row: str(row["measured_at"]))
    timed = [row for row in race if row.get("session")]
    last = max(timed, key=lambda row: str(row["session"])) if timed else race[-1]
    same_set = [row for row in race if row["set"] == last["set"]]
    session = last.get("session")
    chosen = {row.get("provider"): row for row in same_set if not row.get("session")}
    chosen |= {row.get("provider"): row for row in same_set if row.get("session") == session}
    others = {r.get("provider"): r for r in race if r.get("provider") not in chosen}
    shown = [{**row, "apart": False} for row in chosen.values()]
    return shown + [{**row, "apart": True} for row in others.values()]


def _of_machines(topic: str, *, here: bool) -> Iterator[dict[str, Any]]:
    """The rows of a topic with what their machine and recording say."""
    here = here and os.environ.get(REPLAY) != "committed"
    for folder in folders(here=here):
        path = folder / f"{topic}.jsonl"
        if not path.exists():
            continue
        known = _recordings(folder.parent, here=here)
        for row in read_objects(path):
            recording = known.get((folder.name, str(row.get("recording"))))
            if recording is None:
                raise LookupError(
                    f"{path}: a row's recording {row.get('recording')!r} is in no {RECORDINGS}; "
                    "restore it from git, or move the rows elsewhere"
                )
            said = {name: recording.get(name) for name in _OF_RECORDING}
            yield {"machine": machines.label(folder.name), **said, **row}


def folders(*, here: bool) -> list[Path]:
    """Folders of the machines of the repository, and of this one if wanted."""
    every = sorted(path for path in paths.RECORDED.glob("*") if path.is_dir())
    chosen = [path for path in every if not (path / ".gitignore").exists()]
    own = paths.results_dir() / machines.key()
    if here and own.is_dir() and own.resolve() not in {path.resolve() for path in chosen}:
        chosen.append(own)
    return chosen


def _recordings(results: Path, *, here: bool) -> dict[tuple[str, str], dict[str, Any]]:
    """By machine and id: those of a folder of results, and those that lie beside a visitor's."""
    files = [results / RECORDINGS, *(results.glob(f"*/{RECORDINGS}") if here else ())]
    lines = (line for path in files if path.exists() for line in read_objects(path))
    return {(line["machine"], line["id"]): line for line in lines}
