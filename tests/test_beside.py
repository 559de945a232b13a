"""What other machines show stands beside the leading one's, and nothing else changes."""

import copy
import io
import json

import nbformat
import pandas as pd
import pytest

from measure.recording import results
from press import beside, display, plots, replay
from press.display import TABLE_MIME
from report_sample import outputs_of

H200, H100 = "nvidia-h200", "nvidia-h100"


def cell(at: str, *outputs):
    return nbformat.v4.new_code_cell("x", outputs=list(outputs), id=at)


def notebook(*cells):
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# T", id="title"), *cells]
    )


def table(frame: pd.DataFrame, name: str = "times", **options):
    [output] = outputs_of(lambda: display.table(frame, "C, *late*.", name, **options))
    return output


def prose(text: str):
    [output] = outputs_of(lambda: display.prose(text))
    return output


def figure(times: list[float], name: str = "curve"):
    frame = pd.DataFrame({"T": [1, 2], "ms": times, "by": "fused"})
    [output] = outputs_of(
        lambda: display.figure(plots.bars(frame, "ms", "T", "by"), "C", name=name)
    )
    return output


def put(own, **others):
    """The leader's notebook, one cell of outputs, after others' of the same kind came beside it."""
    shown = notebook(cell("a", *own))
    views = {
        name.replace("_", "-"): notebook(cell("a", *outputs)) for name, outputs in others.items()
    }
    beside.put_beside(shown, H200, views)
    nbformat.validate(shown)
    return shown.cells[1].outputs


OURS = pd.DataFrame({"who": ["fused", "liger"], "ms": ["1.2", "3.4"], "TFLOP/s": ["5", "6"]})


# --- tables --------------------------------------------------------------------------------------


def test_a_table_has_the_rows_of_each_machine_under_its_name():
    theirs = OURS.assign(ms=["2.2", "4.4"])
    [output] = put([table(OURS)], nvidia_h100=[table(theirs)])
    content = output["data"][TABLE_MIME]
    assert content["rows"] == [
        ["H200", "", ""], ["fused", "1.2", "5"], ["liger", "3.4", "6"],
        ["H100", "", ""], ["fused", "2.2", "5"], ["liger", "4.4", "6"],
    ]  # fmt: skip
    assert content["columns"] == table(OURS)["data"][TABLE_MIME]["columns"]
    assert (content["caption"], content["name"]) == ("C, *late*.", "times")
    page = output["data"]["text/html"]
    assert page.index(">H200<") < page.index(">1.2<") < page.index(">H100<") < page.index(">2.2<")
    assert "H100" in output["data"]["text/plain"]


def test_a_table_without_named_rows_gets_a_column_that_names_the_machine_on_the_left():
    frame = OURS[["ms", "TFLOP/s"]].astype(float)
    assert table(frame)["data"][TABLE_MIME]["align"][0] == "right"
    [output] = put([table(frame)], nvidia_h100=[table(frame + 1)])
    content = output["data"][TABLE_MIME]
    assert content["stub"] == 1 and content["align"] == ["left", "right"]
    indexed = OURS.set_index(["who", "ms"])
    [output] = put([table(indexed)], nvidia_h100=[table(indexed + "0")])
    assert output["data"][TABLE_MIME]["stub"] == 2


def test_a_column_that_one_lacks_has_dashes_and_columns_go_by_their_name():
    theirs = pd.DataFrame({"TFLOP/s": ["7"], "who": ["fused"]})
    [output] = put([table(OURS)], nvidia_h100=[table(theirs)])
    assert output["data"][TABLE_MIME]["rows"][3:] == [["H100", "", ""], ["fused", "—", "7"]]


def test_a_column_that_the_leader_lacks_is_shown_too():
    theirs = OURS.assign(QuACK=["8", "9"])
    [output] = put([table(OURS)], nvidia_h100=[table(theirs)])
    assert "8" in str(output["data"][TABLE_MIME]["rows"])


