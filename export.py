"""Writes a trained model as a directory for Hugging Face's Transformers.

python export.py out=my_gpt                                     the newest run, its best snapshot
python export.py run_dir=runs/NAME out=my_gpt                   another run
python export.py snapshot=runs/NAME/gpt_snapshot.pt out=my_gpt
python export.py out=my_gpt push_to=USER/NAME                   and uploads it, for all to see

`AutoModelForCausalLM.from_pretrained("my_gpt")` gives the same logits; `main.py init_from=my_gpt`
leads back. It needs safetensors (pip install safetensors), and an upload huggingface_hub. A NAME
that already exists and is private stays private.
"""

import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch

from engine.config.arguments import parse, run_program
from engine.errors import UserError, one_line
from engine.interop.transformers import to_files, unknown_token
from engine.run.directory import choose_snapshot
from engine.run.provenance import CHANGED, model_has_changed
from engine.snapshots.sharded import load_full
from engine.snapshots.snapshot import Snapshot
from model import GPT, CompleteConfig
from sample import load_model, opening


@dataclass
class ExportConfig:
    """What to write, and where; every field is an argument, `name=value`."""

    out: str  # the directory to write
    run_dir: str | None = None  # the run; without: the newest under runs/
    snapshot: str | None = None  # a file or URL; without: the best of run_dir, or else its latest
    push_to: str | None = None  # USER/NAME on the Hugging Face Hub


