"""A patched model beside the plain one, over every causal language model of transformers."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from every_causal_model import NAMES, build, loss_and_gradients, outputs, trained

import fusedlib

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
LEAST_COMPARED = 108  # of 178 names; the last test lists what is not, and why
REASONS: dict[str, str] = {}
COMPARED: list[str] = []
REFUSED: list[str] = []
# Muon multiplies in bf16, so that a last bit of a gradient may turn an update of 1e-3 a little.
OPTIMIZERS = {"AdamW": 0.0, "Muon": 1e-4}


def differences(found, wanted, allowed=0.0):
    """Names whose values differ by more than rounding, or that only one of both has.

    Models in float64 round to fp32 in places. A fused loss has the model's dtype, a plain one may
    be fp32.
    """
    wrong = [f"{name}: only one of both has it" for name in found.keys() ^ wanted.keys()]
    for name in found.keys() & wanted.keys():
        one, other = found[name], wanted[name]
        if one.shape != other.shape:
            wrong.append(f"{name}: {one.shape} for {other.shape}")
        elif not one.is_floating_point():
            wrong += [] if torch.equal(one, other) else [f"{name}: other integers"]
        elif other.numel():
            relative, least = (1e-5, 1e-8) if one.dtype == torch.float64 else (2e-4, 1e-6)
            scale, error = other.abs().max().item(), (one - other).abs().max().item()
            if not error <= max(relative * scale + least, allowed):
                wrong.append(f"{name}: error {error:.1e} of {scale:.1e}")
    return sorted(wrong)


def usable(name):
    """The plain model, in float64 if it can, with its results; or the reason why it is not used."""
    reason = ""
    for dtype in (torch.float64, torch.float32):
        plain = build(name)
        if isinstance(plain, str):
            return plain
        plain = plain.to(dtype)
        try:
            results = [(loss_and_gradients(plain), dict(outputs(plain))) for _ in range(2)]
        except Exception as error:
            reason = f"the plain model fails: {type(error).__name__}: {error}"[:150]
            continue
        (usual, wanted), (gradients_again, outputs_again) = results
        if differences(gradients_again, usual) or differences(outputs_again, wanted):
            reason = "the plain model gives NaN, or other values at each call"
            continue
        return plain, usual, wanted
    return reason


@pytest.mark.parametrize("name", NAMES)
def test_trains_and_generates_as_the_plain_model(name):
    found = usable(name)
    if isinstance(found, str):
        REASONS[name] = found
        return
    plain, usual, wanted = found
    patched = copy.deepcopy(plain)
    names, keys = [n for n, _ in plain.named_parameters()], list(plain.state_dict())
    parameters = list(map(id, patched.parameters()))
    classes = list(map(type, patched.modules()))
    try:
        fusedlib.apply_to(patched)
    except ValueError as error:
        assert "is no model that apply_to knows" in str(error)
        assert list(map(type, patched.modules())) == classes
        REFUSED.append(name)
        return
    assert [n for n, _ in patched.named_parameters()] == names
    assert list(map(id, patched.parameters())) == parameters
    assert list(patched.state_dict()) == keys
    assert differences(loss_and_gradients(patched), usual) == []
    assert differences(dict(outputs(patched)), wanted) == []
    start = copy.deepcopy(plain.state_dict())
    for optimizer, allowed in OPTIMIZERS.items():
        states = {}
        for which, model in (("plain", plain), ("patched", patched)):
            model.load_state_dict(start)
            states[which] = trained(model, optimizer)
        assert differences(states["patched"], states["plain"], allowed) == []
    plain.load_state_dict(patched.state_dict())
    patched.load_state_dict(start)
    assert differences(dict(patched.state_dict()), start) == []
    patched.load_state_dict(plain.state_dict())
    assert differences(dict(outputs(patched)), dict(outputs(plain))) == []
    COMPARED.append(name)


def test_most_models_were_compared():
    """After all others, in one process."""
    for name, reason in REASONS.items():
        print(f"{name}: {reason}")
    print("refused by apply_to at once:", *REFUSED)
    print(len(COMPARED), "compared:", *COMPARED)
    assert len(COMPARED) + len(REFUSED) + len(REASONS) == len(NAMES)
    assert len(COMPARED) >= LEAST_COMPARED, REASONS
