"""Sizing: chooses the model, the regularization and the steps for a text, a machine and a time (`choose_sizes`).

The model, its context and dropout follow from the throughput of a reference model and the length of the text. The steps
follow from the step time of that model; learning rate and weight decays follow from the passes over the text.
"""

import contextlib
import copy
import dataclasses
import logging
import math
import re
import shlex
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig

from engine import sizing_rule as rule
from engine.config import auto
from engine.config.overrides import override_key, quoted, without
from engine.config.settings import flatten
from engine.errors import UserError
from engine.machine import hardware
from engine.parallel import distributed
from engine.parallel.distributed import World
from engine.run import memory, plan
from engine.run.evaluation import MIN_HALVED
from engine.run.metrics import duration
from engine.text import unit_of

log = logging.getLogger("gpt")

# The fields that are chosen if null. Snapshots and config.yaml store them.
SIZES = ("data.block_size", "model.n_layer", "model.n_head", "model.n_embd", "trainer.batch_size")
DROPOUT = ("model.embd_pdrop", "model.resid_pdrop")
NGRAMS = ("model.ngram_rows", "optimizer.ngram_decay")
CHOSEN = (
    *SIZES, *DROPOUT, *NGRAMS, "data.train_split", "optimizer.weight_decay",
    "optimizer.learning_rate",
)  # fmt: skip

EVALUATIONS = 20  # per run, at most
EVALUATION_SHARE = 0.04  # share of the time for evaluations
EVALUATION_COST = 0.4  # per character, relative to training
MIN_HELD_OUT = 20_000  # characters, if the text has ten times as many
# Seconds to open the run's files, for the report and process exit.
FINISH_S = 2.0
SAVED_PER_S = 2e8  # bytes of a snapshot
# Seconds per layer to sample a text on a GPU: about 25 launches per layer and character.
DRAW_S = 0.1
MIN_CHARACTERS = 1000  # per text
MIN_CONTEXT = 64  # characters, for a short held-out part
# Seconds of GPU training: compiling takes about 20 s in the trial, and makes steps a quarter shorter.
COMPILE_PAYS_FROM_S = 100.0
COMPILE_AGAIN_S = 6.0  # seconds to compile after the trial
TRIAL_S = 1.2  # seconds of steps to time, more than the `PERIOD` after which threads adapt


def get(config: Any, key: str) -> Any:
    """The value of the field `key`, `group.name`."""
    group, name = key.split(".")
    return getattr(getattr(config, group), name)


def put(config: Any, values: dict[str, Any]) -> None:
    """Sets the fields of `values`."""
    for key, value in values.items():
        group, name = key.split(".")
        setattr(getattr(config, group), name, value)


def fill(config: Any, values: dict[str, Any]) -> None:
    """Sets those fields of `values` that are null."""
    put(config, {key: value for key, value in values.items() if get(config, key) is None})


def choose_sizes(
    config: Any,
    text: Any,
    recorded: dict[str, Any] | None,
    world: World,
    started: float,
    make_trainer: Callable[[Any, Any], Any],
) -> None:
    """Sets the null fields of `config`: from the settings `recorded` in the run's snapshot, if any, or chosen for
    `text` and the time limit, counted from `started`. `make_trainer(config, split)` makes the Trainer to time.
    """

    def seconds_left() -> float:
        end = started + 60 * (config.trainer.max_minutes or 0.0)
        return min(distributed.all_gather(end - time.monotonic(), world))

    is_warned = False

    def warn_if_too_little(config: Any) -> None:
        nonlocal is_warned
        is_warned = is_warned or memory.warn_if_too_little(config.model, config.trainer, world)

    def seconds_per_step(trial: Any) -> float:
        trial = copy.deepcopy(trial)
        fill(trial, FOR_TIMING)
        trial.model = sized_model(trial)
        warn_if_too_little(trial)
        trial.trainer.max_steps, trial.trainer.max_epochs = 30, None
        step_s = time_steps(make_trainer(trial, text.with_config(trial.data).split()))
        hardware.free_unused(world.device)  # a Trainer is part of a reference cycle
        return step_s

    if recorded is not None:
        recall(config, recorded, len(text.data))
        if world.device.type == "cuda" and config.trainer.compile == "auto":
            config.trainer.compile = recorded.get("trainer", {}).get("compile", "auto")
    elif is_needed(config):
        if world.device.type != "cpu" and any(get(config, key) is None for key in CHOSEN):
            log.info(
                "sizing      the rule was fitted on CPUs; on %s it is extrapolated",
                world.device.type,
            )
        chosen = choose(config, len(text.data), world, seconds_left, seconds_per_step)
        if HydraConfig.initialized():
            own = (f"{override_key(override)}=" for override in chosen)
            others = ("run_name=", "run_dir=", "trainer.resume=")
            typed = without(HydraConfig.get().overrides.task, *own, *others)
            name = re.sub(r"[^\w-]", "_", config.run_name) + "_again"
            named = f"run_name={name}" if name.isascii() else quoted("run_name", name)
            chosen = ["python", "main.py", *typed, *chosen, named]
        log.info("sizing      to repeat this choice: %s", shlex.join(chosen))
    config.model = sized_model(config)
    warn_if_too_little(config)


