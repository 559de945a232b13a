"""The README's programs run, what it and CONTRIBUTING lead to exists; its block is generated."""

import os
import re

import pytest
from nbformat import NotebookNode
from typer.testing import CliRunner

from measure.recording import paths
from press import cli, headlines, replay

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


def test_a_text_is_filled_with_claims_read_once_until_an_executed_copy_changes(
    tmp_path, monkeypatch
):
    copy, read = tmp_path / "notebooks" / "kernels.ipynb", []
    copy.parent.mkdir()
    copy.write_text("one")
    claim = NotebookNode(study="kernels", name="models", numbers={"liger": "1.03×"})
    monkeypatch.setenv("FUSEDLIB_BUILD", str(tmp_path))
    monkeypatch.setattr(headlines, "read_claims", lambda: read.append(1) or [claim])
    text = "{kernels/models/liger} as fast, {kernels/models/quack} as QuACK"
    assert [headlines.filled(text) for _ in range(3)] == ["1.03× as fast, — as QuACK"] * 3
    assert len(read) == 1
    claim.numbers["liger"] = "1.07×"
    os.utime(copy, (1, 1))
    assert headlines.filled(text) == "1.07× as fast, — as QuACK"


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
    monkeypatch.setattr(replay, "executed", lambda config, folder, only: None)
    monkeypatch.setattr(headlines, "read_claims", lambda folder: iter(CLAIMS))
    path = tmp_path / "README.md"
    path.write_text(README, encoding="utf-8")
    block = headlines.readme_block(CLAIMS)
    monkeypatch.setattr(cli.paths, "ROOT", tmp_path)
    shown = CliRunner().invoke(cli.app, ["readme"])
    assert (shown.exit_code, shown.stdout.strip()) == (0, block)
    assert path.read_text(encoding="utf-8") == README
    assert CliRunner().invoke(cli.app, ["readme", "--write"]).exit_code == 0
    assert path.read_text(encoding="utf-8") == headlines.updated_readme(README, block)
