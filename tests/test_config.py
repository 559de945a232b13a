"""study.toml: what it may hold, and what is said when it holds something else."""

import shutil

import nbformat
import pytest

import tiny_study
from press.running import config
from press.running.config import ConfigError

NOTEBOOKS = tiny_study.folder()

GOOD = """
[[study]]
name = "run_ok"
title = "Works"
question = "Does it?"
quick = {count = 3}
full = {count = 5}

[[study]]
name = "run_fails"
title = "Fails"
question = "Does it?"
quick = {}
full = {}
"""


@pytest.fixture
def load(tmp_path):
    for name in ("run_ok", "run_fails"):
        shutil.copy(NOTEBOOKS / f"{name}.ipynb", tmp_path)

    def read(text: str) -> config.Config:
        (tmp_path / "study.toml").write_text(text)
        return config.load(tmp_path / "study.toml")

    return read


@pytest.mark.parametrize(
    ("only", "names"), [(["ok"], ["run_ok"]), (["run"], ["run_ok", "run_fails"])]
)
def test_select_takes_the_part_of_a_name_before_or_after_its_first_underscore(load, only, names):
    assert [study.name for study in load(GOOD).select(only)] == names


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title =", "titel =", "'titel'"),
        ("full = {count = 5}", "", "full"),
        ("quick = {}", "quick = 3", "'quick': 3"),
        ('name = "run_ok"', 'name = "run_gone"', "run_gone.ipynb"),
        ('name = "run_fails"', 'name = "run_ok"', "'run_ok', 'run_ok'"),
        ("[[study]]", "[[study", r"study.toml .* \(at line 2"),
        (GOOD, "", r"\[\[study\]\]"),
        (GOOD, "fram = 1\n" + GOOD, "fram"),
    ],
)
def test_a_faulty_file_is_refused_with_the_reason(load, old, new, message):
    with pytest.raises(ConfigError, match=message):
        load(GOOD.replace(old, new))


def test_a_study_reads_its_own_rows_and_those_of_the_studies_that_its_cells_name(load, tmp_path):
    own = {study.name: study.reads for study in load(GOOD).studies}
    assert own == {"run_ok": {"run_ok"}, "run_fails": {"run_fails"}}
    naming = nbformat.read(tmp_path / "run_ok.ipynb", as_version=4)
    naming.cells.append(nbformat.v4.new_code_cell('study("run_fails")'))
    nbformat.write(naming, tmp_path / "run_ok.ipynb")
    read = {study.name: study.reads for study in load(GOOD).studies}
    assert read == own | {"run_ok": {"run_ok", "run_fails"}}
    assert config.load().frame.reads is None


@pytest.mark.parametrize(
    ("device", "memory_gib", "profile"),
    [
        ("cpu", None, "quick"),
        ("cuda", None, "quick"),
        ("cuda", 74.4, "quick"),
        # What NVML says of cards sold as 80 GB.
        ("cuda", 79.6, "full"),
        ("cuda", 139.8, "full"),
    ],
)
def test_auto_takes_full_on_a_gpu_of_80_gb(device, memory_gib, profile):
    chosen, why = config.fitting_profile(device, "card", memory_gib)
    assert chosen == profile
    assert why