def test_a_table_that_the_leader_alone_lacks_is_the_others_whole():
    [output] = put([table(OURS.iloc[:0])], nvidia_h100=[table(OURS)])
    shown = output["data"][TABLE_MIME]
    assert ["fused", "1.2", "5"] in shown["rows"] and ["who"] in [list(c) for c in shown["columns"]]


def test_two_header_levels_go_by_both():
    columns = pd.MultiIndex.from_tuples([("fp32", "ms"), ("bf16", "ms")])
    ours = pd.DataFrame([["1", "2"]], index=pd.Index(["a"], name="who"), columns=columns)
    theirs = ours[[("bf16", "ms")]] + "0"
    [output] = put([table(ours)], nvidia_h100=[table(theirs)])
    assert output["data"][TABLE_MIME]["rows"][-1] == ["a", "—", "20"]


@pytest.mark.parametrize("theirs", [OURS, OURS.iloc[:0]], ids=["the same", "nothing"])
def test_the_same_or_nothing_adds_nothing(theirs):
    own = table(OURS)
    before = copy.deepcopy(own)
    [output] = put([own], nvidia_h100=[table(theirs)])
    assert output == before


def test_of_three_machines_those_that_differ_stand_below_in_their_order():
    [output] = put(
        [table(OURS)], nvidia_h100=[table(OURS)], nvidia_b200=[table(OURS.assign(ms="9"))],
        my_gpu=[table(OURS.assign(ms="8"))],
    )  # fmt: skip
    heads = [row[0] for row in output["data"][TABLE_MIME]["rows"] if not any(row[1:])]
    assert heads == ["H200", "B200", "my-gpu"]


def test_tables_go_by_name_and_not_by_place():
    one, two = table(OURS, "one"), table(OURS, "two")
    other = table(OURS.assign(ms="9"), "two")
    first, second = put([one, two], nvidia_h100=[other])
    assert first == table(OURS, "one")
    assert "H100" in second["data"]["text/html"]


# --- captions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "other", "both"),
    [
        ("Times in ms.", "Times in ms.", "Times in ms."),
        ("Times on the H200, in ms.", "Times on the H100, in ms.",
         "Times on the H200 and H100, in ms."),
        ("Of 3 runs a line.", "Of 2 runs a line.", "Of 3 and 2 runs a line."),
    ],
)  # fmt: skip
def test_captions_are_one_that_says_what_each_does(own, other, both):
    pair = []
    for caption, ms in ((own, "1"), (other, "2")):
        pair += [outputs_of(lambda c=caption, t=ms: display.table(OURS.assign(ms=t), c, "t"))]
    [output] = put(pair[0], nvidia_h100=pair[1])
    assert output["data"][TABLE_MIME]["caption"] == both
    assert both in output["data"]["text/html"]
    drawn = []
    for caption, times in ((own, [1.0, 2.0]), (other, [3.0, 4.0])):
        drawn.append(figure(times))
        drawn[-1]["metadata"]["fusedlib"]["caption"] = caption
        page = drawn[-1]["data"]["text/html"].replace("<figcaption>C<", f"<figcaption>{caption}<")
        drawn[-1]["data"]["text/html"] = page
    [output] = put(drawn[:1], nvidia_h100=drawn[1:])
    assert output["metadata"]["fusedlib"]["caption"] == both
    assert f"<figcaption>{both}</figcaption>" in output["data"]["text/html"]


# --- figures -------------------------------------------------------------------------------------


def test_drawings_stand_below_each_other_with_the_data_of_both():
    own, other = figure([1.0, 2.0]), figure([3.0, 4.0])
    old = own["data"]["image/svg+xml"]
    [output] = put([own], nvidia_h100=[other])
    drawn, page = output["data"]["image/svg+xml"], output["data"]["text/html"]
    assert drawn.index(">H200</text>") < drawn.index(">H100</text>")
    assert drawn in page and old not in page and page.count("<figcaption>") == 1
    meaning = output["metadata"]["fusedlib"]
    assert meaning["alt"] == output["data"]["text/plain"]
    assert meaning["alt"].startswith("H200: ") and " H100: " in meaning["alt"]
    assert (meaning["kind"], meaning["name"], meaning["caption"]) == ("figure", "curve", "C")
    data = pd.read_csv(io.StringIO(meaning["data"]))
    assert data.groupby("machine")["ms"].apply(list).to_dict() == {
        H100: [3.0, 4.0], H200: [1.0, 2.0]
    }  # fmt: skip


