"""What torch itself does, linear layers, a row and its neighbours, and what pictures show."""

import pytest
import torch

from outcomes import outcome
from study import precision, settings, token_bits


def test_every_experiment_is_measured():
    cases = precision.cases(device="cuda", max_terms=10, core_max_k=16)
    assert {c["experiment"] for c in cases} == set(precision.MEASURES)
    one = {c["experiment"]: c for c in cases if c["device"] == "cpu"}
    assert {outcome(precision.figures, case)[1] for case in one.values()} == {"ok"}
    assert {*one} == {*precision.MEASURES} - {"flags", "linear", "neighbours", "token bits"}


def test_matmul_settings_are_put_back():
    def now():
        cuda = torch.backends.cuda.matmul
        halves = (getattr(cuda, f"allow_{h}_reduced_precision_reduction") for h in ("fp16", "bf16"))
        return torch.get_float32_matmul_precision(), *halves

    before = now()
    with (
        pytest.raises(RuntimeError, match="inside"),
        settings.matmul_settings("medium", reduced=not before[1]),
    ):
        assert now() == ("medium", not before[1], not before[1])
        raise RuntimeError("inside")
    assert now() == before


def test_a_row_is_compared_with_itself_alone_elsewhere_and_beside_others(monkeypatch):
    """Operations whose row depends on the batch's size, its place, the others' values, or none."""
    size = lambda x, weight: x * (1 + len(x))  # noqa: E731
    place = lambda x, weight: x * (1.0 + torch.arange(len(x)))[:, None]  # noqa: E731
    values = lambda x, weight: x + x.abs().max()  # noqa: E731
    ways = {"size": size, "place": place, "values": values, "none": lambda x, weight: x + 1}
    monkeypatch.setattr(precision, "ROW_OPERATIONS", ways)
    figures = {
        c["provider"]: precision.measure_neighbours(c)
        for c in precision.neighbours([8], [32], "cpu") if c["dtype"] == "fp32"
    }  # fmt: skip
    found = {name: [one[f"changed_by_{w}"] > 0 for w in ("size", "place", "values")]
             for name, one in figures.items()}  # fmt: skip
    assert found["size"] == [True, False, False] and found["place"] == [False, True, False]
    assert found["values"] == [True, False, True] and found["none"] == [False] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_split_product_errs_less_than_fp32_s_and_tf32_more():
    errors = {
        (c["provider"], c["precision"]): precision.measure_linear(c)["relative_error"]
        for c in precision.linears([4096], 1024, "cuda") if c["distribution"] == "normal"
    }  # fmt: skip
    assert errors["linear", "highest"] < errors["eager", "highest"] < errors["eager", "high"]


def test_a_model_whose_tokens_see_others_is_noticed(monkeypatch):
    """One that looks at the batch, and one that does not."""
    looks = {"huggingface": True, "fused": False}
    seen = []

    class Model:
        probe = 4

        def __init__(self, *named):
            self.looks, self.ids = looks[named[3]], torch.arange(64)
            self.alone = self.log_probs(token_bits._Inputs(self.ids[None, :4]))

        def log_probs(self, given):
            seen.append(given)
            probe = given.ids[given.row, given.start : given.start + self.probe]
            assert probe.tolist() == [0, 1, 2, 3]
            return probe[1:].float() + self.looks * (given.ids.numel() > 4)

    monkeypatch.setattr(token_bits, "_model", Model)
    shared = {"model": "two layers", "probe": 4, "dtypes": ["float32"], "device": "cpu"}
    cases = token_bits.cases(["batch 8", "longer 9", "padding 16", "packed 10"], **shared)
    for case in (c for c in cases if c["provider"] in looks):
        figures = token_bits.measure(case)
        assert (figures["changed_fraction"], figures["largest_change"]) == (
            (1, 1) if looks[case["provider"]] else (0, 0)
        )
    padding, packed = seen[5], seen[7]
    assert padding.mask.tolist() == [[0] * 4 + [1] * 4, [1] * 8]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]
