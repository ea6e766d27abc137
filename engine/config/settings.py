"""The settings of a run by their dotted keys: which differ, and what it means if they do."""

from typing import Any

# What a run may not change when it goes on: the result would be neither the old run's nor the new
# one's. Of the model, that is everything but these. The text is compared by its content, not by
# where it came from.
FREE_OF_MODEL = ("model.model_type", "model.attention", "model.activation_checkpointing")
FIXED = (
    "data.block_size",
    "data.train_split",
    "data.truncate",
    "optimizer.name",
    "optimizer.decay_embeddings",
    "trainer.seed",
    "trainer.batch_size",
)
# Settings that cannot move the loss by more than rounding does, or than seeds do.
HARMLESS = (
    "data.cache_dir",
    "data.url",
    "data.sha256",
    "model.attention",
    "model.activation_checkpointing",
    "trainer.micro_batch_size",
    "trainer.data_loader_workers",
    "trainer.snapshot_path",
    "trainer.save_every",
    "trainer.save_every_steps",
    "trainer.keep_snapshots",
    "trainer.snapshot_format",
    "trainer.max_save_failures",
    "trainer.eval_every_steps",
    "trainer.log_every_steps",
    "trainer.seed",
    "trainer.device",
    "trainer.threads",
    "trainer.compile",
    "trainer.deterministic",
    "trainer.strategy",
    "trainer.offload",
    "trainer.resume",
    "trainer.timeout_s",
)
# Settings that, like every one of the model, make losses at the same step incomparable.
NOT_COMPARABLE = (
    "init_from",
    "data.block_size",
    "data.train_split",
    "data.truncate",
    "trainer.max_steps",
    "trainer.max_epochs",
    "trainer.batch_size",
)
# Never counted as a change from the recipe: names of the run, what its text gives, and settings
# without effect on training.
OWN = (
    "run_name",
    "run_dir",
    "model.vocab_size",
    "model.block_size",
    "data.fallback",
    "report",
    "samples",
    "trainer.trackers",
)


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The dotted keys whose values differ between two resolved configurations, with (old, new)."""
    old, new = flatten(old), flatten(new)
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def is_fixed(key: str) -> bool:
    """Whether a run may not change the setting `key` when it goes on."""
    return key in FIXED or (key.startswith("model.") and key not in FREE_OF_MODEL)