def time_steps(trainer: Any) -> float:
    """Median time of a training step, seconds, on the slowest rank, over about `TRIAL_S` seconds or all remaining
    steps; on a busy machine, of the steps with fewer threads. Updates the model.
    """
    taken: list[tuple[int, float]] = []  # threads and seconds of each step
    with contextlib.closing(trainer.steps()) as steps:
        last = time.perf_counter()
        for loss, _ in steps:
            loss.item()  # waits for the device
            before, last = last, time.perf_counter()
            seconds = max(distributed.all_gather(last - before, trainer.world))
            taken.append((torch.get_num_threads(), seconds))
            fewest_threads = min(threads for threads, _ in taken)
            timed = [seconds for threads, seconds in taken if threads == fewest_threads]
            # The first steps capture and check the CUDA graph. On a CPU, a step may take half a minute.
            on_gpu = trainer.world.device.type == "cuda"
            fewest = 18 if on_gpu else 4 if sum(timed) < 4 * TRIAL_S else 2
            if len(timed) >= fewest and sum(timed) > TRIAL_S:
                break
    trainer.requests.finish()  # of `steps`, which was closed early
    return statistics.median(timed[1:] or timed)  # the first step allocates and loads


def sized_model(config: Any) -> Any:
    """The run's checked `GPTConfig`, with the data's context. Raises `UserError`."""
    block_size = config.data.block_size
    return dataclasses.replace(config.model, model_type=None, block_size=block_size)


def is_needed(config: Any) -> bool:
    """Whether a field must be chosen."""
    return config.trainer.max_minutes is not None or any(get(config, key) is None for key in CHOSEN)


def recall(config: Any, recorded: dict[str, Any], characters: int) -> None:
    """Restores the choices of the run's first start from the settings `recorded` in its snapshot, whose
    `trainer.max_steps` take `trainer.max_minutes`. Another time limit scales the steps, up to `USEFUL_PASSES` over the
    text (of length `characters`) if the model was chosen for it. Raises `UserError` for a time limit that would extend
    a run started without one. `check_can_resume` refuses another text later.
    """
    trainer, before = config.trainer, flatten(recorded)
    is_limited = any(get(config, key) is None for key in CHOSEN)
    intervals = ("trainer.eval_every_steps", "trainer.save_every_steps")
    keys = (*CHOSEN, *intervals) if is_needed(config) else ()
    fill(config, {key: before.get(key) for key in keys})
    fill(config, NO_NGRAMS)  # snapshots that predate them
    minutes, steps = before.get("trainer.max_minutes"), before.get("trainer.max_steps") or 1
    if minutes is None:
        is_same_text = before.get("data.path") == config.data.path
        is_longer = trainer.max_steps is None or trainer.max_steps > steps
        if trainer.max_minutes is not None and is_same_text and is_longer:
            raise UserError(
                f"trainer.max_minutes={trainer.max_minutes:g}: this run started without a time limit; leave it "
                "out, and raise trainer.max_steps to train longer"
            )
    elif trainer.max_minutes is not None:
        fitting = max(1, round(steps * trainer.max_minutes / minutes))
        useful = max(useful_steps(config, characters), steps) if is_limited else math.inf
        trainer.max_steps = int(min(fitting, useful, planned_steps(config, characters)))
        minutes, steps = trainer.max_minutes, fitting
        if trainer.max_steps == useful < fitting:
            log.info(
                "sizing      %d steps: limited to %d passes over the text; for more, set trainer.max_steps and "
                "trainer.max_minutes=null",
                useful, rule.USEFUL_PASSES,
            )  # fmt: skip
    if trainer.max_steps is None and trainer.max_epochs is None:
        trainer.max_steps = steps
    trainer.max_minutes = None
    if minutes is not None and trainer.max_steps is not None:
        trainer.max_minutes = minutes_for(trainer.max_steps, minutes, steps)


