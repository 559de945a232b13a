"""Licence, citation, changelog and commit hooks say the same as the project's metadata."""

import importlib.util
import re
import shlex
import tomllib

import pytest

import fusedlib
from fusedlib.bench import paths
from slides_checks import loads

yaml = pytest.importorskip("yaml", reason="PyYAML reads these files and is not installed")

PROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(name: str) -> str:
    return (paths.ROOT / name).read_text(encoding="utf-8")


def hooks() -> dict[str, dict]:
    repos = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert [repo["repo"] for repo in repos] == ["local"], "a hook from elsewhere needs a network"
    return {hook["id"]: hook for repo in repos for hook in repo["hooks"]}


def test_citation_has_what_the_format_asks_for():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["title"] == PROJECT["name"]
    assert PROJECT["dynamic"] == ["version"], "it stands once, in fusedlib/__init__.py"
    assert citation["license"] == PROJECT["license"] == "MIT"
    assert citation["authors"] and all(author["name"] for author in citation["authors"])
    known = {"cff-version", "message", "type", "title", "abstract", "authors"}
    assert set(citation) == known | {"license", "keywords"}
    assert all(isinstance(word, str) for word in citation["keywords"])


def test_licence_is_the_one_named():
    text = read("LICENSE")
    assert text.startswith("MIT License\n\nCopyright (c) 2026 the fusedlib authors\n")
    assert 'THE SOFTWARE IS PROVIDED "AS IS"' in text
    assert PROJECT["license-files"] == ["LICENSE"]


def test_changelog_starts_with_what_is_unreleased_and_uses_the_known_headings():
    text = read("CHANGELOG.md")
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    known = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= known


def test_hooks_need_no_network_and_use_declared_tools():
    declared = " ".join(PROJECT["optional-dependencies"]["dev"])
    for hook in hooks().values():
        assert hook["language"] == "system"
        shell, script, tool, *_ = shlex.split(hook["entry"])
        assert (shell, script) == ("sh", "tools/hook.sh") and tool in declared
    assert {"nbstripout", "ruff-check", "ruff-format"} <= set(hooks())


@pytest.mark.slow
def test_the_api_reference_has_every_public_name_and_loads_nothing(tmp_path):
    spec = importlib.util.spec_from_file_location("docs", paths.ROOT / "tools" / "docs.py")
    docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(docs)
    docs.write(tmp_path)
    page = (tmp_path / "fusedlib.html").read_text(encoding="utf-8")
    for name in fusedlib.__all__:
        assert f'<section id="{name}"' in page
    for path in tmp_path.rglob("*.html"):
        assert loads(path.read_text(encoding="utf-8")) == []
