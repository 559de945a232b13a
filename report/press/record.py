"""`make record`: what the full profile measures, races of quickly decided claims first.

What it will take is known beforehand, from the last recording's own times. It can be stopped and
resumed, at the same commit on the same type of card, over as many half hours as it takes.
"""

import io
import math
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from fusedlib.bench import machine as machines
from press import say
from press.run import ChoiceError, recorded_rows
from study import paths, provenance
from study import run as topics
from study.files import write_whole
from study.rows import ASSEMBLED, load

TOPIC_S = 20.0
"""Seconds that a topic takes before its races: a new process, imports."""
UNKNOWN_S = 5.0
PLAN = "plan"
"""Key of the races in `code.json`."""
MOST_USED_GIB = 2.0  # of a card on which nothing runs; the driver keeps some of it


def races(only: Sequence[str] = ()) -> pd.DataFrame:
    """What the full profile measures, a row a race: its `topic`, how many `cases` it has and
    `claims` rest on one, and the `seconds` that it took last on the slowest machine, or may
    take.

    Those of the claim that takes the least time come first, and last those on which no claim rests:
    a recording that ends early decides as many as it can. Where the code was carried without git,
    they come from what `make pack` wrote.
    """
    for name in only:
        topics.topic(name)  # raises where it is unknown
    listed = provenance.packed().get(PLAN)
    if listed is None:
        with recorded_rows():
            every = pd.concat([_of(topic) for topic in only or topics.topics()])
        listed = every.sort_values(["quickest", "seconds"], kind="stable").drop(columns="quickest")
    table = pd.DataFrame(listed)
    return table[table["topic"].isin(only or table["topic"])].reset_index(drop=True)


def _of(topic: str) -> pd.DataFrame:
    """The races of a topic, each with the time that the quickest claim on it takes in all."""
    cases = topics.races(topic, "full", device="cuda")
    table = pd.DataFrame({"topic": topic, "race": [*cases], "cases": [*map(len, cases.values())]})
    took_s = load(topic).groupby(["machine", "race"])["took_s"]
    typical_s = took_s.mean().median()
    guessed = table["cases"] * (typical_s if typical_s > 0 else UNKNOWN_S)
    slowest_s = took_s.sum().groupby("race").max()
    table["seconds"] = table["race"].map(slowest_s).fillna(guessed)
    rest = pd.DataFrame(index=table.index)  # a column a claim: whether it rests on the race
    for claim in say.every(topic):
        needed = {race for race, _ in say.required(topic, claim.of(say.rows_of(topic)))}
        rest[claim.name] = table["race"].isin(needed)
    cost = rest.mul(table["seconds"], axis=0).sum()
    quickest = rest.mul(cost).where(rest, math.inf).min(axis=1).fillna(math.inf)
    return table.assign(claims=rest.sum(axis=1).astype(int), quickest=quickest)


def left(races: pd.DataFrame, name: str) -> pd.DataFrame:
    """Those of which a recording lacks a case, or has one that is tried again."""
    lacking = {topic: topics.lacking(topic, name) for topic in races["topic"].unique()}
    pairs = zip(races["topic"], races["race"], strict=True)
    return races[[race in lacking[topic] for topic, race in pairs]]


def within(races: pd.DataFrame, minutes: float) -> pd.DataFrame:
    """The first races that fit the time, with what each topic takes besides."""
    chosen, begun, left_s = [], set[str](), 60 * minutes
    for at, one in races.iterrows():
        cost = one["seconds"] + (TOPIC_S if one["topic"] not in begun else 0.0)
        if cost <= left_s:
            chosen.append(at)
            begun.add(one["topic"])
            left_s -= cost
    return races.loc[chosen]


def summary(races: pd.DataFrame) -> str:
    """A line a topic: cases, those that claims rest on, and minutes."""
    table = races.assign(minutes=races["seconds"] / 60)
    table["for claims"] = table["cases"].where(table["claims"] > 0, 0)
    table = table.groupby("topic", sort=False)[["cases", "for claims", "minutes"]].sum()
    table["minutes"] += TOPIC_S / 60
    table.loc["all"] = table.sum()
    counts = dict.fromkeys(["cases", "for claims"], int)
    return str(table.rename_axis(None).astype(counts).to_string(float_format="{:.1f}".format))


