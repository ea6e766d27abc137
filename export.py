"""Exports a trained model: as a web page, for Hugging Face's Transformers, or as a single snapshot file.

python export.py page=play.html                                 a page that runs the model, in any browser
python export.py page=play.html snapshots=[a.pt,b.pt]           several models side by side
python export.py out=my_gpt                                     the newest run, its best snapshot
python export.py run_dir=runs/NAME out=my_gpt                   another run
python export.py snapshot=runs/NAME/gpt_snapshot.pt out=my_gpt
python export.py run_dir=runs/NAME out=single.pt                a sharded snapshot in one file

`AutoModelForCausalLM.from_pretrained("my_gpt")` gives the same logits (with token shift or n-gram embeddings it needs
`trust_remote_code=True`), `main.py init_from=my_gpt` fine-tunes it, and `hf upload USER/NAME my_gpt` publishes it. It
needs safetensors (pip install safetensors). A page needs neither Python nor a network where it is opened.
"""

import dataclasses
import html
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config.arguments import parse, run_program
from engine.config.schema import NOT_ARCHITECTURE
from engine.errors import UserError, check_only_one, one_line
from engine.files import atomic_write, is_local, is_page_of, masked, writes
from engine.generation import default_prompt
from engine.interop import page
from engine.interop.transformers import EXPORTED, is_shifted, to_files, unknown_token
from engine.run.directory import choose_snapshots
from engine.snapshots.sharded import load_full
from engine.snapshots.snapshot import Snapshot, probe_ids
from engine.text.sources import listed
from model import GPT
from sample import load_model


@dataclass
class ExportConfig:
    """Command-line arguments, `name=value`."""

    out: str | None = None  # the directory to write; FILE.pt: a single snapshot file
    page: str | None = None  # or the web page to write, or to replace
    run_dir: str | None = None  # the run; null: the newest under runs/
    snapshot: str | None = None  # a file, URL or run; null: the best of run_dir, or its latest
    snapshots: list[str] | None = None  # for page=: several, [a.pt,b.pt]

    def __post_init__(self):
        check_only_one(out=self.out, page=self.page)
        if self.out is None and self.page is None:
            raise UserError("nothing to write: give out= or page=")
        name, path = ("out", self.out) if self.out else ("page", self.page or "")
        if not is_local(path):
            raise UserError(f"{name}={path}: must be local")
        if os.path.lexists(path) and not (self.page and is_page_of(path, "export.py")):
            raise UserError(f"{name}={path}: already exists; give another name, or remove it")
        if self.out and self.snapshots:
            raise UserError("snapshots= requires page=")


def main(arguments: list[str]) -> None:
    config = parse(ExportConfig, arguments)
    paths = choose_snapshots(config.snapshots, config.snapshot, config.run_dir)
    name, out = ("page", config.page) if config.page else ("out", str(config.out))
    snapshots = {path: load_full(path) for path in paths}
    with writes(name, out):
        os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
        if config.page:
            content = page.render([page_model(snapshot, path) for path, snapshot in snapshots.items()])
            with atomic_write(out) as file:
                file.write(content)
            said = f"{len(content) / 1e6:.1f} MB"
        elif out.endswith(".pt"):
            with atomic_write(out, "wb") as file:
                file.write(snapshots[paths[0]].to_bytes())
            said = "one file"
        else:
            said = export(snapshots[paths[0]], paths[0], out)
    print(f"{out}: {'; '.join(f'{masked(path)}, {snapshot}' for path, snapshot in snapshots.items())}; {said}")


@torch.no_grad()
def page_model(snapshot: Snapshot, path: str) -> dict[str, Any]:
    """Serializes the model of `snapshot`, read from `path`, for the page. Raises `UserError`."""
    snapshot = dataclasses.replace(snapshot, model_state=page.round_to_float16(snapshot.model_state))
    try:
        model = load_model(snapshot, "cpu", strict=True)
        settings = known_settings(model, "the page has")
        ids = probe_ids(model.config.vocab_size, model.config.block_size)
        return {
            "name": snapshot.config.get("run_name", "run"),
            "facts": facts(snapshot, model),
            "prompt": default_prompt(snapshot.vocabulary),
            "vocabulary": list(snapshot.vocabulary),
            "encoding": snapshot.encoding,
            **page.serialize(settings, snapshot.model_state, ids, model(ids[None])[0][0, -1]),
        }
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def known_settings(model: GPT, where: str) -> dict[str, Any]:
    """The model's settings. Raises `UserError` for an option that model.py alone has: there is none `where`."""
    settings = dataclasses.asdict(model.config)
    for field in dataclasses.fields(model.config):
        if field.name not in EXPORTED | NOT_ARCHITECTURE and settings[field.name] != field.default:
            raise UserError(f"model.{field.name}={settings[field.name]}: {where} no such setting")
    return settings


