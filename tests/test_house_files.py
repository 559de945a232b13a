"""Licence, citation, changelog and commit hooks say the same as the project's metadata."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fusedlib
import limits
from measure.recording import paths
from slides_checks import loads
from tools import commit_message, docs

yaml = pytest.importorskip("yaml", reason="PyYAML reads these files and is not installed")

PYPROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
# What follows `timeout` or `timeout_s` and is no name of `limits`.
LIMIT = re.compile(r"""\btimeout(?:_s)?["']?\s*[=:(]\s*(?!\{?limits\.)[\w{.]""")


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
    keys = {"cff-version", "message", "type", "title", "abstract", "authors"}
    assert set(citation) == keys | {"license", "keywords", "version", "date-released"}
    assert citation["keywords"] == PROJECT["keywords"]
    assert citation["authors"] == PROJECT["authors"]


def test_the_last_release_has_one_version_and_one_date():
    citation = yaml.safe_load(read("CITATION.cff"))
    _, released, *_ = re.findall(r"^## \[.+", read("CHANGELOG.md"), re.MULTILINE)
    assert citation["version"] == fusedlib.__version__
    assert released == f"## [{fusedlib.__version__}] - {citation['date-released'].isoformat()}"


def test_licence_is_the_one_named():
    text = read("LICENSE")
    assert text.startswith("MIT License\n\nCopyright (c) 2026 the fusedlib authors\n")
    assert 'THE SOFTWARE IS PROVIDED "AS IS"' in text
    assert PROJECT["license-files"] == ["LICENSE"]


def test_changelog_starts_with_what_is_unreleased_and_uses_the_known_headings():
    text = read("CHANGELOG.md")
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    headings = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= headings


def test_hooks_need_no_network_and_use_declared_tools():
    declared = " ".join(PROJECT["optional-dependencies"]["dev"])
    for hook in hooks().values():
        assert hook["language"] == "system"
        shell, script, tool, *_ = shlex.split(hook["entry"])
        assert (shell, script) == ("sh", "tools/hook.sh")
        assert tool == "python" or tool in declared
    assert {"ruff-check", "ruff-format"} <= set(hooks())


@pytest.fixture
def hooked(tmp_path):
    """A repository of one commit, in which `pre-commit install` put this project's hooks."""
    pytest.importorskip("pre_commit")  # a Python given by VENV= need not have it
    for name in (".pre-commit-config.yaml", "tools/hook.sh", "tools/commit_message.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(paths.ROOT / name, tmp_path / name)

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=.git/hooks"]
        search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["git", *own, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PATH": search, "PRE_COMMIT_HOME": str(tmp_path / ".git" / "cache")},
        )  # fmt: skip

    git("init", "-b", "main")
    git("commit", "--allow-empty", "-m", "The first")
    command = [sys.executable, "-m", "pre_commit", "install"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    return git


def test_a_commit_or_merge_without_a_body_is_refused_and_told_what_to_do(hooked):
    refused = hooked("commit", "--allow-empty", "-m", "A change")
    assert refused.returncode == 1
    assert "has no body" in refused.stderr and "why it was made" in refused.stderr
    hooked("checkout", "-b", "side")
    assert hooked("commit", "--allow-empty", "-m", "A change", "-m", "Why.").returncode == 0
    hooked("checkout", "main")
    assert "has no body" in hooked("merge", "--no-ff", "side").stderr
    hooked("merge", "--abort")
    assert hooked("merge", "--no-ff", "side", "-m", "Merge", "-m", "Why.").returncode == 0


@pytest.mark.parametrize(
    ("message", "accepted"),
    [
        ("A change\n\nWhy.\n", True),
        ("A change\n", False),
        ("A change\nthat goes on\n", False),
        ("A change\n\nSigned-off-by: a <a@b>\n", False),
        ("A change\n\n# On branch main\n", False),
        ("A change\n# ------------------------ >8 ------------------------\n\ndiff\n", False),
        ("# Conflicts:\nA change\n\nWhy.\n\nSigned-off-by: a <a@b>\n", True),
        ("fixup! A change\n", True),
    ],
)
def test_a_body_is_text_below_an_empty_line(message, accepted):
    assert commit_message.has_body(message) == accepted


@pytest.mark.slow
def test_the_api_reference_has_every_public_name_and_loads_nothing(tmp_path):
    docs.write(tmp_path)
    page = (tmp_path / "fusedlib.html").read_text(encoding="utf-8")
    for name in fusedlib.__all__:
        assert f'<section id="{name}"' in page
    for path in tmp_path.rglob("*.html"):
        assert loads(path.read_text(encoding="utf-8")) == []


# --- limits of tests ------------------------------------------------------------------------------


def limits_elsewhere(text: str) -> list[str]:
    """Lines that give a test or a process a time of their own."""
    return [line for line in text.splitlines() if LIMIT.search(line)]


def test_every_limit_of_a_test_stands_in_one_file():
    """`test_fresh` is about such a limit itself."""
    found = {}
    for path in (paths.ROOT / "tests").rglob("*.py"):
        if path.name not in ("limits.py", Path(__file__).name):
            found[path.name] = limits_elsewhere(path.read_text(encoding="utf-8"))
    assert {name: lines for name, lines in found.items() if lines} == {
        "test_fresh.py": ["        fresh.run(*sleep, timeout_s=2)"],
    }
    options = PYPROJECT["tool"]["pytest"]["ini_options"]
    assert limits.INTERPRETED_TEST_S < limits.PROCESS_S < limits.TEST_S == options["timeout"]


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("run(command, timeout=limits.PROCESS_S)", True),
        ("run(command, timeout=60)", False),
        ("run(command, timeout_s=SHORT)", False),
        ('{"timeout": 240}', False),
        ("@pytest.mark.timeout(600)", False),
    ],
)
def test_limits_elsewhere_are_found(line, allowed):
    assert limits_elsewhere(line) == ([] if allowed else [line])
