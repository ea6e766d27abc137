"""Chooses the null fields of a configuration for a text, a machine and a time limit.

The speed of a reference model and the length of the text decide the model. The time of a step of that model decides the
number of steps. The passes over the text decide the learning rate and the weight decays.
"""

import copy
import logging
import math
from typing import Any

from engine.config.overrides import repeating_command
from engine.config.schema import Config
from engine.errors import UserError
from engine.parallel import distributed
from engine.precision import missing_to_compile
from engine.run.metrics import duration
from engine.sizing import rule
from engine.sizing.draft import DROPOUT, SCORING_COST, Draft, count_block_weights, count_weights
from engine.sizing.recall import recall
from engine.sizing.trial import Build, SizedText, Trial, sized_model
from engine.text import unit_of

log = logging.getLogger("gpt")

MIN_EVALUATIONS, MAX_EVALUATIONS = 2, 20  # per run, if the interval is chosen
EVALUATION_SHARE = 0.04  # share of the time for evaluations, and on a CPU for their saves
MIN_HELD_OUT = 20_000  # characters of a long text, however short the time; a twentieth of the text at most
SHORT_HELD_OUT = 1000  # characters of a text whose twentieth is less; a tenth at most
MIN_CHARACTERS = 1000  # the shortest text for which a model is chosen
MIN_CONTEXT = 64  # a short held-out part does not reduce the context further
FILLED = 0.95  # share of the time that the steps fill; the clock ends a run that becomes slower
FINISH_S = 2.0  # seconds to open the run's files, for the report and process exit
SAVED_PER_S = 3e8  # bytes of a snapshot saved per second; on a CPU, a save delays training by as long
# Seconds per layer to sample a text on a GPU: about 25 kernel launches per layer and character.
DRAW_S = 0.1
# Seconds of GPU training from which compiling pays: it takes about 20 s in the trial, and saves a quarter of a step.
COMPILE_PAYS_FROM_S = 100.0
COMPILE_AGAIN_S = 6.0  # seconds to compile after the trial


def choose_sizes(
    config: Config,
    text: SizedText,
    recorded: dict[str, Any] | None,
    started: float,
    build: Build,
) -> float | None:
    """Sets the null fields of `config`, and the steps if there is a time limit, which counts from `started`. A run that
    resumes takes them from the settings `recorded` in its snapshot. `build(config, split)` builds the Trainer to time.
    Returns when training must end, as `time.monotonic()` gives it; None without a time limit, or if the run resumes.
    """
    draft, deadline = Draft(config, len(text.data)), None
    if recorded is not None:
        recall(draft, recorded)
        if distributed.device().type == "cuda" and config.trainer.compile == "auto":
            config.trainer.compile = recorded.get("trainer", {}).get("compile", "auto")
    elif draft.is_incomplete:
        trial = Trial(text, started + 60 * (config.trainer.max_minutes or 0.0), build)
        overrides, deadline = choose(draft, trial)
        log.info("sizing      to repeat this choice: %s", repeating_command(overrides, config.run_name))
    config.model = sized_model(config)
    return deadline


def choose(draft: Draft, trial: Trial) -> tuple[list[str], float | None]:
    """Chooses the null fields, with the measurements of a `Trial`; given values are kept. Returns overrides that repeat
    the choice, and when training must end if there is a time limit. Raises `UserError` for a text or a time that is too
    short.
    """
    trainer, chosen, deadline = draft.config.trainer, draft.nulls, None
    chooses_model = bool(chosen)
    if chooses_model:
        choose_model(draft, trial)
    evaluation_steps = draft.scoring_steps(draft.held_out_characters)  # steps that take as long as one evaluation
    if trainer.max_minutes is not None:
        chosen.append("trainer.max_steps")
        most_steps = draft.useful_steps if chooses_model else math.inf
        step_s = trial.seconds_per_step(draft)
        if distributed.device().type == "cuda" and trainer.compile == "auto":
            chosen.append("trainer.compile")
            step_s = choose_compile(draft, trial, step_s, most_steps)
        if distributed.device().type == "cpu":  # each evaluation may find the best weights yet, which are saved
            evaluation_steps += save_seconds(draft) / step_s
        deadline = choose_steps(draft, trial, step_s, evaluation_steps, most_steps)
    if trainer.eval_every_steps is None:
        chosen.append("trainer.eval_every_steps")
        number = number_of_evaluations(draft.planned_steps / evaluation_steps)
        trainer.eval_every_steps = math.ceil(draft.planned_steps / number)
    if chooses_model:
        choose_rates(draft)
    if trainer.save_every is None and trainer.save_every_steps is None:
        chosen.append("trainer.save_every_steps")
        trainer.save_every_steps = trainer.eval_every_steps
    return [f"{key}={draft.get(key)}" for key in chosen] + ["trainer.max_minutes=null"], deadline


