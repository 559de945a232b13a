"""The claims that stand on page one and in the README: those that notebooks mark as headlines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import nbformat
import pandas as pd

from fusedlib.bench import machine as machines
from fusedlib.study import recording
from fusedlib.study.claims import Claim
from fusedlib.study.running import config
from fusedlib.study.running.products import copy_path

RECORDED, OWN = "recorded", "this machine"


@dataclass(frozen=True)
class Headline:
    """A claim as it is shown: its study, its sentence, and its verdict by machine."""

    study: str
    title: str
    sentence: str
    verdicts: Sequence[dict[str, Any]]

    def verdict(self, own: bool) -> str:
        """"3 of 3" where it holds in every recording; a dash where it was not measured."""
        told = [v for v in self.verdicts if v["own"] == own and v["measured"]]
        counts = [f"{v['held']} of {v['measured']}" for v in told]
        return ", ".join(counts) or "—"


def executed() -> Iterator[Headline]:
    """Headlines of the executed notebooks, in the report's order; of those not executed none."""
    for study in config.load().studies:
        copy = copy_path(study.name)
        if not copy.exists():
            continue
        cells = nbformat.read(copy, as_version=4).cells
        for output in (o for cell in cells for o in cell.get("outputs", [])):
            meaning = output.get("metadata", {}).get("fusedlib", {})
            if meaning.get("kind") == "claim" and meaning["headline"]:
                told = (study.name, study.title, meaning["sentence"], meaning["verdicts"])
                yield Headline(*told)


def recorded() -> Iterator[Headline]:
    """The same from the rows of the repository alone, without running what measures."""
    for study in config.load().studies:
        for claim in recording.claims_of(study.notebook):
            if claim.headline:
                yield Headline(study.name, study.title, claim.sentence(), _verdicts(claim))


def _verdicts(claim: Claim) -> list[dict[str, Any]]:
    return [
        {"own": v.machine == machines.key(), "held": v.held, "measured": v.measured}
        for v in claim.verdicts
    ]


def table() -> pd.DataFrame:
    """Claim, recordings in which it holds, and the same for this machine."""
    lines = [
        {"claim": h.sentence, RECORDED: h.verdict(False), OWN: h.verdict(True)} for h in executed()
    ]  # fmt: skip
    return pd.DataFrame(lines, columns=["claim", RECORDED, OWN])
