"""What holds of `rope` alone, beside the laws of `tests/laws`: positions, layout, strides."""

import pytest
import torch
from torch import Tensor

from fusedlib import rope
from fusedlib.ops.rope import function
from gradient_checks import Named, drawn, named_results, same

TOKENS = 19


def tables(device: str, *shape: int) -> tuple[Tensor, Tensor]:
    """cos and sin of all different angles: no half is the other's copy."""
    angles = torch.arange(torch.Size(shape).numel(), device=device).reshape(shape) * 0.37
    return angles.cos(), angles.sin()


def heads(device: str, *shape: int) -> Named:
    """6 heads of q and 2 of k."""
    batch, tokens, width = shape or (2, TOKENS, 10)
    return {n: drawn(device, torch.float32, batch, count, tokens, width, seed=count)
            for n, count in (("q", 6), ("k", 2))}  # fmt: skip


@pytest.mark.plain
def test_positions_choose_rows_of_the_tables(device):
    leaves, (cos, sin) = heads(device), tables(device, 50, 8)
    upstream = dict(zip(("q_out", "k_out"), heads(device).values(), strict=True))

    def results(*of: Tensor, **positions: Tensor) -> Named:
        def call(**own: Tensor) -> Named:
            return dict(zip(upstream, rope(**own, cos=of[0], sin=of[1], **positions), strict=True))

        return named_results(call, leaves, upstream)

    for shape, dtype in (((19,), torch.int32), ((1, 19), torch.int64), ((2, 19), torch.int32)):
        generator = torch.Generator(device).manual_seed(4)
        at = torch.randint(50, shape, generator=generator, device=device)
        rows = at.reshape(-1, TOKENS)
        wanted = results(cos[rows], sin[rows])
        found = results(cos, sin, positions=at.to(dtype))
        assert same(found.values(), wanted.values()), (shape, dtype)


@pytest.mark.plain
def test_a_position_outside_the_table_is_named_on_a_cpu(device):
    if device == "cuda":
        pytest.skip("gives NaN, and nobody waits for the device")
    for wrong in (3, -1):
        at = torch.full((TOKENS,), wrong)
        with pytest.raises(IndexError, match=f"position {wrong} is .* cos and sin of 3 rows"):
            rope(**heads(device), **dict(zip(("cos", "sin"), tables(device, 3, 8), strict=True)),
                 positions=at)  # fmt: skip


def test_a_position_outside_the_table_gives_nan_there_alone(device, monkeypatch):
    """Of the kernel, where nobody looks at positions first: the turned elements of that token."""
    monkeypatch.setattr(function, "refuse_outside", lambda *_: None)
    cos, sin = tables(device, 50, 8)
    at = torch.arange(TOKENS, device=device)
    at[[3, 5, 7]] = torch.tensor([50, -1, 2**40], device=device)
    expected = torch.zeros(TOKENS, 10, dtype=torch.bool, device=device)
    expected[[3, 5, 7], :8] = True
    for turned in rope(**heads(device), cos=cos, sin=sin, positions=at):
        assert torch.equal(turned.isnan(), expected.expand_as(turned))


def test_results_lie_as_q_does(device):
    """Also in a projection of q, k and v together: attention's own order."""
    packed = torch.randn(2, TOKENS, 10, 10, device=device)
    q, k = packed[:, :, :6].transpose(1, 2), packed[:, :, 6:8].transpose(1, 2)
    cos, sin = tables(device, 1, TOKENS, 10)
    alone = rope(q.contiguous(), k.contiguous(), cos, sin)
    for turned, wanted in zip(rope(q, k, cos, sin), alone, strict=True):
        assert turned.transpose(1, 2).is_contiguous() and torch.equal(turned, wanted)


@pytest.mark.interpreter
def test_heads_far_apart(device):
    """More than 2³¹ elements, of which no more than a few are ever touched."""
    q, k = (t[:, :4].half() for t in heads(device, 1, 3, 8).values())
    memory = torch.empty(3 * 2**30 + 24, dtype=torch.float16)
    far = memory.as_strided((1, 4, 3, 8), (1, 2**30, 8, 1)).copy_(q)
    of = tables(device, 1, 3, 8)
    assert same(rope(far, k, *of), rope(q, k, *of))


Q, COS = torch.zeros(2, 4, 3, 8), torch.zeros(1, 3, 8)


@pytest.mark.parametrize(
    ("cos", "positions"),
    [
        (COS[..., :3], None),  # an odd width
        (torch.zeros(1, 3, 10), None),  # wider than a head
        (COS, torch.zeros(3, dtype=torch.int64)),  # a table of several sequences
    ],
)
def test_tables_that_do_not_fit_are_refused(cos, positions):
    with pytest.raises(ValueError, match="cos must"):
        rope(Q, Q, cos, cos, positions=positions)