def choose(
    config: Any,
    characters: int,
    world: World,
    seconds_left: Callable[[], float],
    seconds_per_step: Callable[[Any], float],
) -> list[str]:
    """Chooses the null fields for a text of length `characters`; given values are kept. Returns overrides
    that repeat the choice.

    `seconds_left()` is what remains of `trainer.max_minutes`; `seconds_per_step(config)` times a step. Raises
    `UserError` for a text or a time that is too short.
    """
    null = [key for key in CHOSEN if get(config, key) is None]
    chosen = [*null]
    trainer = config.trainer
    if null:
        choose_model(config, characters, world, seconds_left, seconds_per_step)
    if trainer.max_minutes is not None:
        chosen += ["trainer.max_steps", "trainer.eval_every_steps"]
        step_s = seconds_per_step(config)
        if world.device.type == "cuda" and trainer.compile == "auto":
            chosen += ["trainer.compile"]
            most = useful_steps(config, characters) if null else math.inf
            seconds = min(seconds_left(), step_s * min(most, planned_steps(config, characters)))
            step_s = choose_compile(
                trainer, world, step_s, seconds, lambda: seconds_per_step(config)
            )
        choose_steps(config, characters, world, bool(null), step_s, seconds_left())
    elif trainer.eval_every_steps is None:
        chosen += ["trainer.eval_every_steps"]
        steps = planned_steps(config, characters)
        cost = EVALUATION_COST * held_out_characters(config, characters)
        fitting = evaluations(steps * step_characters(config) / cost)
        trainer.eval_every_steps = math.ceil(steps / fitting)
    if null:
        choose_rates(config, characters)
    if trainer.save_every is None and trainer.save_every_steps is None:
        chosen += ["trainer.save_every_steps"]
        trainer.save_every_steps = trainer.eval_every_steps
    return [f"{key}={get(config, key)}" for key in chosen] + ["trainer.max_minutes=null"]


def choose_compile(
    trainer: Any, world: World, step_s: float, seconds: float, time_compiled: Callable[[], float]
) -> float:
    """Chooses whether to compile for `seconds` of steps of `step_s` each on a GPU. Returns the step time."""
    missing = distributed.all_gather(auto.missing_to_compile("cuda"), world)  # on any host
    if seconds > COMPILE_PAYS_FROM_S and not any(missing):
        trainer.compile = "true"
        compiled_s = time_compiled()
        if compiled_s < step_s:
            return compiled_s
    trainer.compile = "false"
    return step_s


def choose_model(
    config: Any,
    characters: int,
    world: World,
    seconds_left: Callable[[], float],
    seconds_per_step: Callable[[Any], float],
) -> None:
    """Chooses the null fields of `CHOSEN`, except for `choose_rates`; see `choose`."""
    trainer, data, model = config.trainer, config.data, config.model
    unit = unit_of(data.encoding)
    usable = round(characters * (1 - data.final_split))
    if usable < MIN_CHARACTERS:
        beside = f" beside data.final_split={data.final_split:g}" if data.final_split else ""
        raise UserError(
            f"data.path={data.path}: {usable:,} characters{beside} are too few to choose a model for; "
            f"{MIN_CHARACTERS:,} are needed, or a recipe: experiment=NAME"
        )
    if config.optimizer.name != "muon" and config.optimizer.learning_rate is None:
        raise UserError(
            f"optimizer.name={config.optimizer.name}: a learning rate is chosen for muon alone; give "
            "optimizer.learning_rate, or a file of conf/optimizer: optimizer=adamw"
        )
    is_timed, on_gpu = trainer.max_minutes is not None, world.device.type == "cuda"
    longest = usable // 20  # context
    if data.train_split is not None:  # a held-out part that is too short is refused later
        held_out = int(held_out_characters(config, characters))
        longest = min(longest, max(held_out - 1, MIN_CONTEXT))
    reference = copy.deepcopy(config)
    reference.trainer.compile = "false"  # not worth it for a trial
    fill(reference, {"data.train_split": 0.8 * (1 - data.final_split)})
    # A GPU is fastest with the largest steps.
    step = rule.step_size(usable, 1024 if is_timed else 128, math.inf, on_gpu)
    fill(reference, sizes_of(config, longest, *rule.REFERENCE, step, world.size))
    steps = planned_steps(reference, characters)
    limit = "the given steps"
    if is_timed:
        step_s, seconds = seconds_per_step(reference), max(seconds_left(), 0.0)
        speed = f"{step_characters(reference) / step_s:,.0f} {unit}s/s at width {reference.model.n_embd}"
        if seconds / step_s < steps:
            steps = seconds / step_s
            limit = f"{duration(seconds)} of training (this machine: {speed})"
    operations = steps * step_characters(reference) * character_flops(reference)

    layers, width, context = rule.best_sizes(usable, operations)
    affordable = operations / rule.REFERENCE_FLOPS if is_timed else math.inf
    step = rule.step_size(usable, model.n_embd or width, affordable, on_gpu)
    fill(config, sizes_of(config, longest, layers, width, context, step, world.size))
    evaluated = EVALUATION_SHARE / 2 * operations / (EVALUATION_COST * character_flops(config))
    held_out = min(usable / 10, max(MIN_HELD_OUT, evaluated))
    split = round((1 - data.final_split) * (1 - held_out / usable), 6)
    fill(config, {"data.train_split": split})
    training = training_characters(config, characters)
    trained = planned_steps(config, characters) * step_characters(config)
    if is_timed:
        trained = min(trained, operations / character_flops(config))
    passes = min(trained / training, rule.USEFUL_PASSES)
    fill(config, dict.fromkeys(DROPOUT, rule.dropout(training, passes)))
    fill(config, {"model.ngram_rows": rule.ngram_rows(training)})
    log.info(
        "sizing      %d layers, width %d, context %d, dropout %g, n-gram rows %d: for a text of %s %ss and %s",
        model.n_layer, model.n_embd, data.block_size, model.resid_pdrop, model.ngram_rows, f"{characters:,}", unit,
        limit,
    )  # fmt: skip


