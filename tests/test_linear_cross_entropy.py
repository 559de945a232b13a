"""`linear_cross_entropy` on the CPU: plain PyTorch, bad input, the interpreter."""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import linear_cross_entropy_checks as checks
from fusedlib import (
    LinearCrossEntropyLoss,
    linear_cross_entropy,
    linear_cross_entropy_and_accuracy,
)
from interpreter import passed_in_the_interpreter


@pytest.mark.parametrize("part", ["0/2", "1/2"])
def test_in_the_interpreter(part):
    """What fails there is shown here."""
    assert passed_in_the_interpreter("interpreted/linear_cross_entropy.py", part) > 40


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("settings", checks.SETTINGS)
def test_plain_pytorch_vs_float64(dtype, settings):
    assert checks.misses("cpu", dtype, **checks.SETTINGS[settings]) == []


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda f: f.__name__[6:])
def test_holds_in_plain_pytorch(check):
    check("cpu")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_derivatives_of_both_orders_in_float64(reduction):
    leaves, target, settings = checks.drawn(
        "cpu", "float64", (5, 3, 7), **checks.ALL | {"reduction": reduction}
    )

    def loss(*operands):
        named = dict(zip(leaves, operands, strict=True))
        return linear_cross_entropy(**named, target=target, **settings)

    assert loss(*leaves.values()).dtype == torch.float64
    assert gradcheck(loss, tuple(leaves.values())) and gradgradcheck(loss, tuple(leaves.values()))


def test_counting_ignored_tokens_is_rejected():
    def over_all(**operands):
        valid = (operands["target"] >= 0).float().mean()
        return linear_cross_entropy(**operands) * valid

    assert checks.misses("cpu", "float32", compute=over_all) != []


def test_module_is_the_function():
    leaves, target, settings = checks.drawn("cpu", "float32", bias=True, token_weights=True)
    module = LinearCrossEntropyLoss(label_smoothing=0.1, z_loss=1e-3, reduction="sum")
    assert list(module.parameters()) == []
    found = module(*list(leaves.values())[:2], target, leaves["bias"], settings["token_weights"])
    wanted = linear_cross_entropy(
        **leaves, target=target, **settings, label_smoothing=0.1, z_loss=1e-3, reduction="sum"
    )
    assert torch.equal(found, wanted)
    assert "label_smoothing=0.1" in str(module) and "memory='balanced'" in str(module)
    module.reduction, module.z_loss = "mean", 0.0
    found = module(leaves["hidden"], leaves["weight"], target)
    plain = {name: leaves[name] for name in ("hidden", "weight")}
    wanted = linear_cross_entropy(**plain, target=target, label_smoothing=0.1)
    assert torch.equal(found, wanted) and "z_loss=0.0, softcap=None" in str(module)
    by_class = torch.rand(checks.VOCABULARY)
    weighted = LinearCrossEntropyLoss(class_weights=by_class, softcap=3.0)
    wanted = linear_cross_entropy(**plain, target=target, class_weights=by_class, softcap=3.0)
    assert torch.equal(weighted(leaves["hidden"], leaves["weight"], target), wanted)
    assert list(weighted.state_dict()) == ["class_weights"]
    module.memory = "most"
    with pytest.raises(ValueError, match="got 'most'"):
        module(leaves["hidden"], leaves["weight"], target)
    with pytest.raises(ValueError, match="got 'avg'"):
        LinearCrossEntropyLoss(reduction="avg")


