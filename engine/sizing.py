"""Sizing: chooses the model, the regularization and the steps for a text, a machine and a time.

The rule was fitted to a grid of runs (benchmarks/sizing.md). It works in three stages: the speed of the machine
and the length of the text give the model and its context; the measured time of a step of that model
gives the number of steps; and the passes over the text that these make give the regularization.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

from engine.errors import UserError
from engine.run.progress import duration

log = logging.getLogger("gpt")

# The fields that are chosen where they are null. Snapshots keep them, and config.yaml shows them.
SIZES = ("data.block_size", "model.n_layer", "model.n_head", "model.n_embd", "trainer.batch_size")
DROPOUT = ("model.embd_pdrop", "model.resid_pdrop", "model.attn_pdrop")
REGULARIZATION = (*DROPOUT, "optimizer.weight_decay")
CHOSEN = (*SIZES, *REGULARIZATION, "data.train_split", "optimizer.learning_rate")

REFERENCE = (4, 128, 128)  # layers, width and context with which the machine's speed is measured
STEP_CHARACTERS = 3072
EVALUATIONS = 20  # at most, of a run
EVALUATION_SHARE = 0.04  # of the time, for all evaluations
EVALUATION_COST = 0.4  # of a character, relative to training on it
MIN_HELD_OUT = 20_000  # characters, of a text that has ten times as many
FINISH_S = 1.5  # seconds for the last snapshot, the report and the end of the process
MIN_CHARACTERS = 1000  # of a text


def get(config: Any, key: str) -> Any:
    """The value of the field `key`, `group.name`."""
    group, name = key.split(".")
    return getattr(getattr(config, group), name)


def put(config: Any, values: dict[str, Any]) -> None:
    for key, value in values.items():
        group, name = key.split(".")
        setattr(getattr(config, group), name, value)


def fill(config: Any, values: dict[str, Any]) -> None:
    """Sets those fields of `values` that are null."""
    put(config, {key: value for key, value in values.items() if get(config, key) is None})


def is_needed(config: Any) -> bool:
    """Whether something is to be chosen."""
    return config.trainer.max_minutes is not None or any(get(config, key) is None for key in CHOSEN)


def recall(config: Any, recorded: dict[str, Any]) -> None:
    """Fills in what was chosen when the run started, from the settings `recorded` in its snapshot. Another
    time than then changes the steps in proportion. Raises `UserError` for a run that had no time.
    """
    trainer, before = config.trainer, recorded.get("trainer", {})
    if trainer.max_steps is None and trainer.max_epochs is None:
        if before.get("max_minutes") is None:
            raise UserError(
                f"trainer.max_minutes={trainer.max_minutes:g}: this run was started without it; to train "
                "longer, raise trainer.max_steps"
            )
        trainer.max_steps = round(before["max_steps"] * trainer.max_minutes / before["max_minutes"])
    for key in (*CHOSEN, "trainer.eval_every_steps"):
        group, name = key.split(".")
        fill(config, {key: recorded.get(group, {}).get(name)})


def choose(
    config: Any,
    characters: int,
    processes: int,
    seconds_left: Callable[[], float],
    seconds_per_step: Callable[[], float],
) -> list[str]:
    """Chooses what is null, for a text of so many `characters`; what is given stands. Returns the overrides
    that choose the same.

    `seconds_left()` is what is left of `trainer.max_minutes`, and `seconds_per_step()` measures a training
    step of `config`. Raises `UserError` for a text or a time that is too short.
    """
    trainer = config.trainer
    null = [key for key in CHOSEN if get(config, key) is None]
    if null and characters < MIN_CHARACTERS:
        raise UserError(
            f"data.path={config.data.path}: {characters:,} characters are too few to choose a model for; "
            f"{MIN_CHARACTERS:,} are needed, or a recipe: experiment=NAME"
        )
    sizes = {key: get(config, key) for key in SIZES}
    is_limited = None in sizes.values()
    if is_limited:
        fill(config, sizes_of(config, characters, *REFERENCE, processes) | FIRST_GUESS)
        steps, plan = trainer.max_steps, f"{trainer.max_steps} steps"
        if trainer.max_minutes is not None:
            step_s, seconds = seconds_per_step(), seconds_left()
            steps = seconds / step_s
            speed = step_characters(config) / step_s
            plan = f"{duration(seconds)} at {speed:,.0f} characters/s with {REFERENCE[1]} wide"
        operations = steps * step_flops(config)
        put(config, sizes)
        fill(config, sizes_of(config, characters, *best_sizes(characters, operations), processes))
        log.info(
            "sizing      %d layers, %d wide, context %d: for %s characters, and %s",
            config.model.n_layer, config.model.n_embd, config.data.block_size, f"{characters:,}", plan,
        )  # fmt: skip
    if "optimizer.learning_rate" in null:
        put(config, {"optimizer.learning_rate": learning_rate(config.model.n_embd)})
    fill(config, FIRST_GUESS)
    chosen = [*null]
    if trainer.max_minutes is not None:
        chosen += ["trainer.max_steps", "trainer.eval_every_steps"]
        step_s, seconds = seconds_per_step(), seconds_left()
        if "data.train_split" in null:
            affordable = EVALUATION_SHARE / 2 * seconds / evaluation_s(config, step_s)
            held_out = min(characters / 10, max(MIN_HELD_OUT, affordable))
            put(config, {"data.train_split": 1 - held_out / characters})
        choose_steps(config, characters, is_limited, step_s, seconds)
    regularized = [key for key in REGULARIZATION if key in null]
    if regularized:
        passes = (
            trainer.max_steps * step_characters(config) / (characters * config.data.train_split)
        )
        dropout, weight_decay = regularization(passes)
        values = dict.fromkeys(DROPOUT, dropout) | {"optimizer.weight_decay": weight_decay}
        put(config, {key: values[key] for key in regularized})
        log.info(
            "sizing      dropout %g, weight decay %g: for %.3g passes over the text",
            config.model.resid_pdrop, config.optimizer.weight_decay, passes,
        )  # fmt: skip
    return [f"{key}={get(config, key)}" for key in chosen] + ["trainer.max_minutes=null"]


def evaluation_s(config: Any, step_s: float) -> float:
    """Seconds to evaluate one character, where a training step takes `step_s`."""
    return EVALUATION_COST * step_s / step_characters(config)


def choose_steps(
    config: Any, characters: int, is_limited: bool, step_s: float, seconds: float
) -> None:
    """Chooses the steps that `seconds` allow, at `step_s` seconds each, and the steps between evaluations.
    If `is_limited`, no more than pay for a text of so many `characters`.
    """
    trainer = config.trainer
    training = int(characters * config.data.train_split)
    each = evaluation_s(config, step_s) * (characters - training)
    left = seconds - FINISH_S
    if trainer.eval_every_steps is not None:
        fitting = int((left - each) / (step_s + each / trainer.eval_every_steps))
    else:
        evaluations = min(max(int(EVALUATION_SHARE * left / each), 2), EVALUATIONS)
        fitting = int((left - evaluations * each) / step_s)
    if fitting < 1:
        raise UserError(
            f"trainer.max_minutes={trainer.max_minutes:g}: too short: {max(0.0, seconds):.1f} s are left after "
            f"starting, and a step takes {step_s:.2f} s"
        )
    pays = math.inf
    if is_limited:
        pays = math.ceil(useful_passes(training) * training / step_characters(config))
    typed = trainer.max_steps or math.inf
    trainer.max_steps = int(min(fitting, pays, typed))
    why = f"{fitting:,} fit into the {duration(seconds)} left"
    if trainer.max_steps == pays:
        why += "; more would only overfit"
    if trainer.max_steps == typed:
        why += "; trainer.max_steps"
    log.info("sizing      %s steps: %s", f"{trainer.max_steps:,}", why)
    if trainer.eval_every_steps is None:
        trainer.eval_every_steps = math.ceil(trainer.max_steps / evaluations)


# --------------------------------------------------------------------------------------------------
# The rule

# Before anything is known: what a step is measured with.
FIRST_GUESS = {
    **dict.fromkeys(DROPOUT, 0.1), "optimizer.weight_decay": 0.2,
    "optimizer.learning_rate": 8e-3, "data.train_split": 0.9,
}  # fmt: skip


def sizes_of(
    config: Any, characters: int, layers: int, width: int, context: int, processes: int
) -> dict[str, int]:
    """All sizes, from layers, width and context; what `config` has decides the rest."""
    heads, own_width = config.model.n_head, config.model.n_embd
    width = own_width or width
    if heads is None:  # of 64 channels, or of 32 in a narrow model
        most = max(1, width // (64 if width >= 128 else 32))
        heads = next(
            count for count in range(most, 0, -1) if width % (2 * count) == 0 or count == 1
        )
    context = config.data.block_size or min(context, max(1, characters // 20))
    windows = -(-STEP_CHARACTERS // (context * processes)) * processes
    return {
        "data.block_size": context,
        "model.n_layer": layers,
        "model.n_head": heads,
        "model.n_embd": own_width or -(-width // (2 * heads)) * 2 * heads,
        "trainer.batch_size": windows,
    }


def best_sizes(characters: int, operations: float) -> tuple[int, int, int]:
    """Layers, width and context for a text of so many `characters` and so many floating-point operations
    of training.
    """
    return 4, 128, 128


def useful_passes(characters: int) -> float:
    """Passes over a training text of so many `characters` beyond which training does not pay."""
    return 1000.0


def regularization(passes: float) -> tuple[float, float]:
    """Dropout and weight decay for so many passes over the text."""
    return 0.1, 1.0


def learning_rate(width: int) -> float:
    """Peak learning rate of Muon for a model of this width."""
    return 8e-3 * (128 / width) ** 0.4


def step_characters(config: Any) -> int:
    return config.trainer.batch_size * config.data.block_size


def step_flops(config: Any) -> float:
    """Floating-point operations of a training step, as `GPT.flops_per_token` but for the vocabulary."""
    layers, width = config.model.n_layer, config.model.n_embd
    per_character = 72 * layers * width**2 + 12 * layers * width * config.data.block_size
    return step_characters(config) * per_character
