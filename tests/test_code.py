"""Fingerprints: what changes a row's code, and what does not."""

import ast
import textwrap
from pathlib import Path

import pytest

from fusedlib import paths
from fusedlib.bench import check, code, rivals, sources, swiglu, timing


def first(x):
    """What it does."""
    return helper(x) + 1


def helper(x):
    return 2 * x  # a remark


def renamed(x):
    return first(x)


def test_a_function_counts_with_those_it_leads_to(monkeypatch):
    before = code.fingerprint(renamed)
    assert before == code.fingerprint(renamed)
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


def test_every_kernel_file_is_behind_our_rival_and_no_other():
    folder = paths.ROOT / "fusedlib" / "kernels"
    files = {*folder.glob("*.py"), *folder.glob("*/__init__.py")} - {folder / "__init__.py"}
    named = {Path(str(module.__file__)) for module in sources.kernel_modules()}
    assert named == files and folder / "swiglu.py" in named
    behind = {Path(str(m.__file__)) for m in rivals.get("swiglu", "fused").behind()}
    assert files < behind
    assert not list(rivals.get("swiglu", "liger").behind())


def test_a_row_s_code_names_harness_problem_and_rival():
    own = swiglu.study_code()
    fused, eager = (own.of({"provider": n}).split("-") for n in ("fused", "eager"))
    assert fused[:2] == eager[:2] and fused[2] != eager[2]
    assert own.of({}).endswith("-none")
    assert own.of({"provider": "somebody who left"}).endswith("-gone")
    other = code.Code((check,), (timing,), own.rival)
    assert other.of({"provider": "fused"}).split("-")[2] == fused[2]


def test_a_package_that_is_not_there_is_told():
    with pytest.raises(ModuleNotFoundError, match=r"no package 'fusedlib\.nowhere'"):
        list(sources.modules_of("fusedlib.nowhere"))