def export(snapshot: Snapshot, path: str, out: str) -> str:
    """Writes the model of `snapshot`, read from `path`, into the new directory `out`, whole or not
    at all. Returns in words whether Transformers, where it is installed, gives the same logits.

    Raises `UserError` if it gives others or has no such model, and if `out` already exists and not
    empty, or cannot be written.
    """
    model = load_model(snapshot, "cpu")
    files = to_files(model.config, snapshot.model_state, snapshot.vocabulary)
    files["README.md"] = model_card(snapshot, model.config, path).encode()
    parent, name = os.path.split(os.path.abspath(out))
    folder = None
    try:
        os.makedirs(parent, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f".{name}-", dir=parent)
        os.chmod(folder, 0o755)  # a temporary directory is private; a model is not
        for file_name, content in files.items():
            with open(os.path.join(folder, file_name), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        compared = compare(folder, model)
        os.rename(folder, out)  # onto nothing, or an empty directory
    except OSError as error:
        raise UserError(f"out={out}: cannot be written: {one_line(error)}") from error
    finally:
        if folder is not None:
            with contextlib.suppress(FileNotFoundError):  # it has become `out`
                shutil.rmtree(folder)
    return compared


@torch.no_grad()
def compare(folder: str, model: GPT) -> str:
    """Whether Transformers gives the logits of `model` for the exported directory, in words. Raises
    `UserError` if it gives others: it knows GPT-2 and nanochat, and nothing of an edited `GPT`.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, logging

        AutoConfig.from_pretrained(folder)
    except Exception as error:  # it is not there, or of a version that does not know nanochat
        return f"not tried in Transformers: {one_line(error)[:300]}"
    logging.disable_progress_bar()
    ids = torch.arange(model.config.block_size)[None] % model.config.vocab_size
    try:
        theirs = AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits
    except Exception as error:  # it has many for weights that it does not expect
        raise UserError(
            f"Transformers could not load it: was model.py changed? {one_line(error)[:300]}"
        ) from error
    off = (theirs[..., : model.config.vocab_size] - model(ids)[0]).abs().max().item()
    if not off < 0.01:
        raise UserError(
            f"Transformers' model would give other logits, by up to {off:.2g}: was model.py "
            "changed? What it computes must be GPT-2 or nanochat"
        )
    return "Transformers gives the same logits"


def check_is_free(out: str) -> None:
    """Raises `UserError` unless `out` is not there yet, or an empty directory."""
    if os.path.lexists(out) and not (os.path.isdir(out) and not os.listdir(out)):
        raise UserError(f"out={out}: already exists; give another name, or remove it")


def model_card(snapshot: Snapshot, config: CompleteConfig, path: str) -> str:
    """`README.md`: what the model is, how it was trained and how well, and how to use it."""
    data, optimizer, trainer = (
        snapshot.config.get(group, {}) for group in ("data", "optimizer", "trainer")
    )
    parameters = sum(
        tensor.numel()
        for name, tensor in snapshot.model_state.items()
        if not (name == "head.weight" and config.tie_weights)
    )
    characters = snapshot.windows_seen * config.block_size
    rows = {
        "held-out loss": held_out_loss(snapshot),
        "optimizer steps": f"{snapshot.step:,}",
        "characters trained on": f"{characters:,}",
        "started from": snapshot.config.get("init_from") or "fresh weights",
        "text": f"{text_name(data)}SHA-256 `{snapshot.text_digest}`",
        "distinct characters": len(snapshot.vocabulary),
        "characters of context": config.block_size,
        "parameters": f"{parameters:,}",
        "architecture": f"`{config.arch}`: {config.n_layer} blocks, {config.n_head} heads, "
        f"{config.n_embd} wide",
        "batch": f"{trainer.get('batch_size')} windows of {config.block_size} characters",
        "optimizer": f"{optimizer['name']}, learning rate {optimizer['learning_rate']}, "
        f"schedule {optimizer['schedule']}"
        if "name" in optimizer
        else None,
        "computed in": snapshot.choices.get("amp_dtype"),
        "seed": snapshot.seed,
    }
    # A program of its own may have kept less of how it trained.
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value is not None)
    notes = [
        f"One token is one character. The tokenizer gives characters that are not in the training "
        f"text one token of their own, U+{ord(unknown_token(snapshot.vocabulary)):04X} (id "
        f"{config.vocab_size}): everything else in the text stays as it is. It was never trained; "
        "its embedding is the mean of all, and it is never generated. The logits of the ids below "
        "are those of the trained model; leave its own out to measure the loss above.",
        f"The model sees {config.block_size} characters: prompt and continuation together, unless "
        "you set another `max_length`"
        + (
            "." if config.arch == "modern" else ", which its learned positions do not reach beyond."
        ),
    ]
    if config.arch == "gpt2" and not config.bias:
        notes.append("It was trained without biases; Transformers' GPT-2 has them: they are zero.")
    paragraphs = "\n\n".join(notes)
    name = snapshot.config.get("run_name", "run")
    # With the quotes that ruff wants of it.
    literal = json.dumps(opening(snapshot.vocabulary), ensure_ascii=False)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- character-level
---

# {name}

A character-level GPT, exported from `{os.path.basename(path)}` of the run `{name}`.

```python
from transformers import pipeline

print(pipeline("text-generation", "PATH_OR_NAME")({literal})[0]["generated_text"])
```

| | |
|---|---|
{table}

{paragraphs}
"""


def text_name(data: dict[str, Any]) -> str:
    """Which text, without the folders of this machine, and a comma; nothing if it is not known."""
    path = data.get("url") or data.get("path") or []
    paths = path if isinstance(path, list) else [path]
    return "".join(f"{p if '://' in p else os.path.basename(p)}, " for p in paths)


def held_out_loss(snapshot: Snapshot) -> str:
    """The newest held-out loss, and the step it was taken at where that is another."""
    if snapshot.loss is None:
        return "not measured"
    at = "" if snapshot.loss_step == snapshot.step else f", at step {snapshot.loss_step}"
    return f"{snapshot.loss:.4f} nats per character ({snapshot.loss / math.log(2):.4f} bits){at}"


def hub(push_to: str) -> Any:
    """A client for the Hugging Face Hub, logged in; `UserError` where that is not possible."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            f"push_to={push_to}: needs huggingface_hub: pip install huggingface_hub"
        ) from error
    if push_to.count("/") != 1 or not all(push_to.split("/")):
        raise UserError(f"push_to={push_to}: must be USER/NAME")
    if huggingface_hub.get_token() is None:
        raise UserError(f"push_to={push_to}: there is no token: hf auth login, or set HF_TOKEN")
    return huggingface_hub.HfApi()


def push(client: Any, out: str, push_to: str) -> str:
    """Uploads the directory `out` as the model `push_to`, made if need be; returns its address.

    Raises `UserError` if that fails; the directory stays.
    """
    try:
        client.create_repo(push_to, exist_ok=True)
        client.upload_folder(repo_id=push_to, folder_path=out, commit_message="Export")
    except Exception as error:  # of the Hub, of HTTP, of the network: all mean the same
        raise UserError(
            f"push_to={push_to}: was not uploaded, {out} is written: {one_line(error)}"
        ) from error
    return f"{client.endpoint}/{push_to}"


def main(arguments: list[str]) -> None:
    config = parse(ExportConfig, arguments)
    check_is_free(config.out)
    client = hub(config.push_to) if config.push_to else None
    path = choose_snapshot(config.snapshot, config.run_dir)
    snapshot = load_full(path)
    if model_has_changed(path):
        print(f"[{CHANGED}]", file=sys.stderr)
    compared = export(snapshot, path, config.out)
    print(f"{config.out}: {path}, {snapshot}; {compared}")
    if config.push_to:
        print(f"{config.push_to}: uploaded to {push(client, config.out, config.push_to)}")


if __name__ == "__main__":
    run_program(main)
