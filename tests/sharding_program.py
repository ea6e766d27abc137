"""What `test_sharding.py` starts under torchrun: builds and steps sharded models beside plain
ones, and has rank 0 print what it saw as one line of JSON.
"""

import json
import sys

import torch
import torch.nn as nn

from engine.optim import OptimizerConfig, create_optimizer
from engine.parallel import distributed, sharding
from model import GPT, GPTConfig

STEPS = 3
seen: dict = {}


def config(arch: str, **settings) -> GPTConfig:
    # 2 x 33 wide and 19 characters: nothing divides evenly by 2 or 3 processes
    sizes = {"n_layer": 2, "n_head": 3, "n_embd": 66, "vocab_size": 19, "block_size": 16}
    dropout = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPTConfig(arch=arch, model_type=None, **sizes, **dropout, **settings)


def steps(model, optimizer, share: bool, dtype=None, clip=0.5) -> list[list[float]]:
    """Loss and gradient norm of some steps on the same 6 windows, of which a rank takes its share if `share`."""
    generator = torch.Generator().manual_seed(5)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    results = []
    for _ in range(STEPS):
        idx = torch.randint(19, (6, 17), generator=generator)
        if share:
            idx = idx.chunk(distributed.size())[distributed.rank()]
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            _, loss = model(idx[:, :-1], idx[:, 1:])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = sharding.full_tensor(nn.utils.clip_grad_norm_(parameters, clip))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mean = sum(distributed.all_gather(loss.item())) / distributed.size()
        results.append([mean if share else loss.item(), norm.item()])
    return results


def difference(shared: GPT, plain: GPT) -> float:
    """The largest difference of a weight."""
    own = plain.state_dict()
    return max(
        (sharding.full_tensor(value) - own[name]).abs().max().item() for name, value in shared.state_dict().items()
    )


def both(arch: str, dtype=torch.float32, **settings) -> tuple[GPT, GPT]:
    """A sharded model and a plain one with the same weights, which computes nothing again."""
    torch.manual_seed(1)
    shared = sharding.build(lambda: GPT(config(arch, **settings)), "fsdp", dtype)
    torch.manual_seed(1)
    return shared, GPT(config(arch, **{**settings, "activation_checkpointing": False}))


def case(name: str, arch: str, optimizer: str, dtype=torch.float32, **settings) -> None:
    """The same steps sharded and plain."""
    shared, plain = both(arch, dtype, **settings)
    fresh = difference(shared, plain)
    recipe = OptimizerConfig(name=optimizer, learning_rate=3e-3)
    of_shared, of_plain = (create_optimizer(model, recipe) for model in (shared, plain))
    amp = None if dtype is torch.float32 else dtype
    taken = [steps(shared, of_shared, True, amp), steps(plain, of_plain, False, amp)]
    state = [v for s in of_shared.state.values() for v in s.values() if v.numel() > 1]
    seen[name] = {
        "fresh": fresh,
        "steps": taken,
        "weights": difference(shared, plain),
        "share_of_weights": share_of_this_rank(shared.parameters()),
        "share_of_state": share_of_this_rank(state),
    }


def share_of_this_rank(tensors) -> float:
    tensors = list(tensors)
    return sum(x.to_local().numel() for x in tensors) / sum(x.numel() for x in tensors)


distributed.init("cpu", threads=1, timeout_s=60)
case("gpt2 muon", "gpt2", "muon")
case("bfloat16", "gpt2", "adamw", torch.bfloat16)
case("float16", "modern", "muon", torch.float16)
case("modern adamw", "modern", "adamw", activation_checkpointing=True, token_shift=True)
case("n-grams muon", "modern", "muon", ngram_rows=50)

# One rank's inf in one shard: all ranks leave the step out.
model, untouched = both("gpt2")
optimizer = create_optimizer(model, OptimizerConfig())
scaler = torch.amp.GradScaler("cpu")
idx = torch.randint(19, (2, 17))
scaler.scale(model(idx[:, :-1], idx[:, 1:])[1]).backward()
if distributed.rank() == distributed.size() - 1:
    next(model.parameters()).grad.to_local().fill_(float("inf"))
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
seen["inf"] = {"moved": difference(model, untouched), "scales": distributed.all_gather(scaler.get_scale())}

if distributed.is_rank_0():
    print(json.dumps(seen))
sys.stdout.flush()
distributed.leave(0)