@pytest.mark.parametrize("data", ["\n", "ms\n"])
def test_a_drawing_of_no_rows_is_left_out(data):
    """Of a recording of other cases: pandas reads no columns there, or no row."""
    own, other = figure([1.0, 2.0]), figure([3.0, 4.0])
    other["metadata"]["fusedlib"]["data"] = data
    before = copy.deepcopy(own)
    [output] = put([own], nvidia_h100=[other])
    assert output == before
    empty = copy.deepcopy(own)
    empty["metadata"]["fusedlib"]["data"] = data
    [output] = put([empty], nvidia_h100=[figure([3.0, 4.0])])
    assert "nvidia-h100" in output["metadata"]["fusedlib"]["data"]


def test_a_drawing_of_the_same_data_stays_as_it_is():
    own = figure([1.0, 2.0])
    before = copy.deepcopy(own)
    [output] = put([own], nvidia_h100=[figure([1.0, 2.0])])
    assert output == before


# --- paragraphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ("It takes 3.1 ms of 5.", "It takes 4.2 ms of 5.", "It takes 3.1 (H100 4.2) ms of 5."),
        ("1.9× as fast, 12 % more.", "2.1× as fast, 7 % more.",
         "1.9× (H100 2.1×) as fast, 12 % (H100 7 %) more."),
        ("At 16,384 tokens 1.1–1.3×.", "At 16,384 tokens 1.2–1.4×.",
         "At 16,384 tokens 1.1–1.3× (H100 1.2–1.4×)."),
        ("It is so in 3 of 4.", "It is so in 3 of 4.", "It is so in 3 of 4."),
        ("fused is fastest, 3 ms.", "Liger is fastest, 2 ms.",
         "fused is fastest, 3 ms.\n\n*On the H100:* Liger is fastest, 2 ms."),
        ("None.", "", "None."),
    ],
)  # fmt: skip
def test_a_paragraph_has_the_others_numbers_or_words(own, other, expected):
    [output] = put([prose(own)], nvidia_h100=[prose(other)])
    assert output["data"]["text/markdown"].replace("\N{NO-BREAK SPACE}", " ") == expected
    assert output["data"]["text/plain"] == output["data"]["text/markdown"]


def test_a_name_that_ends_in_digits_is_no_number():
    [output] = put(
        [prose("Of the H200's 132 units 3 wait.")],
        nvidia_h100=[prose("Of the H100's 132 units 4 wait.")],
    )
    text = output["data"]["text/markdown"].replace("\N{NO-BREAK SPACE}", " ")
    assert "H200 (H100 100)" not in text


def test_paragraphs_of_three_machines():
    [output] = put([prose("1 of 9")], nvidia_h100=[prose("2 of 9")], my_gpu=[prose("3 of 9")])
    text = output["data"]["text/markdown"].replace("\N{NO-BREAK SPACE}", " ")
    assert text == "1 (H100 2, my-gpu 3) of 9"


def test_cells_go_by_their_id_for_an_executed_copy_has_one_more():
    injected = nbformat.v4.new_code_cell("profile = 'full'", id="injected")
    shown = notebook(injected, cell("a", prose("It is 1.")), cell("b", prose("It is 5.")))
    view = notebook(
        cell("a", prose("It is 2.")), cell("b", prose("It is 5.")), cell("c", prose("9"))
    )
    beside.put_beside(shown, H200, {H100: view})
    texts = [c.outputs[0]["data"]["text/markdown"] for c in shown.cells if c.get("outputs")]
    assert [t.replace("\N{NO-BREAK SPACE}", " ") for t in texts] == [
        "It is 1 (H100 2).",
        "It is 5.",
    ]


