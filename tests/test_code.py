"""Fingerprints: what changes a row's code, and what does not."""

import ast
import textwrap

import pytest

from fusedlib.bench import check, code, rivals, sources, swiglu, timing


def first(x):
    """What it does."""
    return helper(x) + 1


def helper(x):
    return 2 * x  # a remark


def renamed(values):
    return [first(v) for v in values]


def test_a_function_counts_with_those_it_leads_to(monkeypatch):
    before = code.fingerprint(renamed)
    assert [f.__name__ for f in code._reached(renamed)] == ["first", "helper", "renamed"]
    monkeypatch.setitem(globals(), "helper", lambda x: 3 * x)
    assert code.fingerprint(renamed) != before


def test_comments_docstrings_layout_and_decorators_do_not_count():
    one = '@mark\ndef f(x):\n    """Doc."""\n    return (x +\n        1)  # why'
    other = "def f(x):\n    return x + 1"
    assert code._tree(one) == code._tree(other)
    assert code._tree(one) != code._tree("def f(x):\n    return x + 2")


def test_a_tree_s_text_leaves_out_what_one_version_of_python_has_and_another_lacks():
    """`ast.dump` of 3.12 shows `type_params=[]`: rows of another Python would never be current."""
    tree = ast.parse(textwrap.dedent("def f():\n    pass"))
    tree.body[0].type_params = []
    bare = ast.parse("def f():\n    pass")
    if hasattr(bare.body[0], "type_params"):
        del bare.body[0].type_params
    assert code._dump(tree) == code._dump(bare)
    assert "decorator_list" not in code._dump(bare)


def test_our_rival_stands_on_the_files_that_it_imports_and_no_other():
    behind = {m.__name__.removeprefix("fusedlib.") for m in sources.behind("fusedlib.functional")}
    assert {
        "functional",
        "kernels.swiglu",
        "kernels.split.product",
        "kernels.split.hopper",
        "kernels.launch",
    } <= behind
    assert not {"kernels.accumulate", "kernels.rope", "modules", "paths"} & behind
    assert list(rivals.get("swiglu", "fused").behind())
    assert not list(rivals.get("swiglu", "liger").behind())


def test_a_changed_kernel_changes_our_rows_alone(monkeypatch):
    own = swiglu.study_code()
    before = {name: own.of({"provider": name}) for name in ("fused", "eager")}
    some = list(sources.behind("fusedlib.functional"))
    monkeypatch.setattr(sources, "behind", lambda *names: some[1:])
    rivals.Rival.fingerprint.cache_clear()
    after = {name: own.of({"provider": name}) for name in before}
    rivals.Rival.fingerprint.cache_clear()
    assert after["fused"] != before["fused"] and after["eager"] == before["eager"]


def test_a_row_s_code_names_harness_problem_and_rival():
    own = swiglu.study_code()
    fused, eager = (own.of({"provider": n}).split("-") for n in ("fused", "eager"))
    assert fused[:2] == eager[:2] and fused[2] != eager[2]
    assert own.of({}).endswith("-none")
    assert own.of({"provider": "somebody who left"}).endswith("-gone")
    other = code.Code((check,), (timing,), own.rival)
    assert other.of({"provider": "fused"}).split("-")[2] == fused[2]


def test_an_experiment_has_a_code_of_its_own():
    own, other = code.Code((check,), (timing,)), code.Code((timing,), (check,))
    both = code.ByExperiment(own.harness, own.problem, None, {"b": other})
    assert both.of({"experiment": "a"}) == own.of({}) != both.of({"experiment": "b"})
    assert both.of({"experiment": "b"}) == other.of({})
    with pytest.raises(KeyError, match="a"):
        code.ByExperiment((), (), None, {"b": other}).of({"experiment": "a"})
