"""Pretrained weights to begin with, for fine-tuning on another text.

    learned = prepare(config, snapshot, world)    # reads them, settles the sizes of the model
    load_pretrained(learned, model, dataset.vocabulary)      # once the model is built

What the two vocabularies have in common keeps its rows of the embedding and the head. The rows of
new characters are drawn afresh, around the mean of the learned ones: so they are neither unlike
all that the model knows nor likelier than it (Hewitt, "Initializing New Word Embeddings for
Pretrained Language Models", 2021). Nothing else comes along: optimizer, schedule and steps begin
anew.
"""

import dataclasses
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from config import Config
from engine.errors import UserError
from engine.interop import transformers as huggingface
from engine.interop.transformers import PER_CHARACTER
from engine.parallel import distributed, sharding
from engine.parallel.distributed import World, run_on_first
from engine.run.directory import choose_snapshot
from engine.run.provenance import CHANGED, model_has_changed
from engine.snapshots.sharded import load_full
from engine.snapshots.snapshot import Snapshot
from engine.snapshots.storage import is_local
from model import ARCHITECTURE, GPTConfig

log = logging.getLogger("gpt")


@dataclass
class Pretrained:
    """Weights by the names of `GPT`, the `vocabulary` whose characters their rows belong to, the
    `ARCHITECTURE` that they fit, and in words what they are.
    """

    weights: dict[str, torch.Tensor]
    vocabulary: str
    architecture: dict[str, Any]
    description: str


def read(source: str) -> Pretrained:
    """What is at `source`: a snapshot (path or URL), a run's directory (its best snapshot), or a
    directory that `export.py` or Transformers has written. Raises `UserError`.
    """
    if is_local(source) and os.path.exists(os.path.join(source, "config.json")):
        config, weights, vocabulary = huggingface.read(source)
        return Pretrained(weights, vocabulary, architecture_of(config), source)
    path = source
    if is_local(source) and os.path.isdir(source):
        path = choose_snapshot(None, source)
    snapshot = load_full(path)
    if model_has_changed(path):
        log.warning("init_from=%s: %s", source, CHANGED)
    architecture = architecture_of(GPTConfig.recorded(snapshot.model_config))
    return Pretrained(
        snapshot.model_state, snapshot.vocabulary, architecture, f"{path}, {snapshot}"
    )


def architecture_of(config: GPTConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ARCHITECTURE}


def prepare(config: Config, snapshot: Snapshot | None, world: World) -> Pretrained | None:
    """The weights that `config.init_from` names, read by rank 0 and handed to all; None where it
    names none, or the run, which once began with it, has its own `snapshot` to go on from.

    Gives `config` the architecture and the sizes of where the run begins. Raises `UserError` on
    every rank.
    """
    source = config.init_from
    if source is None:
        if snapshot is not None:  # so that it goes on being told
            config.init_from = snapshot.config.get("init_from")
        return None
    if snapshot is not None:
        if "init_from" in snapshot.config and snapshot.config["init_from"] is None:
            raise UserError(
                f"init_from={source}: this run has begun without it; give the one that is to begin "
                "with it a run_name of its own"
            )
        log.info("init_from   was for the beginning: this run resumes from its own snapshot")
        own = GPTConfig.recorded(snapshot.model_config)
        resolve_architecture(config, architecture_of(own), "the run's own snapshot")
        return None

    def read_named() -> Pretrained:
        try:
            return read(source)
        except UserError as error:
            what = str(error).removeprefix(f"{source}: ").removeprefix(f"run_dir={source}: ")
            raise UserError(f"init_from={source}: {what}") from error

    learned = run_on_first(read_named, world)
    resolve_architecture(config, learned.architecture, f"init_from={source}")
    log.info("init_from   %s", learned.description)
    return learned


def resolve_architecture(config: Config, architecture: dict[str, Any], source: str) -> None:
    """Gives `config` the `architecture` of `source`.

    Raises `UserError` where the command line asks for another. Only the context may be another:
    shorter, or also longer where positions are rotary.
    """
    values = {**architecture}
    for name in config.explicit:
        asked, has = getattr(config.model, name), architecture[name]
        if name == "block_size" and (asked <= has or architecture["arch"] == "modern"):
            values[name] = asked
        elif name == "block_size":
            raise UserError(
                f"data.block_size={asked}: {source} has learned {has} positions; give at most that"
            )
        elif asked != has:
            asked, has = (str(v).lower() if isinstance(v, bool) else v for v in (asked, has))
            raise UserError(f"model.{name}={asked}: {source} has {has}; leave it out")
    config.model = dataclasses.replace(config.model, model_type=None, **values)
    config.data = dataclasses.replace(config.data, block_size=values["block_size"])


@torch.no_grad()
def load_pretrained(learned: Pretrained, model: nn.Module, vocabulary: str) -> None:
    """Puts `learned` weights into a fresh `model` for `vocabulary`, bare, wrapped or sharded; all
    ranks must call it. Logs what was kept.

    Raises `UserError` for weights that do not fit.
    """
    rows = {character: i for i, character in enumerate(learned.vocabulary)}
    kept = [i for i, character in enumerate(vocabulary) if character in rows]
    kept_rows = [rows[vocabulary[i]] for i in kept]
    for name, parameter in distributed.unwrap(model).named_parameters():
        if name not in learned.weights:
            raise UserError(f"{learned.description}: it has no {name}")
        value = learned.weights[name].float()
        if name in PER_CHARACTER:
            fresh = sharding.full_tensor(parameter).cpu() + value.mean(dim=0)
            fresh[kept] = value[kept_rows]
            value = fresh
        elif name == "pos_emb.weight":
            value = value[: parameter.size(0)]
        if value.shape != parameter.shape:
            raise UserError(
                f"{learned.description}: {name} is {tuple(value.shape)}, not "
                f"{tuple(parameter.shape)}"
            )
        parameter.copy_(sharding.shard_like(value, parameter))
    new = [character for character in vocabulary if character not in rows]
    log.info(
        "characters  %d of the %d learned ones kept, %d left out; %d new%s",
        len(kept), len(rows), len(rows) - len(kept), len(new),
        f": {''.join(new)[:40]!r}" if new else "",
    )  # fmt: skip