def test_what_is_not_of_a_kind_stays_as_it_is():
    printed = nbformat.v4.new_output("stream", name="stdout", text="1 ms")
    own = outputs_of(
        lambda: display.claim(
            "It is 1.", "", "c", headline="Found", study="x", numbers={}, standings=[]
        )
    )
    others = outputs_of(
        lambda: display.claim(
            "It is 2.", "", "c", headline="Found", study="x", numbers={}, standings=[]
        )
    )
    before = copy.deepcopy([printed, *own, prose("3")])
    outputs = put([printed, *own, prose("3")], nvidia_h100=[*others, figure([1.0, 2.0])])
    assert outputs == before, "a claim has the others' numbers already; prose is no figure"


# --- which machines ------------------------------------------------------------------------------


def put_rows(folder, machine: str, study: str, profile: str, count: int, kind: str = "cuda"):
    at = folder / machine / "day"
    at.mkdir(parents=True, exist_ok=True)
    run = {"device_type": kind, "began": "2026-11-25", "commit": "c" * 40}
    described = {"schema": 2, "profile": profile, "runs": [run]}
    (at / results.DESCRIPTION).write_text(json.dumps(described))
    rows = [{"case": f"{n}", "status": "ok", "n": n, "ms": len(machine)} for n in range(count)]
    (at / f"{study}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Two cards, a toy run, and a card that has another study alone."""
    monkeypatch.setattr(results.paths, "RECORDED", tmp_path)
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path))
    put_rows(tmp_path, H100, "01_x", "full", 2)
    put_rows(tmp_path, H200, "01_x", "full", 3)
    put_rows(tmp_path, "toy", "01_x", "quick", 9, "cpu")
    put_rows(tmp_path, "other", "02_y", "full", 1)
    return tmp_path


def test_the_leader_comes_first_then_those_with_rows_of_the_full_profile(rows, monkeypatch):
    assert beside.shown_machines(["01_x"]) == [H200, H100]
    assert beside.shown_machines(["02_y"]) == ["other"]
    assert beside.shown_machines(["01_x", "02_y"]) == [H200, H100, "other"]
    monkeypatch.setenv(results.LEADING, H100)
    assert beside.shown_machines(["01_x"]) == [H100, H200]


SHOW = """
from measure.recording import results
from press import display
from press.analysis import leading

rows = results.Recorder("01_x", profile="full").rows()
mine = rows[rows["machine"] == leading(rows)]
display.prose(f"It has {len(mine)} rows.")
display.table(mine[["n", "ms"]].astype(str), "Rows.", "rows")
"""
ASKS_FOR_ALL = """
display.prose(f"The third is {mine['ms'].iloc[2]:g}.")
third = mine["ms"].iloc[2]
"""
NEEDS_THE_THIRD = "display.prose(f'It is {third:g}, of {len(mine)}.')"


def test_a_notebook_is_analysed_once_for_each_machine(rows, tmp_path, monkeypatch):
    cells = [
        nbformat.v4.new_code_cell("import json"),
        nbformat.v4.new_code_cell(SHOW, id="show"),
        nbformat.v4.new_code_cell(ASKS_FOR_ALL, id="all"),
        nbformat.v4.new_code_cell(NEEDS_THE_THIRD, id="third"),
        nbformat.v4.new_code_cell(SHOW.replace('"rows")', '"again")'), id="again"),
    ]
    path = tmp_path / "n.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    executed = replay.analysis_of(path).notebook
    third, following = (executed.cells[at].outputs for at in (2, 3))
    replay.show_others(executed, path, ["01_x"])
    assert executed.cells[2].outputs == third and executed.cells[3].outputs == following
    assert "H100" in executed.cells[4].outputs[0]["data"]["text/markdown"]
    monkeypatch.setenv(results.LEADING, H100)
    with pytest.raises(IndexError):  # of the leading machine's rows a cell's fault is one
        replay.analysis_of(path)
    paragraph, shown = executed.cells[1].outputs
    text = paragraph["data"]["text/markdown"].replace("\N{NO-BREAK SPACE}", " ")
    assert text == "It has 3 (H100 2) rows."
    assert [row[0] for row in shown["data"][TABLE_MIME]["rows"]] == [
        "H200", "0", "1", "2", "H100", "0", "1"
    ]  # fmt: skip