def check_ready() -> None:
    """Raise a ChoiceError unless this machine and this code may record."""
    facts = machines.describe()
    if facts.device_type != "cuda":
        raise ChoiceError(
            f"a recording is made on a CUDA GPU; {facts.device_name} is none. `make study` "
            "measures what this machine can"
        )
    check_clean()
    if busy := machines.others_on_card(MOST_USED_GIB):
        raise ChoiceError(
            f"{busy} on the card; a measurement beside others is no recording. Wait until they "
            "have ended, or stop them"
        )


def check_clean() -> None:
    """Raise a ChoiceError unless the code is a commit's."""
    commit, dirty = provenance.commit()
    if commit is None:
        raise ChoiceError(
            "nobody can tell which commit this code is: there is no git here, and no "
            f"{provenance.PACKED}. Run `make pack` where the code has git, and carry that file too"
        )
    if dirty is not False:
        changed = ", ".join(provenance.changed()[:5])
        raise ChoiceError(
            f"the code differs from commit {commit[:7]}: {changed}. Commit first, and `make pack` "
            "again where the code is carried"
        )


def chosen_name(name: str, folder: Path, facts: machines.Machine) -> str:
    """This name, or without one that of this code's newest recording, else minute and commit.

    Code is what measures: a commit that changed a text goes on with the recording of the commit
    before.
    """
    commit, _ = provenance.commit()
    newest = {known: lines[-1] for known, lines in topics.recorded(folder).items()}
    other = {known: _other_code(line, facts) for known, line in newest.items()}
    if not name:
        alike = [
            known for known, line in newest.items()
            if not other[known] and line["profile"] == "full" and known != ASSEMBLED
        ]  # fmt: skip
        new = f"{datetime.now(UTC):%Y-%m-%d-%H%M}-{(commit or '')[:7]}"
        return max(alike, key=lambda known: str(newest[known]["began"]), default=new)
    if reason := other.get(name):
        raise ChoiceError(f"the recording {name} is of {reason}. Give another NAME=")
    return name


def _other_code(line: Mapping[str, Any], facts: machines.Machine) -> str:
    """What of a recording's card and code is not this one's, in words; empty where all is."""
    if line["device_name"] != facts.device_name:
        return f"{line['device_name']}; this is {facts.device_name}"
    files = provenance.differing(line.get("files") or {})
    changed = [path for path in files if path.endswith(".py")]
    if not changed:
        return ""
    more = " and more" if len(changed) > 3 else ""
    return f"commit {line['commit']}; since then changed {', '.join(changed[:3])}{more}"


def record(
    chosen: pd.DataFrame, name: str, minutes: float, measure: Callable[..., bool],
    packed: Path | None = None,
) -> bool:  # fmt: skip
    """Measure races into a recording, a topic after the other; whether any failed.

    After so many minutes no further race begins; after each topic, or when it is interrupted, the
    folder `packed` gets the recording as one file.
    """
    until, failed = time.time() + 60 * minutes, False
    with tempfile.TemporaryDirectory(prefix="fusedlib-record-") as own:
        for topic, races in chosen.groupby("topic", sort=False)["race"]:
            if time.time() > until:
                break
            listed = Path(own) / f"{topic}.txt"
            listed.write_text("\n".join(races))
            try:
                failed |= measure(topic, name, listed, until)
            finally:  # also of a topic that is interrupted
                if packed is not None:
                    print(f"packed {pack(name, packed)}", flush=True)
    return failed


def measure(topic: str, name: str, races: Path, until: float) -> bool:
    """Measure the listed races of a topic in a process of their own; whether it failed."""
    command = [sys.executable, "-m", "study", topic, "device=cuda", "--profile", "full"]
    command += ["--into", name, "--only", str(races), "--until", f"{until:.0f}"]
    began = time.monotonic()
    status = subprocess.run(command, cwd=paths.ROOT, check=False).returncode
    print(f"{topic}: exit {status}, {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    return status != 0


def pack(name: str, target: Path) -> Path:
    """A recording as one compressed file, `<machine>.<recording>.tar.xz`, written whole."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz") as archive:
        for path, text in topics.carried(name).items():
            entry = tarfile.TarInfo(path)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return write_whole(target / f"{machines.key()}.{name}.tar.xz", content.getvalue())


def carry() -> Path:
    """Write commit, hashes and plan beside the code, for a machine that has no git."""
    check_clean()
    return provenance.pack(**{PLAN: races().to_dict("records")})
