"""One of two processes whose patched model trains in parallel: `tests/laws/test_models.py` starts
them.

Usage: apply_parallel.py FOLDER torch|deepspeed|accelerate...; the folder has a patched model, and
gets checkpoints.
"""

import copy
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fusedlib
from llama_models import make, tokens

RATE, STEPS = 0.5, 2
WHOLE = StateDictOptions(full_state_dict=True)
IDS, _ = tokens(shape=(2, 16))
FOLDER = sys.argv[1]


def own_share() -> torch.Tensor:
    return IDS[dist.get_rank()][None]


def trained(model: nn.Module, ids: torch.Tensor) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return model


def check(name: str, model: nn.Module, plain: nn.Module) -> None:
    """All weights are those of the plain model once it has trained on both shares."""
    wanted = dict(trained(copy.deepcopy(plain), IDS).state_dict())
    assert not torch.equal(plain.lm_head.weight, wanted["lm_head.weight"])
    state = dict(get_model_state_dict(model, options=WHOLE))
    assert list(state) == list(wanted)
    torch.testing.assert_close(state, wanted)
    print(f"{name} trains as the plain model")


def refused(model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=f"split by {words}"):
        fusedlib.apply_to(model)


def check_torch(plain: nn.Module, patched: nn.Module) -> None:
    replicated, sharded, flat, one_parameter, parallel, head, norms = (
        copy.deepcopy(patched) for _ in range(7)
    )
    check("DDP", trained(DistributedDataParallel(replicated), own_share()).module, plain)
    check_fsdp2(sharded, plain)
    policy = ModuleWrapPolicy({type(flat.model.layers[0])})
    # A unit a layer, each with one flat parameter; the embedding, which is tied, in the root's.
    for model, original in ((flat, True), (one_parameter, False)):
        wrapped = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=original,
            device_id=torch.device("cpu"),
        )  # fmt: skip
        check("FSDP1", trained(wrapped, own_share()), plain)
        assert wrapped(IDS, labels=IDS).logits is None
    # Heads and columns of the MLP over two processes, which see the same batch.
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    plan = {f"*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"*.{name}": RowwiseParallel() for name in rows}
    for layer in parallel.model.layers:
        parallelize_module(layer, init_device_mesh("cpu", (2,)), plan)
    check("Tensor parallelism", trained(parallel, IDS), plain)
    refused(parallel, "tensor parallelism already: .* load it without tp_plan")
    # Their hooks hand the first argument on: no target, and no residual.
    by_token = SequenceParallel(use_local_output=True)
    names = ("input_layernorm", "post_attention_layernorm")
    for name, model, plan in (
        ("A head by columns", head, {"lm_head": ColwiseParallel(output_layouts=Replicate())}),
        ("Norms by token", norms, {f"model.layers.*.{name}": by_token for name in names}),
    ):
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        loss, wanted = (of(IDS, labels=IDS).loss for of in (model, plain))
        torch.testing.assert_close(loss, wanted)
        loss.backward()
        print(f"{name}: the loss is the plain model's")


def check_fsdp2(sharded: nn.Module, plain: nn.Module) -> None:
    start, mesh = dict(plain.state_dict()), init_device_mesh("cpu", (2,))
    for module in (*sharded.model.layers, sharded):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    check("FSDP2", trained(sharded, own_share()), plain)
    first = dist.get_rank() == 0
    for own, from_first in ((dict(start), False), (dict(start) if first else {}, True)):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
        set_model_state_dict(sharded, own, options=options)
        torch.testing.assert_close(dict(get_model_state_dict(sharded, options=WHOLE)), start)
        trained(sharded, own_share())
    refused(sharded, "FSDP already")
    assert sharded(IDS, labels=IDS).logits is None


def check_accelerate(plain: nn.Module, patched: nn.Module) -> None:
    """Its FSDP2 with a whole state: train, save, train on, resume what was saved."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="FULL_STATE_DICT", cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(plain.model.layers[0]).__name__],
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(patched, torch.optim.SGD(patched.parameters(), lr=RATE))

    def steps() -> dict:
        for _ in range(STEPS):
            optimizer.zero_grad()
            accelerator.backward(model(own_share(), labels=own_share()).loss)
            optimizer.step()
        return dict(get_model_state_dict(model, options=WHOLE))

    steps()
    check("accelerate", model, plain)
    accelerator.save_state(FOLDER)
    second = steps()
    accelerator.load_state(FOLDER)
    torch.testing.assert_close(steps(), second)


def check_deepspeed(plain: nn.Module, patched: nn.Module) -> None:
    """ZeRO-3 of both models, every parameter in parts until it is used."""
    import deepspeed

    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": stage}
    config["zero_allow_untested_optimizer"] = True
    states = []
    for model in (plain, patched):
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(config))
        for _ in range(STEPS):
            engine.backward(engine(own_share(), labels=own_share()).loss)
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            states.append({name: t.clone() for name, t in model.state_dict().items()})
    torch.testing.assert_close(*states)
    refused(plain, "DeepSpeed already")
    assert engine(IDS, labels=IDS).logits is None
    print("ZeRO-3 trains as the plain model")


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": os.environ["RANK"]}
    # Of classes that this process has not made yet.
    patched = torch.load(f"{FOLDER}/model", weights_only=False)
    assert type(patched).forward.__qualname__ == "FusedCausalLM.forward"
    dist.init_process_group("gloo")
    for library in sys.argv[2:]:
        plain = make("Qwen2", tie_word_embeddings=True)
        globals()[f"check_{library}"](plain, copy.deepcopy(patched))
    dist.barrier()
    # Skips the interpreter's end: threads of gloo outlive destroy_process_group there, and one that
    # frees a tensor aborts the process (pytorch/pytorch#179291).
    sys.stdout.flush()
    os._exit(0)