def choose_model(draft: Draft, trial: Trial) -> None:
    """Chooses the null fields of `CHOSEN`, except the learning rate and the decays (`choose_rates`)."""
    check_can_choose(draft)
    config, usable = draft.config, draft.usable_characters
    trainer, data, model = config.trainer, config.data, config.model
    on_cuda, is_timed, unit = (
        distributed.device().type == "cuda",
        trainer.max_minutes is not None,
        unit_of(data.encoding),
    )
    if distributed.device().type != "cpu":
        log.info("sizing      the rule was fitted on CPUs; on %s it is extrapolated", distributed.device().type)
    longest = usable // 20  # context
    if data.train_split is not None:  # a held-out part that is too short is refused later
        longest = min(longest, max(draft.held_out_characters - 1, MIN_CONTEXT))

    # The speed of the reference model. On CUDA, large steps are faster: it is timed with the largest.
    batch = rule.characters_per_step(usable, 1024 if is_timed else 128, math.inf, on_cuda)
    if is_timed:
        batch = max(batch, 1024)  # as the rule was fitted
    reference = copy.deepcopy(draft)
    reference.config.trainer.compile = "false"  # not worth it for a trial
    reference.fill({"data.train_split": 0.8 * (1 - data.final_split)})
    reference.fill(sizes_of(config, longest, *rule.REFERENCE, batch, distributed.size()))
    steps = reference.planned_steps
    budget = "the given steps"
    if is_timed:
        step_s, seconds = trial.seconds_per_step(reference), max(trial.seconds_left(), 0.0)
        if seconds / step_s < steps:
            steps = seconds / step_s
            speed = f"a model of width {reference.config.model.n_embd} trains {reference.step_characters / step_s:,.0f}"
            budget = f"{duration(seconds)} of training ({speed} {unit}s/s here)"
    flops = steps * reference.step_characters * reference.flops_per_character

    layers, width, context = rule.best_sizes(usable, flops)
    affordable = flops / rule.REFERENCE_FLOPS if is_timed else math.inf
    batch = rule.characters_per_step(usable, model.n_embd or width, affordable, on_cuda)
    draft.fill(sizes_of(config, longest, layers, width, context, batch, distributed.size()))
    affordable_characters = flops / draft.flops_per_character
    held_out = max(MIN_HELD_OUT, EVALUATION_SHARE / MIN_EVALUATIONS * affordable_characters / SCORING_COST)
    least = min(max(SHORT_HELD_OUT, data.block_size + 2), usable / 10)  # a window has to fit
    held_out = min(held_out, max(usable / 20, least))
    split = (1 - data.final_split) * (1 - held_out / usable)
    draft.fill({"data.train_split": round(split, 6)})
    steps = draft.planned_steps
    if is_timed:
        steps = min(steps, affordable_characters / draft.step_characters)
    passes = min(draft.passes(steps), rule.USEFUL_PASSES)
    training = draft.training_characters
    draft.fill(dict.fromkeys(DROPOUT, rule.dropout(training, passes)))
    draft.fill({"model.ngram_rows": rule.ngram_rows(training)})
    log.info(
        "sizing      %d layer%s, width %d, context %d, dropout %g, n-gram rows %d: for a text of %s %ss and %s",
        model.n_layer, "s" * (model.n_layer > 1), model.n_embd, data.block_size, model.resid_pdrop, model.ngram_rows,
        f"{draft.characters:,}", unit, budget,
    )  # fmt: skip


def check_can_choose(draft: Draft) -> None:
    """Raises `UserError` for a text that is too short, or an optimizer without a rule for its learning rate."""
    data, optimizer = draft.config.data, draft.config.optimizer
    if draft.usable_characters < MIN_CHARACTERS:
        beside = f" beside data.final_split={data.final_split:g}" if data.final_split else ""
        raise UserError(
            f"data.path={data.path}: {draft.usable_characters:,} characters{beside} are too few to choose a model for; "
            f"{MIN_CHARACTERS:,} are needed, or a recipe: experiment=NAME"
        )
    if optimizer.name != "muon" and optimizer.learning_rate is None:
        raise UserError(
            f"optimizer.name={optimizer.name}: a learning rate is chosen for muon alone; give "
            "optimizer.learning_rate, or a file of conf/optimizer: optimizer=adamw"
        )


