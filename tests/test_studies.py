"""Studies as values: their cases stay what they were, and refused sizes are refused in words."""

import hashlib
import json
from pathlib import Path

import pytest

from measure import study

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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"repetitons": 3}, "03_kernels: 'repetitons' is unknown; known: device, rivals, models"),
        ({"repetitions": 1}, r"03_kernels: repetitions must be int in \[2..1000\], not 1$"),
        ({"repetitions": "5"}, r"03_kernels: repetitions must be int in \[2..1000\], not '5'$"),
        ({"repetitions": True}, "repetitions must be int in .*, not True$"),
        ({"sweep_widths": [64, 0]}, r"sweep_widths must be list of int in \[1..\], not \[64, 0\]$"),
        ({"sweep_widths": 64}, "sweep_widths must be list of int in .*, not 64$"),
        ({"load_seconds": float("nan")}, r"load_seconds must be float in \[0.01..60\], not nan"),
        ({"device": "mps"}, "device must be auto, cuda or cpu, not 'mps'$"),
        ({"half_dtypes": ["fp8"]}, r"must be list of bfloat16 or float16, not \['fp8'\]$"),
    ],
)
def test_a_wrong_size_is_refused_with_what_is_allowed(values, message):
    with pytest.raises(study.SizesError, match=message):
        study.load("kernels").sized(values)


def test_sizes_that_name_nobody_known_are_refused_with_those_that_are():
    one = study.load("kernels")
    with pytest.raises(study.SizesError, match="03_kernels: unknown rival 'ligr' in swiglu; known"):
        one.cases(one.sized({"rivals": ["ligr"]}))


def test_whole_numbers_are_floats_where_floats_are_meant():
    assert study.load("kernels").sized({"load_seconds": 2}).load_seconds == 2.0


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
    parsed = study.parsed(text, kind)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (("repetitions", "two"), r"03_kernels: repetitions must be int in \[2..1000\], not 'two'"),
        (("repetitions", "2.5"), r"repetitions must be int in \[2..1000\], not '2.5'"),
        (("repetitions", "1"), r"repetitions must be int in \[2..1000\], not '1'"),
        (("load_seconds", "nan"), r"load_seconds must be float in \[0.01..60\], not 'nan'"),
        (("rivals", "[1, 2]"), r"rivals must be list of str, not '\[1, 2\]'"),
        (("half_dtypes", "fp8"), "half_dtypes must be list of bfloat16 or float16, not 'fp8'"),
        (("repetitons", "3"), "03_kernels: 'repetitons' is unknown; known: device, rivals"),
    ],
)
def test_a_text_that_is_no_value_is_refused_in_the_same_words(setting, message):
    with pytest.raises(study.SizesError, match=message):
        study.load("03_kernels").parsed(*setting)


def test_a_study_is_loaded_by_its_name_or_its_part_and_another_is_refused():
    assert study.load("kernels") is study.load("03_kernels")
    assert study.names() == sorted(study.names(), key=study.names().index)
    with pytest.raises(ValueError, match="study 'kernles' is unknown; known: 05_anatomy, 03_kern"):
        study.load("kernles")
