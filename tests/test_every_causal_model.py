"""A patched model beside the plain one, over every causal language model of transformers."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

import fusedlib
from every_causal_model import (
    NAMES,
    balanced,
    build,
    checkpointed,
    intermediate,
    loss_and_gradients,
    outputs,
    trained,
)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]
# Of 178 names; the last tests list what is not compared, and why. In float64 least can hide, but
# `fusedlib.linear` takes fp32 weights alone.
LEAST_COMPARED = {"float64": 106, "float32": 108}
REASONS: dict[str, dict[str, str]] = {dtype: {} for dtype in LEAST_COMPARED}
COMPARED: dict[str, list[str]] = {dtype: [] for dtype in LEAST_COMPARED}
REFUSED: dict[str, list[str]] = {dtype: [] for dtype in LEAST_COMPARED}
# What a step may be off, as a share of it. Muon multiplies in bf16: a last bit of a gradient turned
# steps of some matrices by 4 %.
OPTIMIZERS = {"AdamW": 1e-3, "Muon": 0.1}
# How many models at least can be called so.
OTHER_CALLS = {checkpointed: 105, intermediate: 108, balanced: 23}
CALLED: dict[str, list[str]] = {call.__name__: [] for call in OTHER_CALLS}


def differences(found, wanted):
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
            if not error <= relative * scale + least:
                wrong.append(f"{name}: error {error:.1e} of {scale:.1e}")
    return sorted(wrong)


def other_steps(found, wanted, start, share):
    """Names of what moved from `start` otherwise, by more than this share and rounding."""
    wrong = []
    for name, before in start.items():
        if before.is_floating_point():
            size, moved = before.norm().item(), (wanted[name] - before).norm().item()
            error = (found[name] - wanted[name]).norm().item()
            if not error <= share * moved + 1e-6 * size:
                wrong.append(f"{name}: a step of {moved:.1e} is off by {error:.1e}")
    return wrong


def built(name, dtype):
    """The plain model, or the reason why there is none."""
    model = build(name)
    if isinstance(model, str):
        return model
    model = model.to(getattr(torch, dtype))
    if dtype == "float64":  # grouped_mm multiplies in fp32 at most
        model.set_experts_implementation("eager")
    return model


def patch(model):
    """Whether `apply_to` takes the model; one that it refuses stays as it was."""
    classes = list(map(type, model.modules()))
    try:
        fusedlib.apply_to(model)
    except ValueError as error:
        assert "is no model that apply_to knows" in str(error)
        assert list(map(type, model.modules())) == classes
        return False
    return True


def usable(name, dtype):
    """The plain model with its results, or the reason why it is not used."""
    plain = built(name, dtype)
    if isinstance(plain, str):
        return plain
    try:
        results = [(loss_and_gradients(plain), dict(outputs(plain))) for _ in range(2)]
    except Exception as error:
        return f"the plain model fails: {type(error).__name__}: {error}"[:150]
    (usual, wanted), (gradients_again, outputs_again) = results
    if differences(gradients_again, usual) or differences(outputs_again, wanted):
        return "the plain model gives NaN, or other values at each call"
    return plain, usual, wanted


@pytest.mark.parametrize("dtype", LEAST_COMPARED)
@pytest.mark.parametrize("name", NAMES)
def test_trains_and_generates_as_the_plain_model(name, dtype):
    found = usable(name, dtype)
    if isinstance(found, str):
        REASONS[dtype][name] = found
        return
    plain, usual, wanted = found
    patched = copy.deepcopy(plain)
    names, keys = [n for n, _ in plain.named_parameters()], list(plain.state_dict())
    parameters = list(map(id, patched.parameters()))
    if not patch(patched):
        REFUSED[dtype].append(name)
        return
    assert [n for n, _ in patched.named_parameters()] == names
    assert list(map(id, patched.parameters())) == parameters
    assert list(patched.state_dict()) == keys
    assert differences(loss_and_gradients(patched), usual) == []
    assert differences(dict(outputs(patched)), wanted) == []
    start = copy.deepcopy(plain.state_dict())
    for optimizer, share in OPTIMIZERS.items():
        states = {}
        for which, model in (("plain", plain), ("patched", patched)):
            model.load_state_dict(start)
            states[which] = trained(model, optimizer)
        assert other_steps(states["patched"], states["plain"], start, share) == []
    plain.load_state_dict(patched.state_dict())
    patched.load_state_dict(start)
    assert differences(dict(patched.state_dict()), start) == []
    patched.load_state_dict(plain.state_dict())
    assert differences(dict(outputs(patched)), dict(outputs(plain))) == []
    COMPARED[dtype].append(name)


@pytest.mark.parametrize("name", NAMES)
def test_other_calls_give_what_the_plain_model_gives(name):
    for call in OTHER_CALLS:
        plain, patched = (built(name, "float64") for _ in range(2))
        if isinstance(plain, str) or not patch(patched):
            return
        try:
            wanted = call(plain)
        except Exception as error:
            print(f"{call.__name__}: the plain model fails: {type(error).__name__}: {error}")
            continue
        if any(value.isnan().any() for value in wanted.values()):
            print(f"{call.__name__}: the plain model gives NaN")
            continue
        assert differences(call(patched), wanted) == []
        CALLED[call.__name__] += [name] if wanted else []


@pytest.mark.parametrize("call", OTHER_CALLS)
def test_most_models_were_called_so(call):
    """After all others, in one process."""
    print(*CALLED[call.__name__])
    assert len(CALLED[call.__name__]) >= OTHER_CALLS[call]


@pytest.mark.parametrize("dtype", LEAST_COMPARED)
def test_most_models_were_compared(dtype):
    """After all others, in one process."""
    for name, reason in REASONS[dtype].items():
        print(f"{name}: {reason}")
    compared, refused = COMPARED[dtype], REFUSED[dtype]
    print(len(refused), "refused by apply_to at once:", *refused)
    print(len(compared), "compared:", *compared)
    assert len(compared) + len(refused) + len(REASONS[dtype]) == len(NAMES)
    assert len(compared) >= LEAST_COMPARED[dtype], REASONS[dtype]
