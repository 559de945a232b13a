"""The published figures: transcribed in full, to the digit, and with their source."""

import csv
import hashlib
import re
import tomllib
from decimal import Decimal

import pandas as pd
import pytest

from press import factors, published, run
from study import paths

SOURCES = tomllib.loads((paths.PUBLISHED / "sources.toml").read_text(encoding="utf-8"))
SEEDS = paths.ROOT.parent / "shared" / "seeds"

# Rows of each file: (tables) x (sizes or cases) x (directions, implementations or quantities).
ROWS = {
    "accumulation": 4,
    "attention": 2 * 4 * 3,
    "attention_memory": 2 * 4 * 5,
    "compilers_history": 195,
    "end_to_end": 12 * 3 + 6 * 5 * 3 + 6 * 5,
    "litgpt": 3 + 3 + 3 + 6 + 6,
    "llama": 24 + 17,
    "mnist": 3 * 4,
    "swiglu_memory": 6 * 2 + 7 * 2 + 2,
    "swiglu_ratios": 7 + 7 + 6,
    "swiglu_test": 2,
    "swiglu_times": 3 * 6 * 2,
    "warmup": 3 * 5 * 3 + 6 * 5,
}
# Columns with figures; those in a file of `SECONDS` were published in seconds.
FIGURES = re.compile(
    r"_ms$|_s$|_mb$|_gb$|_bytes$|_per_s$|^value$|_loss$|^liger_over_fused$|^correct$"
)
SECONDS = ("attention", "end_to_end")
FILES = [name for name in ROWS if name != "warmup"]


def cells(name: str) -> list[dict[str, str]]:
    with (paths.PUBLISHED / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ROWS)
def test_table_has_all_its_rows_once_and_a_known_source(name):
    frame = published.load(name)
    assert len(frame) == ROWS[name]
    figures = [column for column in frame if FIGURES.search(column)]
    assert figures
    assert not frame.drop(columns=figures).duplicated().any()
    assert set(frame["source"]) <= set(SOURCES)


VALUES = [
    ("warmup", "source == '001' and model == 'small' and warmup_steps == 0 "
     "and direction == 'backward'", "mean_ms", -2.74821),
    ("warmup", "source == '004' and model == '2.7b' and warmup_steps == 5 "
     "and direction == 'forward+backward'", "mean_ms", 556.8876736913808),
    ("end_to_end", "table == 'Compiled' and model == 'medium' and direction == 'forward'",
     "std_ms", 79.2748),
    ("end_to_end", "backend == 'mps' and compile == True and model == 'large' "
     "and direction == 'forward+backward'", "mean_ms", 4245.11),
    ("attention", "compile and context_length == 32 and d_model == 1024 "
     "and direction == 'backward'", "mean_ms", 11.0278),
    ("accumulation", "label == 'float16'", "value", 9.9531),
    ("swiglu_times", "implementation == 'fused' and weight_gradient and batch_size == 1024 "
     "and d_model == 4096", "time_ms", 13.51),
    ("mnist", "table == 'Fused no weight-grad' and epoch == 4", "train_ms", 14055.5),
    ("swiglu_memory", "implementation == 'liger' and num_layers == 256", "peak_mb", 17992.3),
    ("swiglu_ratios", "quantity == 'backward time' and d_model == 2048", "liger_over_fused", 3.34),
    ("litgpt", "shapes == 'dynamic' and method == 'thunder'", "time_s", 1600),
]  # fmt: skip


@pytest.mark.parametrize(("name", "where", "column", "value"), VALUES)
def test_value_as_published(name, where, column, value):
    frame = published.load(name)
    assert frame.query(where)[column].tolist() == [value]


