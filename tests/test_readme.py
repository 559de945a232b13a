"""The README's programs run, what it and CONTRIBUTING lead to exists; its block is generated."""

import re

import pytest
from nbformat import NotebookNode
from typer.testing import CliRunner

from press import cli, headlines, run, say
from study import paths

DOCUMENTS = ("README.md", "CONTRIBUTING.md")
README = f"# Title\n\nbefore\n{headlines.BEGIN}\nold\n{headlines.END}\nafter\n"


def text_of(name: str) -> str:
    return (paths.ROOT / name).read_text(encoding="utf-8")


def test_what_the_readme_shows_runs_as_it_stands():
    blocks = re.findall(r"^```python\n(.*?)^```$", text_of("README.md"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for program in blocks:
        exec(compile(program, "README.md", "exec"), {})


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_targets_of_a_document_exist(name):
    text = text_of(name)
    links = re.findall(r'\]\(([^)#\s:"]+)\)', text)
    assert [link for link in links if not (paths.ROOT / link).exists()] == []
    targets = re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE)
    assert {*re.findall(r"(?:^|`|&& )make ([a-z-]+)", text, re.MULTILINE)} <= {*targets}


CLAIMS = [
    NotebookNode(
        study="one", title="One", sentence=r"It takes 3 ms, \1.", headline="Fast",
        path="notebooks/one.ipynb",
        standings=[{"label": "H200", "own": False, "measured": 3, "parts": 0, "count": "3 of 3"}],
    )
]  # fmt: skip


def test_a_text_is_filled_with_the_numbers_of_claims():
    text = "{kernels/models/liger} as fast, {kernels/models/nobody} as that"
    with run.recorded_rows():
        liger = say.evaluate("kernels/models").numbers()["liger"]
        assert headlines.filled(text) == f"{liger} as fast, — as that"
        each = [headlines.filled("{kernels/models/liger}", f"nvidia-{n}") for n in ("h200", "h100")]
    assert each == [liger, "—"], "the H100 lacks a case"


def test_updating_replaces_the_block_once_and_keeps_the_rest():
    block = headlines.readme_block(CLAIMS)
    text = headlines.updated_readme(README, block)
    assert text == f"# Title\n\nbefore\n{block}\nafter\n"
    assert headlines.updated_readme(text, block) == text


@pytest.mark.parametrize("text", ["# Title\n", README + README, README.replace(headlines.END, "")])
def test_a_readme_without_exactly_one_block_raises(text):
    with pytest.raises(ValueError, match="exactly one block"):
        headlines.updated_readme(text, headlines.readme_block(CLAIMS))


def test_write_puts_the_block_into_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run", lambda parts, values: False)
    monkeypatch.setattr(headlines, "stated", lambda: iter(CLAIMS))
    path = tmp_path / "README.md"
    path.write_text(README, encoding="utf-8")
    block = headlines.readme_block(CLAIMS)
    monkeypatch.setattr(cli.paths, "ROOT", tmp_path)
    shown = CliRunner().invoke(cli.app, ["readme"])
    assert (shown.exit_code, shown.stdout.strip()) == (0, block)
    assert path.read_text(encoding="utf-8") == README
    assert CliRunner().invoke(cli.app, ["readme", "--write"]).exit_code == 0
    assert path.read_text(encoding="utf-8") == headlines.updated_readme(README, block)
