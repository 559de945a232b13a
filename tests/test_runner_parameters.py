"""What a notebook is run with: what it declares, what its study has, and what may be set."""

from pathlib import Path
from types import SimpleNamespace

import IPython.core.getipython
import nbformat
import pytest

import tiny_study
from measure import study as studies
from measure.study import SizesError
from press import knobs, rows
from press.running import config, parameters, runner
from press.running.config import ConfigError, Study

NOTEBOOKS = tiny_study.folder()
REAL = [part for part in config.load().studies if part.measure]


def declaring(folder: Path, *lines: str, measure: str = "") -> Study:
    """A notebook of one cell, which declares these lines."""
    path = tiny_study.write(folder / "made.ipynb", "Made", "\n".join(lines))
    return Study("made", "Made", "?", path, {}, measure)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("count=two", "run_ok: count .*'two'"),
        ("sizes=[1, 2]", r"run_ok: sizes .*\[1, 2\]"),
        ("coutn=3", "'coutn' is unknown"),
        ("run_ok.coutn=3", "'coutn' is unknown"),
        ("other.count=3", "'other' is unknown"),
        ("profile=full", "PROFILE=full"),
        ("count", "name=value"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_runs(setting, message):
    parts = config.load(NOTEBOOKS / "run_study.toml").select(["run_ok", "run_fails"])
    with pytest.raises((ConfigError, SizesError), match=message):
        runner.jobs(parts, [setting], "quick")


DECLARED = """hidden: int = 512  # width of the layer [16..4096]
direction: str = "forward"  # redraws all [forward | forward and backward]
warmup: int = 1  # steps [0 | 1 | 5]
models: list[str] = ["64·128·384"]  # to race here
settings: list[str] = ["high"]  # torch's [highest | high]
sizes: dict = {}  # all other sizes"""


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("hidden = 5000000", "hidden must be int in [16..4096], not 5000000"),
        ("hidden = 0", "hidden must be int in [16..4096], not 0"),
        ('direction = "backward"',
         "direction must be forward or forward and backward, not 'backward'"),
        ("warmup = 2", "warmup must be 0, 1 or 5, not 2"),
        ('settings = ["low"]', "settings must be list of highest or high, not ['low']"),
        ('models = "a,b"', "models must be list of str, not 'a,b'; papermill takes it by -y "
                           """'models: ["64·128·384"]'"""),
        ("models = 64", "models must be list of str, not 64; papermill takes it by -y "
                        """'models: ["64·128·384"]'"""),
        ('sizes = "{}"', "sizes must be dict, not '{}'; papermill takes it by -y 'sizes: {}'"),
        ('profile = "full"', "'profile' is no knob of this notebook; known: hidden, direction, "
                             'warmup, models, settings, sizes; write -y "sizes: {profile: full}"'),
        ("hiden = 64", "'hiden' is no knob of this notebook; known: hidden, direction, warmup, "
                       "models, settings, sizes"),
        ("hidden = 4096", None),
    ],
)  # fmt: skip
def test_a_notebook_refuses_a_knob_that_is_set_to_what_its_line_does_not_allow(
    monkeypatch, line, sentence
):
    """Set by papermill's -p, in a cell below the declared ones, as also by hand."""
    ran = ["", DECLARED, f"# Parameters\n{line}\n", "import torch"]
    names: dict = {"In": ran}
    exec("\n".join(ran), names)
    shell = SimpleNamespace(user_ns=names)
    monkeypatch.setattr(IPython.core.getipython, "get_ipython", lambda: shell)
    if sentence is None:
        knobs.check_knobs()
        return
    with pytest.raises(SizesError) as refused:
        knobs.check_knobs()
    assert str(refused.value) == sentence


@pytest.mark.parametrize("part", REAL, ids=lambda part: part.name)
def test_knobs_are_sizes_with_their_defaults(part):
    study, declared = studies.load(part.name), parameters.knobs(part)
    cells = nbformat.read(part.notebook, as_version=4).cells
    [cell] = [cell for cell in cells if parameters.TAG in cell.metadata.get("tags", [])]
    values: dict = {}
    exec(cell.source, values)
    assert values["sizes"] == {} and part.profiles["quick"] == {}
    sizes = study.sized({})
    measured = [name for name in declared if name in study.sizes.model_fields]  # others redraw
    assert {n: values[n] for n in measured} == {n: getattr(sizes, n) for n in measured}


@pytest.mark.parametrize("part", REAL, ids=lambda part: part.name)
@pytest.mark.parametrize("profile", config.PROFILES)
def test_papermill_and_make_record_measure_the_same_cases(part, profile, monkeypatch):
    """The notebook's measuring cell, run after its parameters and what papermill puts below."""
    device = {"quick": "cpu", "full": "cuda"}[profile]
    [job] = runner.jobs([part], [f"device={device}"], profile)
    given = []

    class MeasuredError(Exception):
        """So that nothing is done with the rows."""

    def measure(study, sizes, recorder):
        given.append((study, sizes))
        raise MeasuredError

    monkeypatch.setattr(studies.Study, "measure", measure)
    cells = nbformat.read(part.notebook, as_version=4).cells
    namespace = {"study": studies, "run_here": rows.run_here}
    [declared] = [cell for cell in cells if parameters.TAG in cell.metadata.get("tags", [])]
    exec(declared.source, namespace)
    namespace |= job.parameters
    for cell in cells:
        if cell.cell_type == "code" and "run_here(" in cell.source and "def " not in cell.source:
            with pytest.raises(MeasuredError):
                exec(cell.source, namespace)
    [(study, sizes)] = given
    if profile == "full":
        assert study.cases(sizes) == studies.full_cases(part.name)
    else:
        assert study.cases(sizes) == study.cases(study.sized({"device": "cpu"}))


def test_a_study_s_rows_go_by_its_notebook_s_name():
    assert [studies.load(part.name).name for part in REAL] == [part.name for part in REAL]
