"""Fine-tuning: starts a run from pretrained weights, on another text.

Characters in both vocabularies keep their rows of the embedding and the head. The rows of new characters are drawn
around the mean of the pretrained ones, so that they are neither out of distribution nor likelier than the rest (Hewitt,
"Initializing New Word Embeddings for Pretrained Language Models", 2021). Optimizer, schedule and steps start afresh.
"""

import dataclasses
import logging
import os

import torch
import torch.nn as nn

from engine.config.schema import Config
from engine.errors import UserError
from engine.files import masked
from engine.interop import transformers
from engine.parallel import distributed, sharding
from engine.run.directory import choose_snapshot
from engine.snapshots.manager import read_on_rank_0
from engine.snapshots.sharded import load_full
from engine.snapshots.snapshot import Snapshot

log = logging.getLogger("gpt")


def read_init_weights(config: Config, snapshot: Snapshot | None) -> Snapshot | None:
    """Reads the pretrained weights that `config.init_from` names, and sets the architecture in `config` to theirs. None
    without them, and for a run that resumes from its own `snapshot`.
    """
    source = config.init_from
    recorded = snapshot.config.get("init_from") if snapshot is not None else None
    if source is None:
        config.init_from = recorded  # for the snapshots to come
        return None
    if recorded is not None and os.path.abspath(masked(source)) == os.path.abspath(masked(recorded)):
        config.init_from = recorded  # may be spelled with a slash at its end, or from the root
    if snapshot is not None:  # the source may be gone
        log.info("init_from   not read: resuming from the run's own snapshot")
        config.resolve_architecture(snapshot.model_config)
        return None
    pretrained = read_on_rank_0(lambda: read_pretrained(source))
    assert pretrained is not None
    encoding = pretrained.encoding
    if (encoding == "bytes") != (config.data.encoding == "bytes"):
        raise UserError(f"init_from={source}: was trained with data.encoding={encoding}; set the same")
    if pretrained.config.get("data", {}).get("newlines") == "keep" and config.data.newlines != "keep":
        log.info("init_from   data.newlines=keep, as the model was trained: it knows CRLF")
        config.data.newlines = "keep"
    config.resolve_architecture(pretrained.model_config)
    return pretrained


def read_pretrained(source: str) -> Snapshot:
    """The weights at `source`, without optimizer state: a snapshot (path or URL), a run directory (its best
    snapshot), or a directory that `export.py` or Transformers has written. Raises `UserError`.
    """
    try:
        if os.path.exists(os.path.join(source, "config.json")):
            model, weights, vocabulary, encoding = transformers.read(source)
            log.info("init_from   %s", source)
            settings = {"model": model, "data": {"encoding": encoding}}
            return Snapshot(weights, {}, vocabulary=vocabulary, config=settings)
        path = choose_snapshot(source, None)
        found = load_full(path)
        log.info("init_from   %s, %s", path, found)
        settings = found.config | {"model": found.model_config}  # SnapshotError if it has none
        return dataclasses.replace(found, optimizer_state={}, config=settings)
    except UserError as error:
        what = str(error).removeprefix(f"{source}: ").removeprefix(f"snapshot={source}: ")
        raise UserError(f"init_from={source}: {what}") from error


@torch.no_grad()
def load_pretrained(pretrained: Snapshot, model: nn.Module, vocabulary: str) -> None:
    """Loads the pretrained weights, which rank 0 has, into a fresh `model` for `vocabulary`, bare, wrapped or sharded;
    all ranks must call it. Raises `UserError` for weights that do not fit.
    """
    bare = distributed.unwrap(model)
    own = bare.state_dict()
    if odd := sorted(pretrained.model_state.keys() ^ own.keys()):
        raise UserError(f"init_from: only one of the models has {odd[0]}; was model.py or config.json edited?")
    rows = {character: i for i, character in enumerate(pretrained.vocabulary)}
    reused = [i for i, character in enumerate(vocabulary) if character in rows]
    sources = [rows[vocabulary[i]] for i in reused]
    codes = pretrained.model_state.get(transformers.CODES)
    if codes is not None:  # new characters have codes that no pretrained one has
        codes = distributed.broadcast(codes)
        fresh = codes.max() + 1 + torch.arange(len(vocabulary))
        fresh[reused] = codes[sources]
        own[transformers.CODES].copy_(fresh)
    for name, parameter in bare.named_parameters():
        value = distributed.broadcast(pretrained.model_state[name]).float()
        if name in transformers.PER_CHARACTER:
            fresh = sharding.full_tensor(parameter).cpu() + value.mean(dim=0)
            fresh[reused] = value[sources]
            value = fresh
        elif name == "pos_emb.weight":  # the context may be shorter
            value = value[: parameter.size(0)]
        if value.shape != parameter.shape:
            raise UserError(f"init_from: {name} is {tuple(value.shape)}, not {tuple(parameter.shape)}")
        if not value.isfinite().all():
            raise UserError(f"init_from: {name} has values that are not finite")
        parameter.copy_(sharding.shard_like(value, parameter))
    new = "".join(character for character in vocabulary if character not in rows)
    shown = f": {new[:40]!r}" if new else ""
    log.info(
        "vocabulary  reused %d of %d characters, dropped %d, added %d%s",
        len(reused), len(rows), len(rows) - len(reused), len(new), shown,
    )  # fmt: skip