HIDDEN, WEIGHT, TARGET = torch.zeros(3, 4), torch.zeros(9, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden": torch.tensor(1.0)}, "got a scalar"),
        ({"hidden": HIDDEN[:, :0], "weight": WEIGHT[:, :0]}, r"at least 1, got \(3, 0\)"),
        ({"hidden": HIDDEN.to_sparse()}, "hidden must be a dense tensor .*, got .*sparse_coo"),
        ({"hidden": torch.nested.nested_tensor([HIDDEN])}, "hidden must be .*, got a nested one"),
        ({"weight": torch.zeros(9, 5)}, r"\(vocabulary, 4\) for hidden \(3, 4\); got \(9, 5\)"),
        ({"weight": torch.zeros(0, 4)}, r"got \(0, 4\)"),
        ({"target": TARGET[:2]}, r"target must be \(3,\), got \(2,\)"),
        ({"target": TARGET.float()}, "target must be torch.int64.*torch.float32"),
        ({"bias": torch.zeros(8)}, r"bias must be \(9,\), got \(8,\)"),
        ({"bias": torch.zeros(9).half()}, "bias is torch.float16, hidden is torch.float32"),
        ({"weight": WEIGHT.bfloat16()}, "weight is torch.bfloat16"),
        ({"weight": WEIGHT.to("meta")}, "weight is on meta, hidden on cpu"),
        ({"hidden": HIDDEN.int(), "weight": WEIGHT.int()}, "hidden must be of a floating-point"),
        ({"label_smoothing": "a"}, "label_smoothing must be a number, got 'a'"),
        ({"z_loss": None}, "z_loss must be a number, got None"),
        ({"ignore_index": True}, "ignore_index must be a whole number, got True"),
        ({"token_weights": torch.zeros(4)}, r"token_weights must be \(3,\), got \(4,\)"),
        (
            {"token_weights": TARGET},
            "token_weights must be of a floating-point dtype",
        ),
        ({"memory": "most"}, "memory must be 'least', 'balanced' or a whole .*, got 'most'"),
        ({"memory": 0}, "number of bytes of at least 1, got 0"),
        ({"memory": True}, "got True"),
        ({"memory": 1.5e9}, "got 1500000000.0"),
        ({"memory": None}, "got None"),
        ({"reduction": "avg"}, "reduction must be one of mean, sum, none, got 'avg'"),
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1, got 1.5"),
        ({"label_smoothing": float("nan")}, "got nan"),
        ({"softcap": 0.0}, "softcap must be None, or finite and above 0, got 0.0"),
        ({"softcap": "a"}, "softcap must be a number, got 'a'"),
        ({"class_weights": torch.zeros(3)}, r"class_weights must be \(9,\), got \(3,\)"),
        ({"class_weights": torch.ones(9).requires_grad_()}, "class_weights must not require a gr"),
        ({"z_loss": -1.0}, "z_loss must be finite and not negative, got -1.0"),
        ({"ignore_index": 1.5}, "ignore_index must be a whole number, got 1.5"),
        ({"ignore_index": np.bool_(True)}, "ignore_index must be a whole number, got np.True_"),
        ({"ignore_index": 2**70}, f"ignore_index must be an int64, got {2**70}"),
        ({"ignore_index": -(2**63) - 1}, "ignore_index must be an int64, got -9223372036854775809"),
    ],
)
def test_errors_name_what_was_given(changed, words):
    operands = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET} | changed
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(**operands)


def test_accuracy_takes_the_settings_of_the_loss_alone():
    with pytest.raises(TypeError, match="softcup"):
        linear_cross_entropy_and_accuracy(HIDDEN, WEIGHT, TARGET, softcup=3.0)
    with pytest.raises(ValueError, match="got 'avg'"):
        linear_cross_entropy_and_accuracy(HIDDEN, WEIGHT, TARGET, reduction="avg")


def test_an_ignored_class_by_numpy():
    target = torch.tensor([3, 5, 5])
    for reduction in ("mean", "none"):
        found, wanted = (
            linear_cross_entropy(HIDDEN, WEIGHT, target, ignore_index=index, reduction=reduction)
            for index in (np.int64(5), 5)
        )
        assert torch.equal(found, wanted)


def test_a_target_out_of_range_raises():
    for wrong in (9, -1):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            linear_cross_entropy(HIDDEN, WEIGHT, torch.full_like(TARGET, wrong))


def test_meta_and_fake_tensors_have_shapes():
    meta = [t.to("meta") for t in (HIDDEN, WEIGHT, TARGET)]
    assert linear_cross_entropy(*meta, reduction="none").shape == (3,)


