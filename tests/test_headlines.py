"""The abstract and the README's list: every study in one, in the report's order."""

from types import SimpleNamespace

import pandas as pd

from fusedlib.study import headlines
from fusedlib.study.running import config


def test_every_study_has_a_headline_and_no_other():
    assert list(headlines.HEADLINES) == [study.name for study in config.load().studies]


def test_the_abstract_takes_so_many_sentences_of_each_study(monkeypatch):
    titles = {"02_y": "Last", "01_x": "First"}
    order = [SimpleNamespace(name=name, title=titles[name]) for name in ("01_x", "02_y")]
    rows = {"01_x": pd.DataFrame({"a": [1, 2]}), "02_y": pd.DataFrame()}

    def sentences(frame):
        return [f"{len(frame)} rows.", "More.", "Most."]

    told = {"02_y": headlines.Headline(sentences, 1), "01_x": headlines.Headline(sentences)}
    monkeypatch.setattr(headlines, "HEADLINES", told)
    monkeypatch.setattr(headlines.config, "load", lambda: SimpleNamespace(studies=order))
    monkeypatch.setattr(headlines.results, "load", rows.__getitem__)
    assert list(headlines.abstract()) == ["**First.** 2 rows. More.", "**Last.** 0 rows."]
