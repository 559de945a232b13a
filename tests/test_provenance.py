"""Which code measured: hashes as git has them, and a commit with git and without."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from study import paths, provenance

FILES = {
    "fusedlib/norm.py": "a = 1\n",
    "fusedlib/bench/turns.py": "b = 1\n",
    "report/press/cli.py": "c = 1\n",
    "notebooks/helper.py": "",
    "notebooks/study/kernels.py": "x = 1\n",
}
COUNTED = set(FILES) - {"report/press/cli.py"}


def git(*arguments: str, at: Path) -> str:
    settings = "user.name=a", "user.email=a@example.org", "core.hooksPath=/dev/null"
    known = [word for setting in settings for word in ("-c", setting)]
    done = subprocess.run(
        ["git", *known, *arguments], cwd=at, check=True, capture_output=True, text=True
    )
    return done.stdout


def forget() -> None:
    provenance.files.cache_clear()
    provenance.commit.cache_clear()


@pytest.fixture
def code(tmp_path, monkeypatch) -> Iterator[Path]:
    """A small checkout without git, which is taken for ours."""
    code = tmp_path / "fusedlib-main"
    for name, content in FILES.items():
        path = code / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr(paths, "ROOT", code)
    monkeypatch.setattr(paths, "NOTEBOOKS", code / "notebooks")
    forget()
    yield code
    monkeypatch.undo()
    forget()


@pytest.fixture
def cloned(code) -> Path:
    """The same with git, all of it committed."""
    git("init", "-q", at=code)
    git("add", ".", at=code)
    git("commit", "-q", "-m", "all", at=code)
    return code


def test_hashes_are_git_s_and_what_measures_nothing_has_none():
    actual = provenance.files()
    known = git("hash-object", *actual, at=paths.ROOT).split()
    assert dict(zip(actual, known, strict=True)) == actual
    for wanted in ("fusedlib/ops/mlp/kernels.py", "notebooks/flawed_layer.py",
                   "notebooks/study/kernels.py"):  # fmt: skip
        assert wanted in actual
    assert not [name for name in actual if name.startswith(("report/press/", "tests/", "report/"))]


def test_what_changed_is_new_or_is_gone_differs(code):
    then = dict(provenance.files())
    assert set(then) == COUNTED and provenance.differing(then) == []
    (code / "fusedlib/norm.py").write_text("a = 2\n")
    (code / "fusedlib/bench/turns.py").unlink()
    (code / "notebooks/new.py").write_text("n = 1\n")
    (code / "report/press/cli.py").write_text("c = 2\n")
    forget()
    assert provenance.differing(then) == [
        "fusedlib/bench/turns.py", "fusedlib/norm.py", "notebooks/new.py"
    ]  # fmt: skip
    assert provenance.differing({}) == sorted({*COUNTED, "notebooks/new.py"} - {
        "fusedlib/bench/turns.py"
    })  # fmt: skip


def test_the_commit_is_git_s_and_rows_do_not_make_it_dirty(cloned):
    head = git("rev-parse", "HEAD", at=cloned).strip()
    (cloned / "report" / "rows.jsonl").write_text("{}\n")
    assert provenance.commit() == (head, False)
    (cloned / "fusedlib/norm.py").write_text("a = 2\n")
    forget()
    assert provenance.commit() == (head, True)
    assert provenance.packed() == {}


def test_without_git_and_without_code_json_nothing_is_known(code):
    assert provenance.packed() == {}
    assert provenance.commit() == (None, None)


def foreign_repository(folder: Path) -> str:
    """A repository of something else, with a commit; its commit."""
    (folder / "thesis.tex").write_text("years of work\n")
    git("init", "-q", at=folder)
    git("add", "thesis.tex", at=folder)
    git("commit", "-q", "-m", "theirs", at=folder)
    return git("rev-parse", "HEAD", at=folder).strip()


def below(code: Path, monkeypatch) -> None:
    """An archive unpacked inside a repository of something else."""
    foreign_repository(code.parent)


def below_with_a_broken_git(code: Path, monkeypatch) -> None:
    (code / ".git").mkdir()
    foreign_repository(code.parent)


def beside(code: Path, monkeypatch) -> None:
    """The library is installed without its study, and the user's own repository is here."""
    foreign_repository(code)


FOREIGN = [below, below_with_a_broken_git, beside]


@pytest.mark.parametrize("foreign", FOREIGN)
def test_another_repository_s_commit_is_not_this_code_s_and_a_packed_one_is(
    code, monkeypatch, foreign
):
    foreign(code, monkeypatch)
    assert provenance.commit() == (None, None)
    forget()
    packed = {"commit": "1" * 40, "files": provenance.files()}
    (code / provenance.PACKED).write_text(json.dumps(packed))
    assert provenance.commit() == ("1" * 40, False)


def test_a_working_tree_beside_its_repository_has_its_commit(cloned, monkeypatch, tmp_path):
    head = git("rev-parse", "HEAD", at=cloned).strip()
    tree = tmp_path / "tree"
    git("worktree", "add", "-q", "--detach", str(tree), at=cloned)
    monkeypatch.setattr(paths, "ROOT", tree)
    forget()
    assert provenance.commit() == (head, False)


def carried(code: Path) -> str:
    """The checkout as it is carried: packed, then without git; its commit."""
    head = git("rev-parse", "HEAD", at=code).strip()
    assert provenance.pack() == code / provenance.PACKED
    (code / ".git").rename(code / "elsewhere")
    forget()
    return head


def test_without_git_the_commit_is_the_packed_one_and_a_file_that_differs_makes_it_dirty(cloned):
    head = carried(cloned)
    assert provenance.packed() == {"commit": head, "files": provenance.files()}
    assert provenance.commit() == (head, False) and provenance.changed() == []
    (cloned / "report/press/cli.py").write_text("c = 2\n")  # measures nothing
    forget()
    assert provenance.commit() == (head, False)
    (cloned / "notebooks/helper.py").write_text("d = 2\n")
    forget()
    assert provenance.commit() == (head, True)
    assert provenance.changed() == ["notebooks/helper.py"]


def test_a_copy_with_git_of_another_commit_is_the_packed_one(cloned):
    """The lent machine's copy has the git of the commit that the session began with."""
    packed = {"commit": "1" * 40, "files": provenance.files()}
    (cloned / provenance.PACKED).write_text(json.dumps(packed))
    assert provenance.packed() == packed
    assert provenance.commit() == ("1" * 40, False) and provenance.changed() == []
