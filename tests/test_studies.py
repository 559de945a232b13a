"""Studies as values: their cases stay what they were, and refused sizes are refused in words."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

from measure import study
from measure.recording import paths, results

GOLDEN = json.loads(Path(__file__).with_name("case_ids.json").read_text())
"""By study and profile, `quick` on a CPU and `full` on a GPU: how many cases there are, and the
sha256 of their sorted ids. Rows that were recorded count by these ids."""


def digest(cases) -> dict[str, int | str]:
    text = "\n".join(sorted(cases))
    return {"cases": len(cases), "sha256": hashlib.sha256(text.encode()).hexdigest()}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_ids_of_all_cases_are_those_that_were_recorded(name):
    one = study.load(name)
    quick = one.cases(one.sized({"device": "cpu"}))
    assert digest(quick) == GOLDEN[name]["quick"]
    assert digest(study.full_cases(name)) == GOLDEN[name]["full"]


UNCHECKED: dict[str, set[str]] = {}
"""Sizes whose entries no study looks at before it measures."""


@pytest.mark.parametrize("name", study.names())
def test_every_size_of_a_study_refuses_a_name_that_nobody_knows_and_a_number_below_zero(name):
    one = study.load(name)
    for size in {*one.sizes.model_fields} - UNCHECKED.get(name, set()):
        allowed = study.kind_in_words(one.sizes.kinds()[size])
        number = [-1] if "int" in allowed else [-1.0] if "float" in allowed else []
        for value in ("nobody", *number):
            given = [value] if allowed.startswith("list") else value
            with pytest.raises(study.SizesError, match=f"^{name}: ") as refused:
                one.cases(one.sized({"device": "cpu", size: given}))
            assert str(value) in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="its cases would be measured")
@pytest.mark.parametrize("name", study.names())
def test_where_there_is_no_gpu_every_experiment_of_one_has_a_row_with_a_reason_and_no_time(
    name, tmp_path
):
    one = study.load(name)
    sizes = one.sized({"device": "cuda"})
    own = results.Recorder(name, "quick", False, tmp_path)
    for experiment, cases in one.plan(sizes):
        run = experiment.run
        if isinstance(run, study.PerRun):
            run = run.make(sizes)
        first = next(case for case in cases if case["device"] != "cpu")
        own.sweep([first], run) if callable(run) else own.race(run, [first])
    rows = results.read_rows(own.path)
    assert len(rows) == len(one.plan(sizes))
    for row in rows:
        assert row["status"] in ("unavailable", "failed") and row["reason"]
        assert not [figure for figure in row if figure.endswith("_ms")]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "5", 5),
        (float, "5", 5.0),
        (float, "1e-3", 0.001),
        (bool, "true", True),
        (bool, "False", False),
        (str, "5", "5"),
        (str, "a,b", "a,b"),
        (str, "'quoted'", "quoted"),
        (str, "", ""),
        (list[int], "[1, 2]", [1, 2]),
        (list[int], "1,2", [1, 2]),
        (list[int], "7", [7]),
        (list[float], "1,2.5", [1.0, 2.5]),
        (list[str], "small,2.7b", ["small", "2.7b"]),
        (list[str], "small", ["small"]),
        (list[str], '["a b", "c"]', ["a b", "c"]),
        (list[str], "'a b', c", ["a b", "c"]),
        (list[study.Positive], "[]", []),
    ],
)
def test_a_text_is_read_as_the_type_that_is_meant(kind, text, value):
    parsed = study.parsed("it", text, kind)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (int, "two", "'two'"),
        (int, "2.5", "2.5"),
        (int, "true", "'true'"),
        (study.Positive, "0", "0"),
        (float, "nan", "'nan'"),
        (list[str], "[1, 2]", r"\[1, 2\]"),
        (list[int], "1,x", r"\[1, 'x'\]"),
        (Literal["a", "b", "c"], "d", "a, b or c, not 'd'"),
    ],
)
def test_a_text_that_is_no_value_is_refused_with_it(kind, text, message):
    with pytest.raises(study.SizesError, match=f"not {message}$|{message}$"):
        study.parsed("it", text, kind)


LISTED = """
import json, sys
from measure import study
print(json.dumps([*study.full_cases(sys.argv[1])]))
"""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) for name in study.names()],
)
@pytest.mark.slow
def test_a_study_s_cases_do_not_depend_on_what_other_studies_have_imported(name):
    """Who computes an MLP is registered where it is imported: study 06 once lost Liger so."""
    for other in study.names():
        study.full_cases(other)
    here = study.full_cases(name)
    command = [sys.executable, "-c", LISTED, name]
    alone = subprocess.run(command, check=True, capture_output=True, text=True, cwd=paths.ROOT)
    assert json.loads(alone.stdout.splitlines()[-1]) == [*here]


class Tiny(study.Sizes):
    sizes: list[int] = []  # noqa: RUF012 (pydantic copies it)


def tiny(measure) -> study.Study:
    """Two experiments: one that is measured by the function of its sizes, and one that is not."""
    return study.Study(
        "tiny", Tiny,
        [
            study.Experiment(
                "first", study.PerRun(lambda sizes: lambda case: measure(case, sizes.sizes)),
                lambda sizes: [{"size": size, "at": sizes.device} for size in sizes.sizes],
            ),
            study.Experiment("second", lambda case: measure(case, None), lambda sizes: [{"n": 9}]),
        ],
    )  # fmt: skip


def test_experiments_are_measured_in_their_order_and_once(tmp_path):
    measured = []

    def measure(case, sizes):
        measured.append((case.get("size") or case["n"], sizes))
        return {"median_ms": 1.0}

    one = tiny(measure)
    sizes = one.sized({"device": "cpu", "sizes": [3, 2]})
    for _ in range(2):
        own = one.measure(sizes, results.Recorder("tiny", "quick", False, tmp_path))
        assert measured == [(3, [3, 2]), (2, [3, 2]), (9, None)]
        assert [row["case"] for row in results.read_rows(own.path)] == [*one.cases(sizes)]


def test_only_the_cases_that_are_asked_for_are_measured_until_the_time_is_over(tmp_path):
    measured = []
    one = tiny(lambda case, _: measured.append(case) or {})
    sizes = one.sized({"device": "cpu", "sizes": [3, 2]})
    first, second, third = one.cases(sizes)
    for only, until in (({second, third}, 1), ({second, third}, 1e12), (None, 1e12)):
        one.measure(
            sizes, results.Recorder("tiny", "quick", False, tmp_path, only=only, until=until)
        )
    cases = one.cases(sizes)
    assert measured == [cases[second], cases[third], cases[first]]


def test_while_rows_are_replayed_nothing_is_measured(tmp_path):
    one = tiny(lambda case, _: pytest.fail("it is measured"))
    with results.replaying():
        own = one.measure(one.sized({}), results.Recorder("tiny", "quick", False, tmp_path))
    assert not own.path.exists()
