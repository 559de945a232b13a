"""The recipe of PATCHING.md: a training step, optimizer included, as a CUDA graph."""

import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import fusedlib
from llama_models import VOCABULARY, make


def recipe() -> str:
    """The program on the page."""
    page = Path(fusedlib.__file__).parent / "patch" / "PATCHING.md"
    return page.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_replays_train_as_eager_steps_do(name):
    plain = make(name, tie_word_embeddings=True).cuda().bfloat16()
    with torch.no_grad():  # batches of random tokens then have losses of their own
        plain.lm_head.weight.mul_(10)
    generator = torch.Generator("cuda").manual_seed(0)
    batches = torch.randint(1, VOCABULARY, (7, 2, 40), generator=generator, device="cuda")
    losses = {}
    for way in ("eager", "graph"):
        model, ids = copy.deepcopy(plain), batches[0].clone()
        fusedlib.apply_to(model)
        names = {"torch": torch, "model": model, "ids": ids}
        if way == "graph":
            exec(recipe(), names)
        else:
            names["optimizer"] = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
        losses[way] = []
        for step in range(3 * (way == "eager") + len(batches) - 1):
            ids.copy_(batches[max(0, step - 2) if way == "eager" else step + 1])
            if way == "graph":
                names["graph"].replay()
                loss = names["loss"]
            else:
                names["optimizer"].zero_grad()
                loss = model(ids, labels=ids, use_cache=False).loss
                loss.backward()
                names["optimizer"].step()
            losses[way].append(loss.item())
    eager, graph = torch.tensor(losses["eager"][3:]), torch.tensor(losses["graph"])
    torch.testing.assert_close(graph, eager, rtol=2e-3, atol=0)
    assert eager.std() > 5e-3 * eager.mean()  # batches and steps can be told apart
