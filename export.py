"""Exports a trained model: for Hugging Face's Transformers, or as a single snapshot file.

python export.py out=my_gpt                                     the newest run, its best snapshot
python export.py run_dir=runs/NAME out=my_gpt                   another run
python export.py snapshot=runs/NAME/gpt_snapshot.pt out=my_gpt
python export.py run_dir=runs/NAME out=single.pt                a sharded snapshot in one file

`AutoModelForCausalLM.from_pretrained("my_gpt")` gives the same logits, `main.py init_from=my_gpt`
fine-tunes it, and `hf upload USER/NAME my_gpt` publishes it. It needs safetensors (pip install
safetensors).
"""

import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config.arguments import parse, run_program
from engine.errors import UserError, one_line
from engine.files import atomic_write
from engine.interop.transformers import to_files, unknown_token
from engine.run.directory import choose_snapshot
from engine.snapshots.sharded import load_full
from engine.snapshots.snapshot import Snapshot
from engine.snapshots.storage import is_local
from model import GPT
from sample import load_model, opening


@dataclass
class ExportConfig:
    """What to write, and where; every field is an argument, `name=value`."""

    out: str  # the directory to write; FILE.pt: a single snapshot file
    run_dir: str | None = None  # the run; without: the newest under runs/
    snapshot: str | None = None  # a file or URL; without: the best of run_dir, or else its latest

    def __post_init__(self):
        if not is_local(self.out):
            raise UserError(f"out={self.out}: must be local")
        if os.path.lexists(self.out):
            raise UserError(f"out={self.out}: already exists; give another name, or remove it")


def main(arguments: list[str]) -> None:
    config = parse(ExportConfig, arguments)
    path = choose_snapshot(config.snapshot, config.run_dir)
    snapshot = load_full(path)
    line = f"{config.out}: {path}, {snapshot}"
    try:
        if config.out.endswith(".pt"):
            os.makedirs(os.path.dirname(os.path.abspath(config.out)), exist_ok=True)
            with atomic_write(config.out, "w+b") as file:
                snapshot.write(file)
        else:
            line += f"; {export(snapshot, path, config.out)}"
    except OSError as error:
        raise UserError(f"out={config.out}: cannot be written: {one_line(error)}") from error
    print(line)


def export(snapshot: Snapshot, path: str, out: str) -> str:
    """Writes the model of `snapshot`, read from `path`, into the new directory `out`, atomically.
    Returns a sentence on whether Transformers, if it is installed, gives the same logits.

    Raises `UserError` if it gives others or has no such model, and OSError if `out` cannot be written.
    """
    if snapshot.encoding == "bytes":
        raise UserError(f"{path}: a model of bytes (data.encoding=bytes) cannot be exported")
    model = load_model(snapshot, "cpu")
    files = to_files(dataclasses.asdict(model.config), snapshot.model_state, snapshot.vocabulary)
    files["README.md"] = model_card(snapshot, model, path).encode()
    parent = os.path.dirname(os.path.abspath(out))
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=parent) as temporary:
        folder = Path(temporary, "model")
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        compared = compare(str(folder), model)
        folder.rename(out)
    return compared


@torch.no_grad()
def compare(folder: str, model: GPT) -> str:
    """A sentence on whether Transformers gives the logits of `model` for the exported directory.
    Raises `UserError` if it gives others: it has GPT-2 and nanochat, not an edited `GPT`.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, logging

        AutoConfig.from_pretrained(folder)
    except Exception as error:  # not installed, or too old for nanochat
        return f"not compared with Transformers: {one_line(error)[:300]}"
    logging.disable_progress_bar()
    ids = torch.arange(model.config.block_size)[None] % model.config.vocab_size
    try:
        theirs = AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits
    except Exception as error:  # of many types, for weights that it does not expect
        raise UserError(
            f"Transformers cannot load it: was model.py changed? {one_line(error)[:300]}"
        ) from error
    off = (theirs[..., : model.config.vocab_size] - model(ids)[0]).abs().max().item()
    if not off < 0.01:
        raise UserError(
            f"Transformers gives other logits, by up to {off:.2g}: was model.py changed? Only "
            "GPT-2 and nanochat can be exported"
        )
    return "Transformers gives the same logits"


def model_card(snapshot: Snapshot, model: GPT, path: str) -> str:
    """`README.md`: what the model is, how it was trained and how well, and how to use it."""
    config: Any = model.config
    name = snapshot.config.get("run_name", "run")
    text = source_name(snapshot.config.get("data", {}))
    parameters = sum(p.numel() for p in model.parameters())
    prompt = json.dumps(opening(snapshot.vocabulary), ensure_ascii=False)  # in double quotes
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

print(pipeline("text-generation", "PATH_OR_NAME")({prompt})[0]["generated_text"])
```

| | |
|---|---|
| snapshot | {snapshot} (nats per character) |
| characters trained on | {snapshot.windows_seen * config.block_size:,} |
| started from | {snapshot.config.get("init_from") or "fresh weights"} |
| text | {text}SHA-256 `{snapshot.text_digest}` |
| architecture | `{config.arch}`: {config.n_layer} blocks, {config.n_head} heads, {config.n_embd} wide |
| parameters | {parameters:,} |

One token is one character. Characters that are not in the training text become the token
U+{ord(unknown_token(snapshot.vocabulary)):04X} (id {config.vocab_size}), which was not trained and is never generated.
The logits for the ids below {config.vocab_size} are the trained model's; drop the last one to measure the loss above.
The model was trained on {config.block_size} characters of context, the default `max_length` of a generated text.
"""


def source_name(data: dict[str, Any]) -> str:
    """Which text, without this machine's folders, and a comma; "" if it is not known."""
    path = data.get("url") or data.get("path") or []
    paths = path if isinstance(path, list) else [path]
    return "".join(f"{p if '://' in p else os.path.basename(p)}, " for p in paths)


if __name__ == "__main__":
    run_program(main, ExportConfig)
