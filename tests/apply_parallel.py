"""One of two processes whose patched model trains in parallel: `tests/laws/test_models.py` starts
them.

Usage: apply_parallel.py torch|deepspeed|accelerate
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
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fusedlib
from llama_models import make, tokens

RATE, STEPS = 0.5, 2


def batch(share: slice | None = None) -> torch.Tensor:
    ids, _ = tokens(shape=(2, 16))
    return ids if share is None else ids[share]


def own_share() -> slice:
    return slice(dist.get_rank(), dist.get_rank() + 1)


def train(model: nn.Module, ids: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()


def check_torch(plain: nn.Module) -> None:
    start = copy.deepcopy(plain.state_dict())
    replicated, sharded, flat, parallel = (patched_copy(plain) for _ in range(4))
    one_parameter = patched_copy(plain)
    train(plain, batch())
    wanted = plain.state_dict()
    assert not torch.equal(start["lm_head.weight"], wanted["lm_head.weight"])
    train(DistributedDataParallel(replicated), batch(own_share()))
    torch.testing.assert_close(dict(replicated.state_dict()), dict(wanted))
    print("DDP trains as the plain model")
    check_fsdp2(sharded, start, wanted)
    for model, original in ((flat, True), (one_parameter, False)):
        check_fsdp1(model, wanted, original)
    check_tensor_parallel(parallel, wanted)


def patched_copy(plain: nn.Module) -> nn.Module:
    model = copy.deepcopy(plain)
    fusedlib.apply_to(model)
    return model


def check_fsdp2(sharded: nn.Module, start: dict, wanted: dict) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(sharded, mesh=mesh, reshard_after_forward=False)
    train(sharded, batch(own_share()))
    whole = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(sharded, options=whole)
    assert list(state) == list(wanted)
    torch.testing.assert_close(dict(state), dict(wanted))
    set_model_state_dict(sharded, dict(start), options=whole)
    torch.testing.assert_close(dict(get_model_state_dict(sharded, options=whole)), dict(start))
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    own = dict(wanted) if dist.get_rank() == 0 else {}
    set_model_state_dict(sharded, own, options=from_first)
    torch.testing.assert_close(dict(get_model_state_dict(sharded, options=whole)), dict(wanted))
    with pytest.raises(ValueError, match="split by FSDP already"):
        fusedlib.apply_to(sharded)
    assert sharded(batch(), labels=batch()).logits is None
    print("FSDP2 trains as the plain model")


def check_fsdp1(model: nn.Module, wanted: dict, use_orig_params: bool) -> None:
    """A unit a layer, each with one flat parameter; the embedding, which is tied, in the root's."""
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )  # fmt: skip
    train(wrapped, batch(own_share()))
    torch.testing.assert_close(dict(wrapped.state_dict()), dict(wanted))
    assert wrapped(batch(), labels=batch()).logits is None
    print("FSDP1 trains as the plain model")


def check_tensor_parallel(model: nn.Module, wanted: dict) -> None:
    """Heads and columns of the MLP over two processes, which see the same batch."""
    mesh = init_device_mesh("cpu", (2,))
    by_columns, by_rows = ColwiseParallel, RowwiseParallel
    plan = {f"self_attn.{name}_proj": by_columns() for name in "qkv"}
    plan |= {"self_attn.o_proj": by_rows(), "mlp.down_proj": by_rows()}
    plan |= {"mlp.gate_proj": by_columns(), "mlp.up_proj": by_columns()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    train(model, batch())
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(dict(state), dict(wanted))
    words = "split by tensor parallelism already: .* load it without tp_plan"
    with pytest.raises(ValueError, match=words):
        fusedlib.apply_to(model)
    print("Tensor parallelism trains as the plain model")


def check_accelerate(plain: nn.Module) -> None:
    """Its FSDP2 with a whole state: train, save, train on, resume what was saved."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    wanted_model, folder = copy.deepcopy(plain), os.environ["FOLDER"]
    train(wanted_model, batch())
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="FULL_STATE_DICT", cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(plain.model.layers[0]).__name__],
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    patched = patched_copy(plain)
    model, optimizer = accelerator.prepare(patched, torch.optim.SGD(patched.parameters(), lr=RATE))

    def steps() -> dict:
        for _ in range(STEPS):
            optimizer.zero_grad()
            accelerator.backward(model(batch(own_share()), labels=batch(own_share())).loss)
            optimizer.step()
        options = StateDictOptions(full_state_dict=True)
        return dict(get_model_state_dict(model, options=options))

    first = steps()
    torch.testing.assert_close(first, dict(wanted_model.state_dict()))
    accelerator.save_state(folder)
    second = steps()
    accelerator.load_state(folder)
    torch.testing.assert_close(steps(), second)
    print("accelerate's FSDP2 trains as the plain model")


def check_deepspeed(plain: nn.Module) -> None:
    """ZeRO-3 of both models, every parameter in parts until it is used."""
    import deepspeed

    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": stage}
    config["zero_allow_untested_optimizer"] = True
    states = []
    for model in (plain, patched_copy(plain)):
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(config))
        ids = batch(own_share())
        for _ in range(STEPS):
            engine.backward(engine(ids, labels=ids).loss)
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            states.append({name: t.clone() for name, t in model.state_dict().items()})
    torch.testing.assert_close(*states)
    with pytest.raises(ValueError, match="split by DeepSpeed already"):
        fusedlib.apply_to(plain)
    assert engine(batch(), labels=batch()).logits is None
    print("ZeRO-3 trains as the plain model")


def main() -> None:
    torch.set_num_threads(1)
    plain = make("Qwen2", tie_word_embeddings=True)
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": os.environ["RANK"]}
    dist.init_process_group("gloo")
    checks = {
        "torch": check_torch, "deepspeed": check_deepspeed, "accelerate": check_accelerate
    }  # fmt: skip
    checks[sys.argv[1]](plain)
    dist.barrier()
    # Skips the interpreter's end: threads of gloo outlive destroy_process_group there, and one that
    # frees a tensor aborts the process (pytorch/pytorch#179291).
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
