"""`linear_log_probs` on the CPU: plain PyTorch, bad input, the interpreter, TRL's GRPO."""

import textwrap

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fusedlib
import linear_cross_entropy_checks as loss_checks
import log_probs_checks as checks
from fusedlib import LinearLogProbs, linear_log_probs
from interpreter import passed_in_the_interpreter


def test_in_the_interpreter():
    """What fails there is shown here."""
    assert passed_in_the_interpreter("interpreted/log_probs.py") > 35


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("settings", checks.SETTINGS)
def test_plain_pytorch_vs_float64(dtype, settings):
    assert checks.misses("cpu", dtype, **checks.SETTINGS[settings]) == []


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda f: f.__name__[6:])
def test_holds_in_plain_pytorch(check):
    check("cpu")


def test_derivatives_of_both_orders_in_float64():
    leaves, tokens, settings = loss_checks.drawn("cpu", "float64", (5, 3, 7), **checks.ALL)

    def both(*operands):
        return linear_log_probs(
            **dict(zip(leaves, operands, strict=True)), tokens=tokens, **settings
        )

    assert both(*leaves.values())[1].dtype == torch.float64
    assert gradcheck(both, tuple(leaves.values())) and gradgradcheck(both, tuple(leaves.values()))


def test_an_entropy_in_bits_is_rejected():
    def in_bits(**operands):
        log_probs, entropy = linear_log_probs(**operands)
        return log_probs, entropy * 1.4427

    assert checks.misses("cpu", "float32", compute=in_bits) != []


def test_module_is_the_function():
    leaves, tokens, settings = loss_checks.drawn("cpu", "float32", **checks.ALL)
    module = LinearLogProbs(**settings, ignore_index=7)
    tokens = tokens.clamp_min(0)
    found = module(leaves["hidden"], leaves["weight"], tokens, leaves["bias"])
    settings |= {"tokens": tokens, "ignore_index": 7}
    assert checks.same(found, linear_log_probs(**leaves, **settings))
    assert "temperature=0.7, softcap=2.0, entropy=True" in str(module)
    module.entropy = False
    assert module(leaves["hidden"], leaves["weight"], tokens)[1] is None
    assert not list(module.parameters())
    with pytest.raises(ValueError, match="got -1"):
        LinearLogProbs(temperature=-1)


HIDDEN, WEIGHT, TOKENS = torch.zeros(3, 4), torch.zeros(9, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden": HIDDEN[:, :0], "weight": WEIGHT[:, :0]}, r"at least 1, got \(3, 0\)"),
        ({"weight": torch.zeros(9, 5)}, r"\(vocabulary, 4\) for hidden \(3, 4\); got \(9, 5\)"),
        ({"tokens": TOKENS[:2]}, r"tokens must be \(3,\), got \(2,\)"),
        ({"tokens": TOKENS.float()}, "tokens must be torch.int64.*torch.float32"),
        ({"tokens": TOKENS.to("meta")}, "tokens is on meta, hidden on cpu"),
        ({"bias": torch.zeros(8)}, r"bias must be \(9,\), got \(8,\)"),
        ({"weight": WEIGHT.bfloat16()}, "weight is torch.bfloat16, hidden is torch.float32"),
        ({"temperature": 0}, "temperature must be finite and above 0, got 0"),
        ({"temperature": float("nan")}, "temperature must be finite .*, got nan"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"softcap": 0.0}, "softcap must be None, or finite and above 0, got 0.0"),
        ({"ignore_index": 1.5}, "ignore_index must be a whole number, got 1.5"),
    ],
)
def test_errors_name_what_was_given(changed, words):
    with pytest.raises(ValueError, match=words):
        linear_log_probs(**({"hidden": HIDDEN, "weight": WEIGHT, "tokens": TOKENS} | changed))


def test_what_is_no_tensor_or_no_token_raises():
    with pytest.raises(TypeError, match="tokens must be a torch.Tensor, got the list"):
        linear_log_probs(HIDDEN, WEIGHT, [1, 2, 3])
    with pytest.raises(IndexError, match="Target 9 is out of bounds"):
        linear_log_probs(HIDDEN, WEIGHT, torch.full_like(TOKENS, 9))


def test_slices_of_a_large_vocabulary():
    """8192 tokens; logits of 475 pieces of 64 classes, and 2 bytes an element of d_hidden more."""
    kernels = pytest.importorskip("fusedlib.ops.loss.kernels")
    for width, dtype, memory, classes, sums, mebibytes in (
        (4096, torch.bfloat16, kernels.BALANCED, 30400, torch.float32, 475 + 64),
        (2048, torch.bfloat16, kernels.LEAST, 30400, torch.float32, 475 + 32),
        (4096, torch.bfloat16, 2374 * 2**20, 151936, torch.bfloat16, 2374),
        (4096, torch.float16, 128 * 2**20, 4032, torch.float32, 128),
        (4096, torch.float32, kernels.BALANCED, 15200, torch.float32, 475),
    ):
        weight = torch.empty(151936, width, dtype=dtype, device="meta")
        found = kernels.slices(8192, weight, memory)
        assert found == (classes, sums, mebibytes * 2**20), (width, dtype, memory, found)
    assert kernels.slices(0, weight).rows == 151936
    with pytest.raises(ValueError, match=r"at least 1048576 bytes for the losses of 8192 tokens"):
        kernels.slices(8192, weight, 2**20 - 1)


def recipe() -> str:
    """The program in the docstring."""
    text = linear_log_probs.__doc__.partition("from now on:\n")[2].partition("Args:")[0]
    return textwrap.dedent(text).strip()


def test_the_recipe_is_a_program():
    compile(recipe(), "recipe", "exec")
    assert len(recipe().splitlines()) < 15


def test_the_recipe_in_trl_s_grpo(tmp_path, monkeypatch):
    """Log-probabilities, entropies and gradients of a tiny policy are those of TRL's own."""
    trl = pytest.importorskip(
        "trl", reason="trl is not installed; 1.16 has what the recipe changes"
    )
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "_ChunkedLogProbFunction"):
        pytest.skip(f"trl {trl.__version__} asks another function for log-probabilities")
    from llama_models import make

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", utils._ChunkedLogProbFunction)
    model = make("Llama")
    utils.add_fused_lm_head(model, temperature=0.7, outputs=checks.BOTH)
    ids = torch.randint(model.config.vocab_size, (2, 12), generator=torch.manual_seed(0))
    labels = ids.clone()
    labels[:, :4] = -100
    wanted = []
    for fused in (False, True):
        calls = []
        if fused:
            exec(recipe(), {"fusedlib": fusedlib})
            own = utils._ChunkedLogProbFunction.apply
            monkeypatch.setattr(
                utils._ChunkedLogProbFunction, "apply",
                staticmethod(lambda *a, own=own, calls=calls: calls.append(1) or own(*a)),
            )  # fmt: skip
        output = model(input_ids=ids, labels=labels, fused_lm_head=True)
        model.zero_grad()
        (output.log_probs.sum() + output.entropy.square().sum()).backward()
        found = [output.log_probs, output.entropy, *(p.grad.clone() for p in model.parameters())]
        assert len(calls) == fused
        wanted = wanted or found
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
