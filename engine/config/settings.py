"""Settings by dotted key: which ones a resumed run may not change, and which ones affect the loss."""

import dataclasses
import json
from typing import Any

# These decide which characters a step sees, and which are scored.
WINDOWS = {
    "data.block_size", "data.train_split", "data.final_split", "data.truncate", "data.shuffle",
    "data.encoding", "trainer.batch_size",
}  # fmt: skip
# Fixed on resume, like the model: with a change midway, no configuration would reproduce the run.
FIXED = {
    *WINDOWS,
    "optimizer.name", "optimizer.class",  # another optimizer state; the class: without main.py
    "trainer.seed",  # another order of the windows
    "init_from",  # other initial weights
}  # fmt: skip
# These change the loss at a step no more than rounding or another seed.
IRRELEVANT = {
    "run_name", "run_dir", "samples", "report", "trainer.trackers",  # names and outputs
    "model.vocab_size", "model.block_size",  # follow from the data
    "data.url", "data.sha256", "data.cache_dir",  # a text is compared by its content
    "model.activation_checkpointing", "trainer.micro_batch_size",  # memory for time
    "trainer.seed",
    "trainer.device", "trainer.threads", "trainer.strategy",  # rounding
    "trainer.compile", "trainer.deterministic", "trainer.cuda_graph",
    "trainer.data_loader_workers",  # speed
    "trainer.log_every_steps", "trainer.eval_every_steps",  # what is measured
    "trainer.patience",  # ends earlier, same losses
    "trainer.save_every", "trainer.save_every_steps", "trainer.save_every_minutes",  # what is saved
    "trainer.keep_snapshots",
    "trainer.snapshot_path", "trainer.snapshot_format", "trainer.resume",
    "trainer.max_save_failures", "trainer.timeout_s",  # when to give up
}  # fmt: skip
MODEL_MAY_CHANGE = {"model.model_type", "model.activation_checkpointing"}  # a name; memory for time


def is_fixed(key: str) -> bool:
    """Whether a resumed run may not change the setting `key`."""
    return key in FIXED or (key.startswith("model.") and key not in MODEL_MAY_CHANGE)


def as_plain(value: Any) -> Any:
    """`value` in JSON's types, which a snapshot can hold: dataclasses as dictionaries, others as text."""
    text = json.dumps(value, default=lambda x: vars(x) if dataclasses.is_dataclass(x) else str(x))
    return json.loads(text)


def as_typed(value: Any) -> str:
    """A value in command-line syntax: null and true, not None and True."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def defaults_of(configs: dict[str, Any]) -> dict[str, Any]:
    """The defaults of dataclasses by dotted key, except None and default factories."""
    return {
        f"{name}.{field.name}": field.default
        for name, config in configs.items()
        for field in dataclasses.fields(config)
        if isinstance(field.default, bool | int | float | str)
    }


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