def sizes_of(
    config: Config, longest: int, layers: int, width: int, context: int, batch: int, processes: int
) -> dict[str, int]:
    """Values for `SIZES`, from layers, width, context (at most `longest`) and characters of a batch; sizes set in
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
        "trainer.batch_size": -(-batch // (context * processes)) * processes,  # the same for each process
    }


def choose_compile(draft: Draft, trial: Trial, step_s: float, most_steps: float) -> float:
    """Chooses whether to compile on a GPU, for at most `most_steps` of `step_s` each. Returns the seconds per step of
    the choice.
    """
    trainer = draft.config.trainer
    seconds = min(trial.seconds_left(), step_s * min(most_steps, draft.planned_steps))
    missing = distributed.all_gather(missing_to_compile("cuda"))
    if seconds > COMPILE_PAYS_FROM_S and not any(missing):
        trainer.compile = "true"
        compiled_s = trial.seconds_per_step(draft)
        if compiled_s < step_s:
            return compiled_s
    trainer.compile = "false"
    return step_s


def choose_steps(draft: Draft, trial: Trial, step_s: float, evaluation_steps: float, most_steps: float) -> float:
    """Chooses the steps: `FILLED` of those that fit into the remaining time, at `step_s` seconds each and
    `evaluation_steps` steps per evaluation, but at most `most_steps`. Returns when training must end, before the last
    evaluation and save. Raises `UserError` if no step fits.
    """
    config, trainer = draft.config, draft.config.trainer
    evaluation_s = step_s * evaluation_steps
    initial_s = evaluation_s if config.init_from is not None else 0.0  # of the pretrained weights
    # One process scores the final part.
    final_s = distributed.size() * step_s * draft.scoring_steps(config.data.final_split * draft.characters)
    reserved = evaluation_s + save_seconds(draft) + final_s + FINISH_S  # after training
    seconds = trial.seconds_left() - reserved
    left = seconds - gpu_seconds(config, seconds / step_s) - initial_s
    if trainer.eval_every_steps is None:
        number = number_of_evaluations(left / evaluation_s) - 1
        fitting = int((left - number * evaluation_s) / step_s)
    else:  # at the interval, and at least halfway
        number = MIN_EVALUATIONS - 1
        with_evaluations_s = step_s + evaluation_s / trainer.eval_every_steps
        fitting = int(min((left - number * evaluation_s) / step_s, left / with_evaluations_s))
    if fitting < 1:
        missing = step_s + (number + 1) * evaluation_s - left
        enough = math.ceil(100 * (trainer.max_minutes + missing / 60)) / 100
        also = " and the score of the final part" if final_s else ""
        raise UserError(
            f"trainer.max_minutes={trainer.max_minutes:g}: too short: no time is left for a step of {step_s:.2f} s "
            f"and its evaluation{also}; try {enough:g}"
        )
    typed, useful, fitting = draft.planned_steps, most_steps, max(int(FILLED * fitting), 1)
    trainer.max_steps = steps = int(min(fitting, useful, typed))
    why = f"{'as many as' if steps == fitting else f'{fitting:,}'} fit into the {duration(seconds)} left"
    if steps == useful:
        why += f"; limited to {rule.USEFUL_PASSES} passes over the text"
    if steps == typed:
        why += "; set by the user"
    elif typed < math.inf:
        why += f"; fewer than the {typed:,.0f} of trainer.max_steps or max_epochs"
    log.info("sizing      %s steps: %s", f"{steps:,}", why)
    return trial.deadline - reserved


def save_seconds(draft: Draft) -> float:
    """Seconds to save a snapshot: the weights and two moment estimates, in float32."""
    return 12 * count_weights(draft.config.model) / SAVED_PER_S


def gpu_seconds(config: Config, steps: float) -> float:
    """Seconds on a GPU beside `steps` and their evaluations: compiling again and sampling."""
    if distributed.device().type == "cpu":
        return 0.0
    draws = 2 + int(math.log(max(steps / config.trainer.log_every_steps, 1.0), 4))
    sampling_s = DRAW_S * (config.model.n_layer + 1) * config.samples * draws
    return sampling_s + COMPILE_AGAIN_S * (config.trainer.compile == "true")


def choose_rates(draft: Draft) -> None:
    """Chooses the learning rate and the weight decays for the planned passes over the text; given values are kept."""
    model, optimizer, steps = draft.config.model, draft.config.optimizer, draft.planned_steps
    passes = min(draft.passes(steps), rule.USEFUL_PASSES)
    if draft.config.init_from is None:
        rate = rule.learning_rate(draft.usable_characters, model.n_embd, steps)
        draft.fill({"optimizer.learning_rate": rate})
        decay = rule.weight_decay(passes, count_block_weights(model), optimizer.learning_rate * steps)
        ngram_decay = rule.ngram_decay(passes, draft.passes(1), optimizer.learning_rate)
    else:
        rate = rule.fine_tuning_rate(draft.training_characters, model.n_embd, passes)
        draft.fill({"optimizer.learning_rate": rate})
        decay = rule.fine_tuning_decay(optimizer.learning_rate * steps)
        ngram_decay = 2.0  # more would forget the pretrained tables
    draft.fill({"optimizer.weight_decay": decay, "optimizer.ngram_decay": ngram_decay})
    shown = f", n-gram decay {optimizer.ngram_decay:g}" if model.ngram_rows else ""
    log.info(
        "sizing      learning rate %g, weight decay %g%s: for %.3g passes over the text",
        optimizer.learning_rate, optimizer.weight_decay, shown, draft.passes(steps),
    )  # fmt: skip


def number_of_evaluations(affordable: float) -> int:
    """Number of evaluations of a run that takes as long as `affordable` evaluations."""
    return min(max(int(EVALUATION_SHARE * affordable), MIN_EVALUATIONS), MAX_EVALUATIONS)
