"""Small models of every family that `fusedlib.apply_to` takes, their truth and their results."""

import copy
from unittest import mock

import torch
from torch.nn.functional import cross_entropy

import fusedlib
from fusedlib import reference
from fusedlib.bench.check import errors, misses
from fusedlib.patch import decoder_layer

NAMES = ("Llama", "Mistral", "Qwen2", "Qwen3")
VOCABULARY, TOKENS, LAYERS = 211, 33, 2
SIZES = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def make(name="Llama", **settings):
    """A model with weights of its own everywhere: norms and biases too."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES | settings)
    torch.manual_seed(1)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def pair(device, dtype=torch.bfloat16, **settings):
    """A model and the same patched, but for its loss: on the CPU torch's products of bf16 with an
    odd number of columns read one more, which in the loss's kernels may hold a NaN.
    """
    plain = make(**settings or {"name": "Llama"}).to(device, dtype)
    patched = copy.deepcopy(plain)
    fusedlib.apply_to(patched, loss=False)
    return plain, patched


def whole_layers(model, *arguments, **keywords):
    """How many layers of a call go as a whole, and what it gives."""
    with mock.patch.object(
        decoder_layer, "apply_layer_output", wraps=decoder_layer.apply_layer_output
    ) as calls:
        result = model(*arguments, **keywords)
    return calls.call_count, result


def tokens(device="cpu", shape=(2, TOKENS)):
    """Token ids, and labels of which some are ignored."""
    torch.manual_seed(2)
    ids = torch.randint(1, VOCABULARY, shape, device=device)
    labels = torch.where(torch.rand(shape, device=device) < 0.2, -100, ids)
    return ids, labels


def parameter(model, name):
    """A weight by the name that checkpoints have for it."""
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def results(model, names, loss):
    """The loss and the gradients of all weights, by name."""
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach()} | {n: parameter(model, n).grad.clone() for n in names}


def truth_of(model, ids, labels):
    """The same in float64: transformers' RMSNorm alone would go down to fp32, and so would its
    loss.
    """
    true = copy.deepcopy(model).double()
    for norm in true.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = lambda x, n=norm: reference.rms_norm(x, n.weight, n.variance_epsilon)
    logits = true(ids).logits[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    return results(true, [n for n, _ in model.named_parameters()], loss)


def misses_of(plain, patched, ids, labels, run=None):
    """What the project's rule rejects of the patched model; `run` gives a model's loss."""
    run = run or (lambda model: model(ids, labels=labels).loss)
    true = truth_of(plain, ids, labels)
    names = [n for n in true if n != "loss"]
    usual, found = (errors(results(m, names, run(m)), true) for m in (plain, patched))
    return misses(found, usual, plain.dtype)


def replica_of(module):
    """As `torch.nn.DataParallel` makes one: parameters are attributes of shallow copies."""
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else replica_of(child)
    for name, weight in module._parameters.items():
        setattr(replica, name, None if weight is None else 1 * weight)
    return replica
