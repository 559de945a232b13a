"""Cases are products of axes, with words for each, and wrong ones are refused in words."""

import pytest

from fusedlib.bench import cases
from fusedlib.bench.cases import differing, grid, label, require_known, require_least


def test_the_last_axis_varies_fastest_and_mappings_give_their_own_fields():
    shapes = [{"rows": 1, "columns": 2}, {"rows": 3, "columns": 4}]
    actual = grid({"device": "cpu"}, shape=shapes, provider=("eager", "fused"))
    assert [(c["rows"], c["columns"], c["provider"]) for c in actual] == [
        (1, 2, "eager"), (1, 2, "fused"), (3, 4, "eager"), (3, 4, "fused"),
    ]  # fmt: skip
    assert all(set(c) == {"device", "rows", "columns", "provider"} for c in actual)
    assert grid({"device": "cpu"}) == [{"device": "cpu"}]
    assert grid(provider=[]) == []


def test_an_axis_may_be_an_iterator():
    assert len(grid(first=range(3), second=(n for n in range(2)))) == 6


def test_a_label_has_the_fields_that_differ():
    actual = grid({"device": "cpu"}, tokens=[64, 128], provider=["eager", "fused"])
    actual.append({"device": "cpu", "tokens": 64, "provider": "eager", "mode": ""})
    names = differing(actual)
    assert names == ["tokens", "provider", "mode"]
    assert [label(c, names) for c in actual[2:]] == [
        "tokens 128 · eager", "tokens 128 · fused", "tokens 64 · eager",
    ]  # fmt: skip
    assert label({"blocks": 4.0, "mode": float("nan")}, ["mode", "blocks"]) == "blocks 4"


@pytest.mark.parametrize(
    ("refuse", "message"),
    [
        (
            lambda: require_known("arm", "ligr", ("liger", "fused")),
            "unknown arm 'ligr'; known",
        ),
        (
            lambda: require_known("arm", ["fused", "x"], {"fused": 1}),
            "unknown arm 'x'; known",
        ),
        (lambda: require_least(1, steps=0), "steps must be at least 1, got 0"),
        (lambda: require_least(0, widths=[4, -2]), "widths must be at least 0, got -2"),
    ],
)
def test_a_wrong_field_is_refused_with_what_is_known(refuse, message):
    with pytest.raises(ValueError, match=message):
        refuse()


def test_auto_is_the_best_device_there_is(monkeypatch):
    monkeypatch.setattr(cases.machine, "device_type", lambda: "mps")
    assert cases.device_of("auto") == "mps"
    assert cases.device_of("cpu") == "cpu"
