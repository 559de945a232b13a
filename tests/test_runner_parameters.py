"""What a notebook is run with: what it declares, what its study has, and what may be set."""

import nbformat
import pytest

import tiny_study
from measure import study as studies
from measure.study import SizesError
from press import rows
from press.running import config, parameters, runner
from press.running.config import ConfigError

NOTEBOOKS = tiny_study.folder()
REAL = config.load().studies


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


def test_a_setting_reaches_every_size_and_every_knob():
    [kernels] = config.load().select(["kernels"])
    settings = ["repetitions=7", "sweep_widths=64", "03_kernels.load_seconds=2"]
    [job] = runner.jobs([kernels], settings, "quick")
    assert job.parameters == {
        "repetitions": 7, "sizes": {"profile": "quick", "sweep_widths": [64], "load_seconds": 2.0}
    }  # fmt: skip
    [job] = runner.jobs([kernels], [], "full")
    table = job.parameters["sizes"]
    assert table["profile"] == "full" and table["tuned"] == kernels.profiles["full"]["tuned"]
    assert not {*table} & {*parameters.knobs(kernels)}


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