def facts(snapshot: Snapshot, model: GPT) -> list[tuple[str, str]]:
    """Labels and values that describe the model, its training and its loss."""
    config = model.config
    kind = config.arch + ", token shift" * config.token_shift + ", n-gram embeddings" * bool(config.ngram_rows)
    data = snapshot.config.get("data", {})
    sources = map(public_name, listed(data.get("url") or data.get("path") or []))
    unit = f" (nats per {snapshot.unit})" if snapshot.loss is not None else ""
    return [
        ("snapshot", f"{snapshot}{unit}"),
        (f"{snapshot.unit}s trained on", f"{snapshot.windows_seen * config.block_size:,}"),
        ("started from", public_name(snapshot.config.get("init_from") or "fresh weights")),
        ("text", ", ".join((*sources, f"SHA-256 {snapshot.text_digest}"))),
        (
            "architecture",
            f"{kind}: blocks: {config.n_layer}, heads: {config.n_head}, "
            f"width: {config.n_embd}, context: {config.block_size} {snapshot.unit}s",
        ),
        ("parameters", f"{sum(p.numel() for p in model.parameters()):,}"),
    ]


def export(snapshot: Snapshot, path: str, out: str) -> str:
    """Writes the model of `snapshot`, read from `path`, into the new directory `out`, atomically. Returns
    what `compare` says. Raises `UserError` if Transformers has no such model or gives other logits.
    """
    model = load_model(snapshot, "cpu", strict=True)
    settings = known_settings(model, "Transformers' models have")
    files = to_files(settings, snapshot.model_state, snapshot.vocabulary, snapshot.encoding)
    files["README.md"] = model_card(snapshot, model, path, Path(out).name).encode(errors="replace")
    with tempfile.TemporaryDirectory(prefix=".export-", dir=os.path.dirname(os.path.abspath(out))) as temporary:
        folder = Path(temporary, "model")
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        compared = compare(str(folder), model)
        folder.rename(out)
    return compared


@torch.no_grad()
def compare(folder: str, model: GPT) -> str:
    """Compares the logits of Transformers, from the exported directory, with those of `model`; returns a sentence.
    Raises `UserError` if they differ: Transformers has GPT-2 and nanochat, not an edited `GPT`.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, logging

        AutoConfig.from_pretrained(folder, trust_remote_code=True)
    except (ImportError, ValueError, KeyError) as error:  # not installed, or too old for nanochat
        return f"not compared with Transformers: {one_line(error)[:300]}"
    logging.disable_progress_bar()
    ids = probe_ids(model.config.vocab_size, model.config.block_size)[None]
    try:
        theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)(ids).logits
    except Exception as error:  # of many types, for unexpected weights
        why = f"was model.py changed? {one_line(error)[:300]}"
        raise UserError(f"Transformers cannot load it: {why}") from error
    off = (theirs[..., : model.config.vocab_size] - model(ids)[0]).abs().max().item()
    if not off < 0.01:
        raise UserError(f"Transformers' logits differ by {off:.2g}: was model.py changed?")
    return "Transformers gives the same logits"


def model_card(snapshot: Snapshot, model: GPT, path: str, folder: str) -> str:
    """`README.md` of the directory `folder`: the model, its training, its loss and its use."""
    config = model.config
    name = html.escape(snapshot.config.get("run_name", "run"))  # Markdown has HTML in it
    unknown = ord(unknown_token(snapshot.vocabulary, snapshot.encoding))
    trust = ", trust_remote_code=True" if is_shifted(dataclasses.asdict(config)) else ""
    rows = "\n".join(f"| {label} | {html.escape(value)} |" for label, value in facts(snapshot, model))
    longer = "Longer inputs raise an IndexError.\n" * (config.arch == "gpt2")  # its positions are learned
    prompt = json.dumps(default_prompt(snapshot.vocabulary), ensure_ascii=False)  # in double quotes
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- character-level
---

# {name}

A character-level GPT, exported from `{public_name(path)}` of the run `{name}`.

```python
from transformers import pipeline

# This directory, or USER/NAME once it is uploaded. pip install transformers
print(pipeline("text-generation", {json.dumps(folder)}{trust})({prompt})[0]["generated_text"])
```

| | |
|---|---|
{rows}

One token is one {snapshot.unit}. Those that are not in the training text become the token
U+{unknown:04X} (id {config.vocab_size}), which was not trained and is never generated.
To measure a loss, drop its logit, the last one; the others are the trained model's.
The model was trained on {config.block_size} {snapshot.unit}s of context, the default `max_length` of a generated text.
{longer}"""


def public_name(path: str) -> str:
    """A URL without what may be secret; the last part of a local or archive's path."""
    path = path.rpartition("::")[2].removeprefix("file://").removeprefix("local://")
    return os.path.basename(path.rstrip("/")) if is_local(path) else masked(path)


if __name__ == "__main__":
    run_program(main, ExportConfig)
