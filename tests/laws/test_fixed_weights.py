"""Laws of `fixed_weights`, over operations whose fp32 products are split: no number is another, and
a parameter is split once an axis, not once a product.
"""

from collections.abc import Iterator

import pytest
import torch
from test_laws import CALLS, Case, tuned
from torch import Tensor
from torch.nn import Parameter

from called import note_launches
from fusedlib import fixed_weights
from gradient_checks import same
from interpreter import INTERPRETED

SPLIT = "linear", "swiglu_mlp split", "swiglu_mlp split, packed"


@pytest.fixture(params=SPLIT)
def case(request, device) -> Iterator[Case]:
    """Of parameters, where an operation has weights."""
    operation = CALLS[request.param]
    with tuned(operation):
        made = Case(operation, device)
        own = {n: Parameter(t.detach()) for n, t in made.leaves.items() if n.startswith("w")}
        yield made.with_operands(**own)


def weights_of(case: Case) -> dict[str, Tensor]:
    return {name: t for name, t in case.leaves.items() if name.startswith("w")}


def test_the_same_numbers_of_weights_that_are_split_once(case, monkeypatch):
    """Views of them too; what is no parameter is split anew."""
    started, counts = note_launches(monkeypatch), []
    other = case.with_operands(x=(case.operands["x"].detach() + 1).requires_grad_())

    def step(of: Case, **given: Tensor) -> list[Tensor]:
        started.clear()
        found = of.step(**given)
        counts.append(started.count("_split_kernel"))
        return found

    wanted = [step(each) for each in (case, other)]
    with fixed_weights():
        for each, numbers in zip((case, other), wanted, strict=True):
            with fixed_weights():  # the outermost block counts
                assert same(step(each), numbers)
        assert same(step(case, **{n: t[:] for n, t in weights_of(case).items()}), wanted[0])
        unknown = {n: t.detach().requires_grad_() for n, t in weights_of(case).items()}
        assert same(step(case, **unknown), wanted[0])
    if INTERPRETED:  # where every product is split, whatever its size
        alone, _, first, second, views, others = counts
        assert alone == others >= first and second == views <= alone - 2


def test_a_weight_that_changes_inside_raises(case):
    changed = list(weights_of(case).values())[-1]
    with fixed_weights():
        case.step()
        with torch.no_grad():
            changed.mul_(2.0)
        with pytest.raises(RuntimeError, match="was changed in place"):
            case.step()
    case.step()


def test_nothing_is_kept_from_call_to_call_or_from_block_to_block(case):
    """Of weights that change unknown to their version counter, as by a fused optimizer."""

    def doubled() -> list[Tensor]:
        for weight in weights_of(case).values():
            weight.data.mul_(2.0)
        fresh = {n: Parameter(t.detach().clone()) for n, t in weights_of(case).items()}
        return case.step(**fresh)

    first = case.step()
    wanted = doubled()
    assert same(case.step(), wanted) and not same(wanted, first)
    with fixed_weights():
        case.step()
    wanted = doubled()
    with fixed_weights():
        assert same(case.step(), wanted)


def test_parameters_that_share_memory_count_their_changes_apart(case):
    tied = {n: Parameter(torch.empty_like(t)) for n, t in weights_of(case).items()}
    for name, weight in weights_of(case).items():
        tied[name].data = weight.data
        with torch.no_grad():
            weight.mul_(2.0)
    with fixed_weights():
        assert same(case.step(), case.step(**tied))
