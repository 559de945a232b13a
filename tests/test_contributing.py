"""README and CONTRIBUTING name only what exists, and quote only what stands in the file named."""

import pytest

from documents import FENCE, problems, runs
from measure.recording import paths
from press import headlines
from prose import GENERATED

DOCUMENTS = ("README.md", "CONTRIBUTING.md")


def text_of(name: str) -> str:
    return (paths.ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_everything_named_exists(name):
    assert problems(text_of(name)) == []


def test_contributing_shows_a_rival_a_study_and_a_kernel_from_the_repository():
    text = text_of("CONTRIBUTING.md")
    for heading in ("## Add a rival", "## Add a study", "## Add a kernel"):
        part = text.partition(heading)[2].partition("\n## ")[0]
        assert [block[2] for block in FENCE.finditer(part)], f"{heading} shows no example"


def test_what_the_readme_shows_runs_as_it_stands():
    programs = [block[3] for block in FENCE.finditer(text_of("README.md")) if runs(block)]
    assert programs
    for program in programs:
        exec(compile(program, "README.md", "exec"), {})


def test_readme_fits_on_two_screens():
    lines = GENERATED.sub("", text_of("README.md")).splitlines()
    assert len(lines) <= 117
    assert all(len(line) <= 130 for line in lines if not line.startswith("|"))


def test_readme_shows_what_it_gives_then_its_use_then_the_claims():
    lines = text_of("README.md").splitlines()
    picture = next(at for at, line in enumerate(lines) if line.startswith("!["))
    assert picture < lines.index("```python") < lines.index(headlines.BEGIN) < 50


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_document_names_a_host(name):
    assert "://" not in text_of(name)


# --- teeth ---------------------------------------------------------------------------------------

RIVAL = '@rival(TASK, "eager")'
EXCERPT = f"```python\n# notebooks/measure/swiglu.py\n{RIVAL}\n{{}}\n```\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("`fusedlib/bench/clock.py`", "there is no fusedlib/bench/clock.py"),
        ("`notebooks/03_speed.ipynb`", "there is no notebooks/03_speed.ipynb"),
        ("`tests/`, `report/reslts`", "there is no report/reslts"),
        ("`LICENCE.md`", "there is no LICENCE.md"),
        ("`report/build/paper.pdf`", "there is no report/build/paper.pdf"),
        ("`report/build/notebooks/03_x.html`", "there is no report/build/notebooks/03_x.html"),
        ("`fusedlib.bench.clock`", "there is no fusedlib.bench.clock"),
        ("`fusedlib.bench.rivals.NOBODY`", "there is no fusedlib.bench.rivals.NOBODY"),
        ("`FUSEDLIB_RES`", "no source reads FUSEDLIB_RES"),
        ("`FUSEDLIB_ROWS=/tmp`", "no source reads FUSEDLIB_ROWS"),
        ("`make reprot`", "make knows no target reprot"),
        ("`make report PROFIL=full`", "make knows no variable PROFIL"),
        ("```sh\nmake report\nmake tset  # tests\n```\n", "make knows no target tset"),
        ("`python -m press.readm --write`", "there is no module press.readm"),
        ("[x](docs/x.md)", "the link to docs/x.md leads nowhere"),
        ("```python\nx = 1\n```\n", "a python block does not name the file it is quoted from"),
        ("```toml\n# notebooks/studies.toml\na\n```\n", "there is no notebooks/studies.toml"),
        (EXCERPT.format("  def eager("), "does not hold what is quoted from it: @rival"),
        (EXCERPT.format("def eagre("), "does not hold what is quoted from it: @rival"),
        (EXCERPT.format("...\ndef no_such("), "does not hold what is quoted from it: def no_such("),
        (EXCERPT.format("...\nclass Workload:"), "does not hold what is quoted from it: class"),
    ],
)
def test_what_does_not_exist_is_found(text, problem):
    assert any(problem in found for found in problems(text)), problems(text)