@pytest.mark.parametrize("name", FILES)
def test_every_figure_stands_in_its_source(name):
    if not SEEDS.is_dir():
        pytest.skip(f"the sources are not at {SEEDS}; they are no part of the repository")
    text = {key: (SEEDS / entry["file"]).read_text() for key, entry in SOURCES.items()}
    numbers = {
        key: {Decimal(n) for n in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?", content)}
        for key, content in text.items()
    }
    checked = 0
    for row in cells(name):
        for column, cell in row.items():
            if FIGURES.search(column) and cell:
                figure = Decimal(cell) / (1000 if name in SECONDS else 1)
                assert figure in numbers[row["source"]], (row, column)
                checked += 1
    assert checked >= ROWS[name]


@pytest.mark.parametrize("key", sorted(SOURCES))
def test_source_says_what_it_is(key):
    entry = SOURCES[key]
    assert all(entry[field] for field in ("title", "what", "device", "file"))
    assert re.fullmatch(r"[0-9a-f]{64}", entry["sha256"])
    seed = SEEDS / entry["file"]
    if seed.is_file():
        assert hashlib.sha256(seed.read_bytes()).hexdigest() == entry["sha256"]
        words = " ".join(seed.read_text().split())
        assert entry["title"] in words
        assert all(quote in words for quote in entry.get("quotes", {}).values())


def test_a_missing_statement_is_missing_and_not_a_guess():
    frame = published.load("end_to_end")
    assert frame.query("source == '004'")["compile"].isna().all()
    assert set(frame.query("source == '004'")["device"]) == {"not stated"}
    main = frame[frame["table"] == "End to End Benchmarks (RTX PRO 6000 WK)"]
    assert main["warmup_steps"].isna().all()


@pytest.mark.parametrize("name", ROWS)
def test_a_stated_figure_has_every_digit_of_its_file(name):
    file = "end_to_end" if name == "warmup" else name
    there = {cell for row in cells(file) for cell in row.values()}
    figures = published.stated(name)[[*published.load(name).select_dtypes("float")]]
    assert {*figures.stack().dropna()} <= there
    assert figures.notna().equals(published.load(name)[figures.columns].notna())


STATED = pd.DataFrame({"width": [1, 1, 2, 2], "who": ["a", "b"] * 2,
                       "ms": ["0.10", "0.20", "0.30", "0.40"]})  # fmt: skip
OURS = pd.DataFrame({"machine": ["H200", "H100", "H200", "H200"], "width": [1, 1, 1, 1],
                     "who": ["a", "a", "b", "b"], "ms": [1.0, 2.0, 3.0, 5.0]})  # fmt: skip


def test_ours_stands_beside_the_published_with_a_reason_for_what_is_missing():
    table = published.beside(STATED, OURS, ["width"], "who", "ms", "2", {"width == 2": "too wide"})
    assert table["a"].loc[1].to_dict() == {"published": "0.10", "H200": "1.0", "H100": "2.0"}
    assert table["a"].loc[2].dropna().to_dict() == {"published": "0.30"}
    assert table["b", "H200"][1] == "4.0", "the median of several"
    assert table["", "why ours is missing"].tolist() == ["", "too wide"]


def test_a_figure_without_reason_and_a_reason_without_figure_are_refused():
    with pytest.raises(ValueError, match="without a reason, at 2, a"):
        published.beside(STATED, OURS, ["width"], "who", "ms")
    why = {"width == 2": "too wide", "width == 1": "too narrow"}
    with pytest.raises(ValueError, match="nothing is missing where 'width == 1'"):
        published.beside(STATED, OURS, ["width"], "who", "ms", "2", why)
    with pytest.raises(ValueError, match="one place"):
        published.beside(STATED.assign(width=1), OURS, ["width"], "who", "ms")


def test_the_log_s_largest_factor_is_where_the_paper_says():
    grid = published.load("swiglu_times").query("table != 'mlp_backward_compare_WF.py'")
    ms = grid.pivot_table("time_ms", ["direction", "batch_size", "d_model"], "implementation")
    over = ms["liger"] / ms["fused"]
    assert 3.5 < over.max() < 3.6
    words = (run.SECTIONS / "2_skipped_work.ipynb").read_text(encoding="utf-8")
    assert "which it beats by up to three and a half times" in words


def test_what_compares_mostly_carries_over_or_grows_and_each_verdict_is_the_rule_s():
    verdicts = factors.factors()["verdict"].value_counts()
    compared = verdicts.drop(["not comparable", "wrong result"])
    assert compared[["reproduced", "larger here"]].sum() > 0.6 * compared.sum()
    for ours, verdict in (
        ([2.0], "reproduced"), ([1.5, 3.0], "reproduced"), ([1.4], "smaller here"),
        ([3.1], "larger here"), ([1.4, 2.0], "varies"), ([1.4, 3.1], "varies"),
        ([], "not comparable"),
    ):  # fmt: skip
        assert factors.verdict(2.0, pd.Series(ours, dtype=float), "") == verdict
    assert factors.verdict(1.01, pd.Series([0.97]), "") == "reproduced", "no gain on either side"
    assert factors.verdict(2.0, pd.Series([2.0]), "a mask") == "not comparable"
    assert factors.verdict(2.0, pd.Series([2.0]), factors.WRONG) == "wrong result"