def choose_rates(config: Any, characters: int) -> None:
    """Chooses the learning rate and the weight decays for the planned passes over a text of length `characters`.
    Keeps given values.
    """
    model, optimizer, step = config.model, config.optimizer, step_characters(config)
    training = training_characters(config, characters)
    steps = planned_steps(config, characters)
    planned = steps * step / training
    passes = min(planned, rule.USEFUL_PASSES)
    if config.init_from is None:
        usable = round(characters * (1 - config.data.final_split))
        fill(config, {"optimizer.learning_rate": rule.learning_rate(usable, model.n_embd, steps)})
        weights = 12 * model.n_layer * model.n_embd**2
        decay = rule.weight_decay(passes, weights, optimizer.learning_rate * steps)
        ngrams = rule.ngram_decay(passes, step / training, optimizer.learning_rate)
    else:
        rate = rule.fine_tuning_rate(training, model.n_embd, passes)
        fill(config, {"optimizer.learning_rate": rate})
        decay = rule.fine_tuning_decay(optimizer.learning_rate * steps)
        ngrams = 2.0  # more would forget the pretrained tables
    fill(config, {"optimizer.weight_decay": decay, "optimizer.ngram_decay": ngrams})
    shown = f", n-gram decay {optimizer.ngram_decay:g}" if model.ngram_rows else ""
    log.info(
        "sizing      learning rate %g, weight decay %g%s: for %.3g passes over the text",
        optimizer.learning_rate, optimizer.weight_decay, shown, planned,
    )  # fmt: skip


def evaluations(cost: float) -> int:
    """Number of evaluations in a run that costs `cost` times as much as one."""
    return min(max(int(EVALUATION_SHARE * cost), 2), EVALUATIONS)


def minutes_for(steps: int, minutes: float, fitting: int) -> float:
    """The minutes that `steps` take if `fitting` steps take `minutes`, as `recall` expects them."""
    return minutes if steps == fitting else float(f"{minutes * steps / fitting:.10g}")


