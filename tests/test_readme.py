"""The README's programs run, what it and CONTRIBUTING lead to exists; its blocks are generated."""

import re

import pytest
import transformers

from press import cli, readme, run
from press_called import called
from study import paths

DOCUMENTS = ("README.md", "CONTRIBUTING.md")


def text_of(name: str) -> str:
    return (paths.ROOT / name).read_text(encoding="utf-8")


def test_what_the_readme_shows_runs_as_it_stands(monkeypatch):
    """With a small model in place of the one from the hub."""
    small = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained",
        lambda name, dtype, device_map: transformers.LlamaForCausalLM(small).to(dtype),
    )  # fmt: skip
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


def test_updating_replaces_each_block_once_and_keeps_the_rest(monkeypatch):
    monkeypatch.setattr(readme, "BLOCKS", {"a": lambda: "new", "b": lambda: r"\1"})
    text = "# T\n<!-- a:begin -->\nold\n<!-- a:end -->\nmid\n<!-- b:begin --><!-- b:end -->\n"
    new = readme.updated(text)
    assert new == (
        "# T\n<!-- a:begin -->\nnew\n<!-- a:end -->\nmid\n<!-- b:begin -->\n\\1\n<!-- b:end -->\n"
    )
    assert readme.updated(new) == new
    for wrong in ("# T\n", text + text, text.replace("<!-- b:end -->", "")):
        with pytest.raises(ValueError, match="exactly one block"):
            readme.updated(wrong)


def test_the_blocks_are_what_the_rows_say_and_the_first_screen_is_short():
    text = text_of("README.md")
    with run.recorded_rows():
        assert readme.updated(text) == text, "run `python -m press readme --write`"
    assert len(text.splitlines()) <= 150 and len(readme.FINDINGS) <= 8
    block = text.partition("<!-- numbers:begin -->")[2].partition("<!-- numbers:end -->")[0]
    assert len(re.findall(r"\d[\d.–]*(?:×| %)", block)) <= 6, "a few numbers"


def test_write_puts_the_blocks_into_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "BLOCKS", {"a": lambda: "new"})
    path = tmp_path / "README.md"
    path.write_text("<!-- a:begin --><!-- a:end -->\n", encoding="utf-8")
    monkeypatch.setattr(cli.paths, "ROOT", tmp_path)
    shown = called("readme")
    assert (shown.status, shown.stdout) == (0, "<!-- a:begin -->\nnew\n<!-- a:end -->\n\n")
    assert path.read_text(encoding="utf-8") == "<!-- a:begin --><!-- a:end -->\n"
    assert called("readme", "--write").status == 0
    assert path.read_text(encoding="utf-8") == "<!-- a:begin -->\nnew\n<!-- a:end -->\n"
