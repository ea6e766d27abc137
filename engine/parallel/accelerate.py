"""Accelerate: the environment variables of `accelerate launch`, translated to settings.

Its flags and its configuration file reach the program as variables alone.
"""

import logging
import os

log = logging.getLogger("gpt")
DEFAULTS = ("", "no", "false", "1", "auto")  # what Accelerate sets unasked
SHARDED = "trainer.strategy=fsdp shards the model over all processes"
# For each variable: the setting that a value of it stands for, and the advice for any other value.
VARIABLES = {
    "ACCELERATE_USE_CPU": ({"true": "trainer.device=cpu"}, ""),
    "ACCELERATE_USE_FSDP": ({"true": "trainer.strategy=fsdp"}, ""),
    "ACCELERATE_MIXED_PRECISION": (
        {"bf16": "trainer.amp_dtype=bfloat16", "fp16": "trainer.amp_dtype=float16"},
        "trainer.amp_dtype is bfloat16, float16 or float32",
    ),
    "ACCELERATE_DYNAMO_BACKEND": ({"inductor": "trainer.compile=true"}, "trainer.compile=true is inductor"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        {},
        "trainer.batch_size counts the windows of all processes, and trainer.micro_batch_size divides them",
    ),
    "ACCELERATE_USE_DEEPSPEED": ({}, SHARDED),
    "ACCELERATE_USE_MEGATRON_LM": ({}, SHARDED),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ({}, SHARDED),
}


def is_launcher() -> bool:
    """Whether `accelerate launch` started this process."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ


def launch_settings() -> list[str]:
    """The overrides that `accelerate launch` asks for; logs them, and what is not used."""
    found = []
    for name, (settings, instead) in VARIABLES.items():
        value = os.environ.get(name, "").lower()
        if value in settings:
            found.append(settings[value])
        elif value not in DEFAULTS:
            log.warning("%s=%s is not used: %s", name, value, instead)
    if found:
        log.info("accelerate  %s, as launched, unless typed", " ".join(found))
    return found