def useful_steps(config: Any, characters: int) -> int:
    """Steps for at most `USEFUL_PASSES` over a text of length `characters`."""
    useful = rule.USEFUL_PASSES * training_characters(config, characters)
    return max(1, useful // step_characters(config))


def training_characters(config: Any, characters: int) -> int:
    """Characters to train on in a text of length `characters`."""
    return max(1, int(characters * config.data.train_split))


def held_out_characters(config: Any, characters: int) -> float:
    return characters * (1 - config.data.final_split) - training_characters(config, characters)


def other_seconds(config: Any, steps: float, world: World) -> float:
    """Seconds besides `steps` and their evaluations: saving and exit; on a GPU, compiling again and sampling."""
    saved = 12 * memory.weights(config.model)  # with two moment estimates, in float32
    seconds = FINISH_S + saved / SAVED_PER_S
    if world.device.type == "cpu":
        return seconds
    draws = 2 + int(math.log(max(steps / config.trainer.log_every_steps, 1.0), 4))
    draw_s = DRAW_S * (config.model.n_layer + 1) * config.samples
    return seconds + draw_s * draws + COMPILE_AGAIN_S * (config.trainer.compile == "true")


def choose_steps(
    config: Any,
    characters: int,
    world: World,
    is_limited: bool,
    step_s: float,
    seconds: float,
) -> None:
    """Chooses the steps that fit into `seconds`, at `step_s` each, and the evaluation interval. If
    `is_limited`, at most `useful_steps`. Raises `UserError` if no step fits.
    """
    trainer = config.trainer
    character_s = EVALUATION_COST * step_s / step_characters(config)
    each = character_s * held_out_characters(config, characters)  # seconds of an evaluation
    # One process scores the final part.
    final = world.size * character_s * config.data.final_split * characters
    first = each if config.init_from is not None else 0.0  # of the pretrained weights
    left = seconds - other_seconds(config, seconds / step_s, world) - first - final
    number = 1
    if trainer.eval_every_steps is not None:
        fitting = int((left - each) / (step_s + each / trainer.eval_every_steps))
        if MIN_HALVED <= fitting <= trainer.eval_every_steps:  # also evaluated halfway
            fitting = max(int((left - 2 * each) / step_s), MIN_HALVED - 1)
    else:
        number = evaluations(left / each)
        fitting = int((left - number * each) / step_s)
    if fitting < 1:
        missing = step_s + 2 * number * each - left
        enough = math.ceil(100 * (trainer.max_minutes + missing / 60)) / 100
        also = " and the score of the final part" if final else ""
        raise UserError(
            f"trainer.max_minutes={trainer.max_minutes:g}: too short: no time is left for a step of {step_s:.2f} s "
            f"and its evaluation{also}; try {enough:g}"
        )
    pays = useful_steps(config, characters) if is_limited else math.inf
    typed = planned_steps(config, characters)
    trainer.max_steps = int(min(fitting, pays, typed))
    if trainer.max_steps < fitting:
        trainer.max_minutes = minutes_for(trainer.max_steps, trainer.max_minutes, fitting)
    number_of = "as many as" if trainer.max_steps == fitting else f"{fitting:,}"
    why = f"{number_of} fit into the {duration(seconds)} left"
    if trainer.max_steps == pays:
        why += f"; limited to {rule.USEFUL_PASSES} passes over the text"
    if trainer.max_steps == typed:
        why += "; set by the user"
    elif typed < math.inf:
        why += f"; fewer than the {typed:,.0f} of trainer.max_steps or max_epochs"
    log.info("sizing      %s steps: %s", f"{trainer.max_steps:,}", why)
    if trainer.eval_every_steps is None:
        number = min(number, evaluations(trainer.max_steps * step_s / each))
        trainer.eval_every_steps = math.ceil(trainer.max_steps / number)


NO_NGRAMS = {"model.ngram_rows": 0, "optimizer.ngram_decay": 0.0}
# To time steps before these are chosen: without dropout, which takes up to a third of the speed.
FOR_TIMING = {
    **dict.fromkeys(DROPOUT, 0.0), **NO_NGRAMS, "optimizer.weight_decay": 0.2,
    "optimizer.learning_rate": 8e-3,
}  # fmt: skip


def sizes_of(
    config: Any, longest: int, layers: int, width: int, context: int, step: int, processes: int
) -> dict[str, int]:
    """Values for `SIZES`, from layers, width, context (at most `longest`) and characters per step; sizes set in
    `config` are kept.
    """
    heads, own_width = config.model.n_head, config.model.n_embd
    width = own_width or width
    if heads is None:  # 64 channels each, or 32 in a narrow model
        most = max(1, width // (64 if width >= 128 else 32))
        heads = next(n for n in range(most, 0, -1) if width % (2 * n) == 0 or n == 1)
    context = config.data.block_size or max(1, min(context, longest))
    return {
        "data.block_size": context,
        "model.n_layer": layers,
        "model.n_head": heads,
        "model.n_embd": own_width or -(-width // (2 * heads)) * 2 * heads,
        "trainer.batch_size": max(-(-step // context), processes),
    }


def planned_steps(config: Any, characters: int) -> float:
    """Steps that `max_steps` and `max_epochs` allow on a text of length `characters`, or inf."""
    # Too short a text is refused when it is split.
    windows = max(training_characters(config, characters) - config.data.block_size, 1)
    return plan.planned_steps(config.trainer, windows)


def step_characters(config: Any) -> int:
    return config.trainer.batch_size * config.data.block_size


def character_flops(config: Any) -> float:
    """Floating-point operations of training on a character, as `GPT.flops_per_token`."""
    layers, width = config.model.n_layer, config.model.n_embd
    head = 6 * width * config.model.vocab_size
    return 72 * layers * width**2 + 12 * layers * width * config.data.block_size + head