def test_chunks_fit_their_budget():
    kernels = pytest.importorskip("fusedlib.ops.loss.kernels")
    for tokens in (0, 1, 127, 2048, 2049, 8192, 100_000):
        for vocabulary in (1, 33, 32000, 50257, 128256, 10**6):
            for itemsize in (2, 4):
                stride = kernels.row_stride(vocabulary, itemsize)
                rows = kernels.chunk_rows(tokens, vocabulary, itemsize, 2**29)
                assert vocabulary <= stride and stride * itemsize % kernels.ROW_BYTES == 0
                assert rows * stride * itemsize <= max(2**29, stride * itemsize)
                assert rows == tokens or rows % 128 == 0


def test_plans_of_a_large_vocabulary():
    """8192 tokens; bytes in MiB, of which 250.5 are 1024 tokens' logits in half precision."""
    kernels = pytest.importorskip("fusedlib.ops.loss.kernels")
    least, balanced = kernels.LEAST, kernels.BALANCED
    half, single = torch.bfloat16, torch.float32
    wanted = [
        # width, dtype, memory, rows, sums, MiB
        (1024, half, least, 2048, single, 751.5), (1024, half, balanced, 2048, single, 751.5),
        (2048, half, least, 2048, single, 1002), (2048, half, balanced, 4096, single, 1503),
        (2048, half, 2004 * 2**20, 8192, half, 2004),
        (2048, half, 2004 * 2**20 - 1, 4096, single, 1503),
        (2048, half, 1002 * 2**20, 2048, single, 1002),
        (4096, half, least, 8192, half, 2004), (4096, half, balanced, 8192, half, 2004),
        (2048, torch.float16, balanced, 4096, single, 1503),
        (4096, torch.float16, balanced, 8192, single, 3006),
        (4096, torch.float16, least, 4096, single, 2004),
        (2048, single, balanced, 1024, single, 501),
        (2048, single, 4008 * 2**20, 8192, single, 4008),
    ]  # fmt: skip
    for width, dtype, memory, rows, sums, mebibytes in wanted:
        weight = torch.empty(128256, width, dtype=dtype, device="meta")
        found = kernels.plan(8192, weight, memory=memory)
        assert found == (rows, sums, mebibytes * 2**20), (width, dtype, memory, found)
    assert kernels.plan(8192, weight.bfloat16(), False) == (2048, half, 501 * 2**20)
    odd = torch.empty(50257, 4096, dtype=half, device="meta")  # its rows of logits are padded
    assert kernels.plan(8192, odd, memory=kernels.LEAST).rows == 8192


class Allocated(TorchDispatchMode):
    """The most bytes that tensors made under it take at once, but for an operand's own cast."""

    def __init__(self):
        super().__init__()
        self.live, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.live = {one: n for one, n in self.live.items() if not one.expired()}
        if function in (torch.ops.aten.new_empty.default, torch.ops.aten.new_zeros.default):
            storage = made.untyped_storage()
            self.live[StorageWeakRef(storage)] = storage.nbytes()
        self.most = max(self.most, sum(self.live.values()))
        return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(300, 64, 1003), (300, 200, 1003), (900, 64, 1024)], ids=str)
@pytest.mark.parametrize("rows", [0, 40, 140, 2000])
def test_a_plan_s_memory_is_what_is_allocated(monkeypatch, dtype, shape, rows):
    """Of a call and of d_W's rounding after it, with budgets of so many rows of logits."""
    kernels = pytest.importorskip("fusedlib.ops.loss.kernels")
    monkeypatch.setattr(kernels, "cross_entropy_rows", lambda *_, **__: None)
    leaves, target, _ = checks.drawn("cpu", dtype, shape)
    hidden, weight = (leaf.detach() for leaf in leaves.values())
    memory = 4 * weight.numel() + rows * kernels.row_stride(shape[2], hidden.itemsize) * 4
    plan = kernels.plan(shape[0], weight, memory=memory)
    assert plan.memory <= memory
    results = sum(t.numel() * t.itemsize for t in (hidden, weight))
    with Allocated() as allocated:
        settings = (True, True, False), kernels.Settings(memory=memory)
        operands = hidden, weight, None, target, None, None, torch.ones(())
        kept = kernels.losses_and_gradients(*operands, *settings)
        if kept[3].dtype != weight.dtype:
            weight.new_empty(weight.shape)
    losses = 4 * shape[0]
    assert allocated.most == plan.memory + results + losses
