"""Choose: the null fields of a configuration, for a text, a machine and a time limit.

The model, its context and dropout follow from the throughput of a reference model and the length of the text. The steps
follow from the step time of that model; learning rate and weight decays follow from the passes over the text.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

from engine.config import auto
from engine.config.overrides import repeating_command
from engine.errors import UserError
from engine.parallel import distributed
from engine.parallel.distributed import World
from engine.run import memory
from engine.run.metrics import duration
from engine.sizing import rule
from engine.sizing.draft import DROPOUT, EVALUATION_COST, Draft
from engine.sizing.recall import minutes_for, recall
from engine.sizing.trial import Trial, sized_model
from engine.text import unit_of

log = logging.getLogger("gpt")

EVALUATIONS = 20  # per run, at most
EVALUATION_SHARE = 0.04  # share of the time for evaluations
MIN_HELD_OUT = 20_000  # characters, if the text has ten times as many
MIN_CHARACTERS = 1000  # per text
MIN_CONTEXT = 64  # characters, for a short held-out part
FINISH_S = 2.0  # seconds to open the run's files, for the report and process exit
SAVED_PER_S = 2e8  # bytes of a snapshot
# Seconds per layer to sample a text on a GPU: about 25 launches per layer and character.
DRAW_S = 0.1
# Seconds of GPU training: compiling takes about 20 s in the trial, and makes steps a quarter shorter.
COMPILE_PAYS_FROM_S = 100.0
COMPILE_AGAIN_S = 6.0  # seconds to compile after the trial


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
    draft = Draft(config, len(text.data))
    trial = Trial(text, world, started, make_trainer)
    if recorded is not None:
        recall(draft, recorded)
        if trial.on_gpu and config.trainer.compile == "auto":
            config.trainer.compile = recorded.get("trainer", {}).get("compile", "auto")
    elif draft.is_incomplete:
        if world.device.type != "cpu" and draft.nulls:
            device = world.device.type
            log.info("sizing      the rule was fitted on CPUs; on %s it is extrapolated", device)
        overrides = choose(draft, trial)
        log.info("sizing      to repeat this choice: %s", repeating_command(overrides, config.run_name))
    config.model = sized_model(config)
    trial.warn_if_too_little(config)


def choose(draft: Draft, trial: Trial) -> list[str]:
    """Chooses the null fields; given values are kept. Returns overrides that repeat the choice. Raises `UserError` for
    a text or a time that is too short.
    """
    trainer, chosen = draft.config.trainer, draft.nulls
    has_model = not chosen
    if not has_model:
        choose_model(draft, trial)
    if trainer.max_minutes is not None:
        chosen.append("trainer.max_steps")
        limit = math.inf if has_model else draft.useful_steps
        step_s = trial.seconds_per_step(draft)
        if trial.on_gpu and trainer.compile == "auto":
            chosen.append("trainer.compile")
            step_s = choose_compile(draft, trial, step_s, limit)
        choose_steps(draft, trial, step_s, limit)
    if trainer.eval_every_steps is None:
        number = evaluations(draft.planned_steps / draft.scoring_steps(draft.held_out))
        trainer.eval_every_steps = math.ceil(draft.planned_steps / number)
    chosen.append("trainer.eval_every_steps")
    if not has_model:
        choose_rates(draft)
    if trainer.save_every is None and trainer.save_every_steps is None:
        chosen.append("trainer.save_every_steps")
        trainer.save_every_steps = trainer.eval_every_steps
    return [f"{key}={draft.get(key)}" for key in chosen] + ["trainer.max_minutes=null"]


def choose_model(draft: Draft, trial: Trial) -> None:
    """Chooses the null fields of `CHOSEN`, except for `choose_rates`."""
    config, usable = draft.config, draft.usable
    trainer, data, model = config.trainer, config.data, config.model
    check_can_choose(draft)
    unit = unit_of(data.encoding)
    is_timed = trainer.max_minutes is not None
    longest = usable // 20  # context
    if data.train_split is not None:  # a held-out part that is too short is refused later
        longest = min(longest, max(int(draft.held_out) - 1, MIN_CONTEXT))
    # A GPU is fastest with the largest steps.
    step = rule.step_size(usable, 1024 if is_timed else 128, math.inf, trial.on_gpu)
    reference = draft.copy()
    reference.config.trainer.compile = "false"  # not worth it for a trial
    reference.fill({"data.train_split": 0.8 * (1 - data.final_split)})
    reference.fill(sizes_of(config, longest, *rule.REFERENCE, step, trial.world.size))
    steps = reference.planned_steps
    limit = "the given steps"
    if is_timed:
        step_s = trial.seconds_per_step(reference)
        seconds = max(trial.seconds_left(trainer.max_minutes), 0.0)
        if seconds / step_s < steps:
            steps = seconds / step_s
            speed = f"{reference.step_characters / step_s:,.0f} {unit}s/s at width {reference.config.model.n_embd}"
            limit = f"{duration(seconds)} of training (this machine: {speed})"
    operations = steps * reference.step_characters * reference.flops_per_character

    layers, width, context = rule.best_sizes(usable, operations)
    affordable = operations / rule.REFERENCE_FLOPS if is_timed else math.inf
    step = rule.step_size(usable, model.n_embd or width, affordable, trial.on_gpu)
    draft.fill(sizes_of(config, longest, layers, width, context, step, trial.world.size))
    trained = operations / draft.flops_per_character
    held_out = max(MIN_HELD_OUT, EVALUATION_SHARE / 2 * trained / EVALUATION_COST)
    split = (1 - data.final_split) * (1 - min(held_out / usable, 0.1))
    draft.fill({"data.train_split": round(split, 6)})
    steps = draft.planned_steps
    if is_timed:
        steps = min(steps, trained / draft.step_characters)
    passes = min(draft.passes(steps), rule.USEFUL_PASSES)
    draft.fill(dict.fromkeys(DROPOUT, rule.dropout(draft.training, passes)))
    draft.fill({"model.ngram_rows": rule.ngram_rows(draft.training)})
    log.info(
        "sizing      %d layers, width %d, context %d, dropout %g, n-gram rows %d: for a text of %s %ss and %s",
        model.n_layer, model.n_embd, data.block_size, model.resid_pdrop, model.ngram_rows,
        f"{draft.characters:,}", unit, limit,
    )  # fmt: skip


def check_can_choose(draft: Draft) -> None:
    """Raises `UserError` for a text that is too short, or an optimizer without a rule for its learning rate."""
    data, optimizer = draft.config.data, draft.config.optimizer
    if draft.usable < MIN_CHARACTERS:
        beside = f" beside data.final_split={data.final_split:g}" if data.final_split else ""
        raise UserError(
            f"data.path={data.path}: {draft.usable:,} characters{beside} are too few to choose a model for; "
            f"{MIN_CHARACTERS:,} are needed, or a recipe: experiment=NAME"
        )
    if optimizer.name != "muon" and optimizer.learning_rate is None:
        raise UserError(
            f"optimizer.name={optimizer.name}: a learning rate is chosen for muon alone; give "
            "optimizer.learning_rate, or a file of conf/optimizer: optimizer=adamw"
        )


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


def choose_compile(draft: Draft, trial: Trial, step_s: float, limit: float) -> float:
    """Chooses whether to compile on a GPU, for at most `limit` steps of `step_s` each. Returns the step time."""
    trainer, steps = draft.config.trainer, min(limit, draft.planned_steps)
    seconds = min(trial.seconds_left(trainer.max_minutes), step_s * steps)
    missing = distributed.all_gather(auto.missing_to_compile("cuda"), trial.world)  # on any host
    if seconds > COMPILE_PAYS_FROM_S and not any(missing):
        trainer.compile = "true"
        compiled_s = trial.seconds_per_step(draft)
        if compiled_s < step_s:
            return compiled_s
    trainer.compile = "false"
    return step_s


def choose_steps(draft: Draft, trial: Trial, step_s: float, limit: float) -> None:
    """Chooses the steps that fit into the remaining time, at `step_s` each, but at most `limit`. Raises `UserError`
    if none fits.
    """
    config, trainer = draft.config, draft.config.trainer
    seconds = trial.seconds_left(trainer.max_minutes)
    each = step_s * draft.scoring_steps(draft.held_out)  # seconds of an evaluation
    # One process scores the final part.
    final = trial.world.size * step_s * draft.scoring_steps(config.data.final_split * draft.characters)
    first = each if config.init_from is not None else 0.0  # of the pretrained weights
    left = seconds - other_seconds(config, seconds / step_s, trial.on_gpu) - first - final
    if trainer.eval_every_steps is None:
        number = evaluations(left / each)
        fitting = int((left - number * each) / step_s)
    else:  # those of the interval, the last one, and perhaps one halfway
        number = 2
        fitting = int((left - number * each) / (step_s + each / trainer.eval_every_steps))
    if fitting < 1:
        missing = step_s + 2 * number * each - left
        enough = math.ceil(100 * (trainer.max_minutes + missing / 60)) / 100
        also = " and the score of the final part" if final else ""
        raise UserError(
            f"trainer.max_minutes={trainer.max_minutes:g}: too short: no time is left for a step of {step_s:.2f} s "
            f"and its evaluation{also}; try {enough:g}"
        )
    typed = draft.planned_steps
    trainer.max_steps = steps = int(min(fitting, limit, typed))
    trainer.max_minutes = minutes_for(steps, trainer.max_minutes, fitting)
    why = f"{'as many as' if steps == fitting else f'{fitting:,}'} fit into the {duration(seconds)} left"
    if steps == limit:
        why += f"; limited to {rule.USEFUL_PASSES} passes over the text"
    if steps == typed:
        why += "; set by the user"
    elif typed < math.inf:
        why += f"; fewer than the {typed:,.0f} of trainer.max_steps or max_epochs"
    log.info("sizing      %s steps: %s", f"{steps:,}", why)


def other_seconds(config: Any, steps: float, on_gpu: bool) -> float:
    """Seconds besides `steps` and their evaluations: saving and exit; on a GPU, compiling again and sampling."""
    saved = 12 * memory.weights(config.model)  # with two moment estimates, in float32
    seconds = FINISH_S + saved / SAVED_PER_S
    if on_gpu:
        draws = 2 + int(math.log(max(steps / config.trainer.log_every_steps, 1.0), 4))
        seconds += DRAW_S * (config.model.n_layer + 1) * config.samples * draws
        seconds += COMPILE_AGAIN_S * (config.trainer.compile == "true")
    return seconds


def choose_rates(draft: Draft) -> None:
    """Chooses the learning rate and the weight decays for the planned passes over the text; given values are kept."""
    model, optimizer = draft.config.model, draft.config.optimizer
    training, steps = draft.training, draft.planned_steps
    passes = min(draft.passes(steps), rule.USEFUL_PASSES)
    if draft.config.init_from is None:
        rate = rule.learning_rate(draft.usable, model.n_embd, steps)
        draft.fill({"optimizer.learning_rate": rate})
        weights = 12 * model.n_layer * model.n_embd**2
        decay = rule.weight_decay(passes, weights, optimizer.learning_rate * steps)
        ngrams = rule.ngram_decay(passes, draft.passes(1), optimizer.learning_rate)
    else:
        rate = rule.fine_tuning_rate(training, model.n_embd, passes)
        draft.fill({"optimizer.learning_rate": rate})
        decay = rule.fine_tuning_decay(optimizer.learning_rate * steps)
        ngrams = 2.0  # more would forget the pretrained tables
    draft.fill({"optimizer.weight_decay": decay, "optimizer.ngram_decay": ngrams})
    shown = f", n-gram decay {optimizer.ngram_decay:g}" if model.ngram_rows else ""
    log.info(
        "sizing      learning rate %g, weight decay %g%s: for %.3g passes over the text",
        optimizer.learning_rate, optimizer.weight_decay, shown, draft.passes(steps),
    )  # fmt: skip


def evaluations(cost: float) -> int:
    """Number of evaluations in a run that costs `cost` times as much as one."""
    return min(max(int(EVALUATION_SHARE * cost), 2), EVALUATIONS)
