"""The README's generated block: from the recorded machine's rows only, placed without loss."""

from types import SimpleNamespace

import pandas as pd
import pytest

from fusedlib.study import headlines, readme
from fusedlib.study.selection import no_finding

README = f"# Title\n\nbefore\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"


def stated(monkeypatch, sentences):
    """One study of that name, which says so of itself."""
    study = SimpleNamespace(name="01_x", title="Title")
    monkeypatch.setattr(readme.config, "load", lambda: SimpleNamespace(studies=[study]))
    monkeypatch.setattr(headlines, "HEADLINES", {"01_x": headlines.Headline(sentences)})


@pytest.fixture
def rows(monkeypatch):
    """Two machines' rows, the recorded one being the one this runs on; headlines that count."""
    frame = pd.DataFrame(
        {
            "machine": ["my-laptop", readme.MACHINE, readme.MACHINE],
            "own": [False, True, True],
            "device_name": ["a CPU", "a GPU", "a GPU"],
            "commit": ["11111111", "33333333", "22222222"],
        }
    )
    asked = []

    def load(study: str, **wanted: object) -> pd.DataFrame:
        asked.append((study, wanted["profile"]))
        return frame

    def headline(found: pd.DataFrame) -> list[str]:
        return [rf"{len(found)} rows, own {set(found['own'])}, \1.", "Another sentence."]

    monkeypatch.setattr(readme.results, "load", load)
    table = pd.DataFrame({"Liger": ["1.10–1.20"]}, index=pd.Index(["some work (2)"], name="work"))
    stated(monkeypatch, headline)
    monkeypatch.setattr(readme.gains, "table", lambda kernels, steps: table)
    monkeypatch.setattr(readme.gains, "nothing", lambda kernels, steps: ["one place", "another"])
    return asked


def test_block_is_made_of_the_recorded_machine_only(rows):
    block = readme.block()
    assert set(rows) == {("01_x", "full"), ("03_kernels", "full"), ("04_memory", "full")}
    assert block.startswith(readme.BEGIN) and block.endswith(readme.END)
    told = "- [Title](notebooks/01_x.ipynb): 2 rows, own {False}, \\1."
    assert told in block, "no 'this machine' in a text read elsewhere"
    assert "over ours on a GPU," in block and "a CPU" not in block
    assert "at commit 2222222, 3333333, memory" in block and "1111111" not in block
    assert "Another" not in block, "one sentence a study"


def test_block_has_what_ours_gives_as_a_table_and_where_it_gives_nothing(rows, monkeypatch):
    lines = readme.block().splitlines()
    assert "| work | Liger |" in lines and "| some work (2) | 1.10–1.20 |" in lines
    assert "launch: one place; another." in " ".join(lines)
    monkeypatch.setattr(readme.gains, "nothing", lambda kernels, steps: [])
    assert "gives nothing" not in readme.block()
    monkeypatch.setattr(readme.gains, "table", lambda kernels, steps: pd.DataFrame())
    with pytest.raises(readme.ReadmeError, match="time no work side by side"):
        readme.block()


def test_updating_replaces_the_block_once_and_keeps_the_rest(rows):
    text = readme.updated(README)
    assert text == f"# Title\n\nbefore\n{readme.block()}\nafter\n"
    assert readme.updated(text) == text
    assert r"own {False}, \1." in text


@pytest.mark.parametrize("sentences", [[], [no_finding("01_x")]])
def test_rows_without_a_headline_raise(rows, monkeypatch, sentences):
    stated(monkeypatch, lambda _: sentences)
    with pytest.raises(readme.ReadmeError, match="give no headline"):
        readme.block()


@pytest.mark.parametrize("text", ["# Title\n", README + README, README.replace(readme.END, "")])
def test_a_readme_without_exactly_one_block_raises(rows, text):
    with pytest.raises(readme.ReadmeError, match="exactly one block"):
        readme.updated(text)


def test_no_recorded_row_raises_and_says_what_to_do(tmp_path):
    with pytest.raises(readme.ReadmeError, match=r"holds no row of 01_warmup .*PROFILE=full"):
        readme.recorded("01_warmup", tmp_path)


def test_write_puts_the_block_into_the_file(rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(readme.paths, "ROOT", tmp_path)
    path = tmp_path / "README.md"
    path.write_text(README, encoding="utf-8")
    readme.main([])
    assert capsys.readouterr().out.strip() == readme.block()
    assert path.read_text(encoding="utf-8") == README
    readme.main(["--write"])
    assert path.read_text(encoding="utf-8") == readme.updated(README)
