"""Chooses the null fields of a configuration for a text, a machine and a time limit.

The speed of a reference model and the length of the text decide the model. The time of a step of that model decides the
number of steps. The passes over the text decide the learning rate and the weight decays. A resumed run keeps what was
chosen. `characters` is the length of the whole text.
"""

import contextlib
import copy
import dataclasses
import functools
import logging
import math
import statistics
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Protocol

import torch

from engine.config.schema import Config, GPTConfig, flatten
from engine.errors import UserError
from engine.machine import hardware
from engine.parallel import distributed
from engine.precision import Precision, missing_to_compile
from engine.run import plan
from engine.run.metrics import duration
from engine.run.requests import Requests
from engine.sizing import rule
from engine.snapshots.state import State
from engine.text.documents import unit_of

log = logging.getLogger("gpt")

# The fields that are chosen if null. Snapshots and config.yaml store them.
SIZES = ("data.block_size", "model.n_layer", "model.n_head", "model.n_embd", "trainer.batch_size")
DROPOUT = ("model.embd_pdrop", "model.resid_pdrop")
CHOSEN = (
    *SIZES, *DROPOUT, "model.ngram_rows", "optimizer.ngram_decay", "data.train_split", "optimizer.weight_decay",
    "optimizer.learning_rate",
)  # fmt: skip
NO_NGRAMS = {"model.ngram_rows": 0, "optimizer.ngram_decay": 0.0}
# While steps are timed, for fields that are chosen later.
PROVISIONAL = {
    **dict.fromkeys(DROPOUT, 0.0), **NO_NGRAMS, "optimizer.weight_decay": 0.2, "optimizer.learning_rate": 8e-3,
}  # fmt: skip
TIMED_S = 1.2  # seconds of steps to time
SCORING_COST = 0.4  # time to score a character, relative to training on it
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
# Seconds of GPU training from which compiling pays: it takes about 20 s when timed, and saves a quarter of a step.
COMPILE_PAYS_FROM_S = 100.0
COMPILE_AGAIN_S = 6.0  # seconds to compile once more, for the run


class TimedTrainer(Protocol):
    """What is used of a `Trainer`."""

    state: State
    plan: plan.Plan
    model: torch.nn.Module
    precision: Precision
    requests: Requests

    def step(self) -> tuple[torch.Tensor, torch.Tensor, float]: ...

    def close(self) -> None: ...


TimeStep = Callable[[Config], float]  # seconds per training step


def choose_sizes(
    config: Config,
    characters: int,
    recorded: dict[str, Any] | None,
    started: float,
    build: Callable[[Config], TimedTrainer],
    final: int = 0,
) -> float | None:
    """Sets the null fields of `config`, and the steps if there is a time limit, which counts from `started`. A run that
    resumes takes them from the settings `recorded` in its snapshot. `build` builds the Trainer to time; after training,
    `final` other characters are scored. Returns when training must end, as `time.monotonic()` gives it; None without a
    time limit, or if the run resumes.
    """
    end = None
    if recorded is not None:
        restore_choice(config, characters, recorded)
    elif config.trainer.max_minutes is not None or null_fields(config):
        before = flatten(dataclasses.asdict(config))
        deadline = started + 60 * (config.trainer.max_minutes or 0.0)
        end = choose(config, characters, deadline, functools.partial(seconds_per_step, build), final)
        after = flatten(dataclasses.asdict(config))
        chosen = " ".join(f"{key}={value}" for key, value in after.items() if value != before[key])
        log.info("sizing      to repeat this run, add: %s trainer.max_minutes=null run_name=NEW_NAME", chosen)
    config.model = sized_model(config)
    return end


def choose(config: Config, characters: int, deadline: float, time_step: TimeStep, final: int = 0) -> float | None:
    """Chooses the null fields; given values are kept. `time_step` measures this machine; a time limit ends at
    `deadline`, when `final` other characters have been scored, too. Returns when training must end if there is a time
    limit. Raises `UserError` for a text or a time that is too short.
    """
    trainer, chooses_model, end = config.trainer, bool(null_fields(config)), None
    if chooses_model:
        choose_model(config, characters, deadline, time_step)
    evaluation_steps = scoring_steps(config, held_out_characters(config, characters))
    if trainer.max_minutes is not None:
        most_steps = useful_steps(config, characters) if chooses_model else math.inf
        step_s = time_step(config)
        if distributed.device().type == "cuda" and trainer.compile == "auto":
            longest_s = step_s * min(most_steps, planned_steps(config, characters))
            step_s = choose_compile(config, min(seconds_left(deadline), longest_s), time_step, step_s)
        if distributed.device().type == "cpu":  # each evaluation may find the best weights yet, which are saved
            evaluation_steps += save_seconds(config) / step_s
        # One process scores the final part.
        final += characters - usable_characters(config, characters)
        deadline -= distributed.size() * step_s * scoring_steps(config, final)
        end = choose_steps(config, characters, deadline, step_s, evaluation_steps, most_steps)
    steps = planned_steps(config, characters)
    if trainer.eval_every_steps is None:
        trainer.eval_every_steps = math.ceil(steps / number_of_evaluations(steps / evaluation_steps))
    if chooses_model:
        choose_rates(config, characters)
    if trainer.save_every is None and trainer.save_every_steps is None:
        trainer.save_every_steps = trainer.eval_every_steps
    return end


def choose_model(config: Config, characters: int, deadline: float, time_step: TimeStep) -> None:
    """Chooses the null fields of `CHOSEN`, except the learning rate and the decays (`choose_rates`)."""
    trainer, data, model = config.trainer, config.data, config.model
    usable = usable_characters(config, characters)
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
    device, is_timed = distributed.device().type, trainer.max_minutes is not None
    if device != "cpu":
        log.info("sizing      the rule was fitted on CPUs; on %s it is extrapolated", device)
    longest = usable // 20  # context
    if data.train_split is not None:  # a held-out part that is too short is refused later
        longest = min(longest, max(held_out_characters(config, characters) - 1, MIN_CONTEXT))

    # The speed of the reference model. On CUDA, large steps are faster: it is timed with the largest.
    batch = rule.characters_per_step(usable, 1024 if is_timed else 128, math.inf, device == "cuda")
    if is_timed:
        batch = max(batch, 1024)  # as the rule was fitted
    reference = copy.deepcopy(config)
    reference.trainer.compile = "false"  # not worth it for a few steps
    fill(reference, {"data.train_split": 0.8 * (1 - data.final_split)})
    fill(reference, sizes_of(config, longest, *rule.REFERENCE, batch))
    steps = planned_steps(reference, characters)
    budget = "the given steps"
    if is_timed:
        step_s, seconds = time_step(reference), max(seconds_left(deadline), 0.0)
        if seconds / step_s < steps:
            steps = seconds / step_s
            budget = f"{duration(seconds)} of training"
    flops = steps * step_characters(reference) * flops_per_character(reference)

    layers, width, context = rule.best_sizes(usable, flops)
    affordable = flops / rule.REFERENCE_FLOPS if is_timed else math.inf
    batch = rule.characters_per_step(usable, model.n_embd or width, affordable, device == "cuda")
    fill(config, sizes_of(config, longest, layers, width, context, batch))
    affordable = flops / flops_per_character(config)
    held_out = max(MIN_HELD_OUT, EVALUATION_SHARE / MIN_EVALUATIONS * affordable / SCORING_COST)
    least = min(max(SHORT_HELD_OUT, data.block_size + 2), usable / 10)  # a window has to fit
    held_out = min(held_out, max(usable / 20, least))
    fill(config, {"data.train_split": round((1 - data.final_split) * (1 - held_out / usable), 6)})
    steps = planned_steps(config, characters)
    if is_timed:
        steps = min(steps, affordable / step_characters(config))
    training = training_characters(config, characters)
    dropout = rule.dropout(training, min(passes(config, characters, steps), rule.USEFUL_PASSES))
    fill(config, {**dict.fromkeys(DROPOUT, dropout), "model.ngram_rows": rule.ngram_rows(training)})
    log.info(
        "sizing      layers %d, width %d, context %d, dropout %g, n-gram rows %d: for a text of %s %ss and %s",
        model.n_layer, model.n_embd, data.block_size, model.resid_pdrop, model.ngram_rows, f"{characters:,}",
        unit_of(data.encoding), budget,
    )  # fmt: skip


def sizes_of(config: Config, longest: int, layers: int, width: int, context: int, batch: int) -> dict[str, int]:
    """Values for `SIZES`, from layers, width, context (at most `longest`) and characters of a batch; sizes set in
    `config` are kept.
    """
    heads, own_width, processes = config.model.n_head, config.model.n_embd, distributed.size()
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


def choose_compile(config: Config, seconds: float, time_step: TimeStep, step_s: float) -> float:
    """Chooses whether to compile on a GPU, for a run of at most `seconds`; without, a step takes `step_s`. Returns the
    seconds per step of the choice.
    """
    missing = distributed.all_gather(missing_to_compile("cuda"))
    if seconds > COMPILE_PAYS_FROM_S and not any(missing):
        config.trainer.compile = "true"
        compiled_s = time_step(config)
        if compiled_s < step_s:
            return compiled_s
    config.trainer.compile = "false"
    return step_s


def choose_steps(
    config: Config, characters: int, deadline: float, step_s: float, evaluation_steps: float, most_steps: float
) -> float:
    """Chooses the steps: `FILLED` of those that fit into the remaining time, at `step_s` seconds each and
    `evaluation_steps` steps per evaluation, but at most `most_steps`. Returns when training must end, before the last
    evaluation and save. If no step fits, keeps `trainer.max_steps`, for the clock to end; without, raises `UserError`.
    """
    trainer, evaluation_s = config.trainer, step_s * evaluation_steps
    initial_s = evaluation_s if config.init_from is not None else 0.0  # of the pretrained weights
    reserved = evaluation_s + save_seconds(config) + FINISH_S  # after training
    seconds = seconds_left(deadline) - reserved
    left = seconds - gpu_seconds(config, seconds / step_s) - initial_s
    if trainer.eval_every_steps is None:
        number = number_of_evaluations(left / evaluation_s) - 1
        fitting = int((left - number * evaluation_s) / step_s)
    else:  # at the interval, and at least halfway
        number = MIN_EVALUATIONS - 1
        with_evaluations_s = step_s + evaluation_s / trainer.eval_every_steps
        fitting = int(min((left - number * evaluation_s) / step_s, left / with_evaluations_s))
    if fitting < 1 and trainer.max_steps is not None:  # of these, the clock decides
        return deadline - reserved
    if fitting < 1:
        missing = step_s + (number + 1) * evaluation_s - left
        enough = math.ceil(100 * (trainer.max_minutes + missing / 60)) / 100
        raise UserError(
            f"trainer.max_minutes={trainer.max_minutes:g}: too short for a step of {step_s:.2f} s and its evaluation; "
            f"try {enough:g}"
        )
    limits = [
        (max(int(FILLED * fitting), 1), f"fit into the {duration(seconds)} left"),
        (most_steps, f"make {rule.USEFUL_PASSES} passes over the text"),
        (planned_steps(config, characters), "were set"),
    ]
    steps, why = min(limits)
    trainer.max_steps = int(steps)
    log.info("sizing      %s steps: as many as %s", f"{trainer.max_steps:,}", why)
    return deadline - reserved


def save_seconds(config: Config) -> float:
    """Seconds to save a snapshot: the weights and two moment estimates, in float32."""
    return 12 * count_weights(config.model) / SAVED_PER_S


def gpu_seconds(config: Config, steps: float) -> float:
    """Seconds on a GPU beside `steps` and their evaluations: compiling again and sampling."""
    if distributed.device().type == "cpu":
        return 0.0
    draws = 2 + int(math.log(max(steps / config.trainer.log_every_steps, 1.0), 4))
    sampling_s = DRAW_S * (config.model.n_layer + 1) * config.samples * draws
    return sampling_s + COMPILE_AGAIN_S * (config.trainer.compile == "true")


def number_of_evaluations(affordable: float) -> int:
    """Number of evaluations of a run that takes as long as `affordable` evaluations."""
    return min(max(int(EVALUATION_SHARE * affordable), MIN_EVALUATIONS), MAX_EVALUATIONS)


def choose_rates(config: Config, characters: int) -> None:
    """Chooses the learning rate and the weight decays for the planned passes over the text; given values are kept."""
    model, optimizer, steps = config.model, config.optimizer, planned_steps(config, characters)
    planned = passes(config, characters, steps)
    useful = min(planned, rule.USEFUL_PASSES)
    if config.init_from is None:
        rate = rule.learning_rate(usable_characters(config, characters), model.n_embd, steps)
        fill(config, {"optimizer.learning_rate": rate})
        decay = rule.weight_decay(useful, count_block_weights(model), optimizer.learning_rate * steps)
        ngram_decay = rule.ngram_decay(useful, passes(config, characters, 1), optimizer.learning_rate)
    else:
        rate = rule.fine_tuning_rate(training_characters(config, characters), model.n_embd, useful)
        fill(config, {"optimizer.learning_rate": rate})
        decay = rule.fine_tuning_decay(optimizer.learning_rate * steps)
        ngram_decay = 2.0  # more would forget the pretrained tables
    fill(config, {"optimizer.weight_decay": decay, "optimizer.ngram_decay": ngram_decay})
    log.info("sizing      optimizer settings for %.3g passes over the text", planned)


def restore_choice(config: Config, characters: int, recorded: dict[str, Any]) -> None:
    """Sets the null fields from the settings `recorded` in the run's snapshot. Another time limit than its
    `trainer.max_minutes` scales its `trainer.max_steps` in proportion; if the model was chosen for the text, up to
    `USEFUL_PASSES`. Raises `UserError` for a time limit that would extend a run started without one.
    `check_can_resume` refuses another text later.
    """
    trainer, was_chosen = config.trainer, bool(null_fields(config))
    before: Any = flatten(recorded)
    if trainer.max_minutes is not None or was_chosen:
        keys = (*CHOSEN, "trainer.eval_every_steps", "trainer.save_every_steps")
        fill(config, {key: before.get(key) for key in keys})
    fill(config, NO_NGRAMS)  # snapshots that predate them
    if distributed.device().type == "cuda" and trainer.compile == "auto":
        trainer.compile = before.get("trainer.compile", "auto")
    minutes, steps = before.get("trainer.max_minutes"), before.get("trainer.max_steps")
    if minutes is None:
        is_same_text = before.get("data.path") == config.data.path
        is_longer = steps is None or trainer.max_steps is None or trainer.max_steps > steps
        if trainer.max_minutes is not None and is_same_text and is_longer:
            above = f" above {steps}" if steps else ""
            raise UserError(
                f"trainer.max_minutes={trainer.max_minutes:g}: this run started without a time limit; to train longer, "
                f"give trainer.max_steps{above} or trainer.max_epochs, and no max_minutes"
            )
        trainer.max_minutes = None
    elif trainer.max_minutes is not None:
        useful = max(useful_steps(config, characters), steps) if was_chosen else math.inf
        scaled = max(1, round(steps * trainer.max_minutes / minutes))
        wanted = max(scaled, trainer.max_steps or 0)
        trainer.max_steps = int(min(scaled, useful, planned_steps(config, characters)))
        if trainer.max_steps < wanted:
            log.info(
                "sizing      %d steps; to train longer, set trainer.max_steps and trainer.max_minutes=null",
                trainer.max_steps,
            )
    if trainer.max_steps is None and trainer.max_epochs is None:
        trainer.max_steps = steps or 1  # of another text, which is refused later


# --- a configuration and its null fields ---


def null_fields(config: Config) -> list[str]:
    """The null fields of `CHOSEN`."""
    return [key for key in CHOSEN if attrgetter(key)(config) is None]


def fill(config: Config, values: dict[str, Any]) -> None:
    """Sets each field of `values`, `group.name`, that is null."""
    for key, value in values.items():
        if attrgetter(key)(config) is None:
            group, name = key.split(".")
            setattr(getattr(config, group), name, value)


def sized_model(config: Config) -> GPTConfig:
    """`config.model` as a checked `GPTConfig`, with the block size of `config.data`. Raises `UserError`."""
    return dataclasses.replace(config.model, model_type=None, block_size=config.data.block_size)


# --- quantities that follow from a configuration and the length of its text ---


def usable_characters(config: Config, characters: int) -> int:
    """Characters outside the final part."""
    return characters - int(characters * config.data.final_split)


def training_characters(config: Config, characters: int) -> int:
    return max(1, int(characters * config.data.train_split))


def held_out_characters(config: Config, characters: int) -> int:
    return usable_characters(config, characters) - training_characters(config, characters)


def step_characters(config: Config) -> int:
    return config.trainer.batch_size * config.data.block_size


def passes(config: Config, characters: int, steps: float) -> float:
    """Passes over the training text in so many steps."""
    return steps * step_characters(config) / training_characters(config, characters)


def planned_steps(config: Config, characters: int) -> float:
    """Steps that `max_steps` and `max_epochs` allow, or inf."""
    # Too short a text is refused when it is split.
    windows = max(training_characters(config, characters) - config.data.block_size, 1)
    return plan.planned_steps(config.trainer, windows)


def useful_steps(config: Config, characters: int) -> int:
    """Steps for at most `USEFUL_PASSES` over the text."""
    return max(1, rule.USEFUL_PASSES * training_characters(config, characters) // step_characters(config))


def scoring_steps(config: Config, characters: float) -> float:
    """Training steps that take as long as scoring so many characters."""
    return SCORING_COST * characters / step_characters(config)


def count_block_weights(model: GPTConfig) -> int:
    """The number of weights in the matrices of the blocks."""
    return 12 * model.n_layer * model.n_embd**2


def count_weights(model: GPTConfig) -> int:
    """The number of weights, without those of norms, biases and positions."""
    return count_block_weights(model) + 2 * (model.vocab_size + model.ngram_rows) * model.n_embd


def flops_per_character(config: Config) -> float:
    """Floating-point operations of training on a character, as `GPT.flops_per_character`."""
    model = config.model
    matrices = count_block_weights(model) + model.n_embd * model.vocab_size
    return 6 * matrices + 12 * model.n_layer * model.n_embd * config.data.block_size


# --- time on this machine ---


def seconds_left(deadline: float) -> float:
    """Seconds to the deadline, the minimum over ranks."""
    return min(distributed.all_gather(deadline - time.monotonic()))


def seconds_per_step(build: Callable[[Config], TimedTrainer], config: Config) -> float:
    """Seconds per training step of `config`, whose sizes are set."""
    config = copy.deepcopy(config)
    fill(config, PROVISIONAL)
    config.model = sized_model(config)
    config.trainer.max_steps, config.trainer.max_epochs = 30, None
    step_s = time_steps(build(config))
    hardware.free_unused(distributed.device())  # only garbage collection frees a Trainer
    return step_s


def time_steps(trainer: TimedTrainer) -> float:
    """Median time of a training step, seconds, on the slowest rank, over about `TIMED_S` seconds or all steps. Updates
    the model.
    """
    on_gpu = distributed.device().type == "cuda"
    timed: list[float] = []
    trainer.model.train()
    with trainer.precision.determinism(), contextlib.closing(trainer):
        while trainer.state.step < trainer.plan.total_steps:
            started = time.perf_counter()
            loss, *_ = trainer.step()
            loss.item()  # waits for the device
            timed.append(max(distributed.all_gather(time.perf_counter() - started)))
            # The first steps capture and check the CUDA graph. On a CPU, a step may take half a minute.
            fewest = 18 if on_gpu else 4 if sum(timed) < 4 * TIMED_S else 2
            if len(timed) >= fewest and sum(timed) > TIMED_S:
                break
    trainer.requests.wait()  # for the exchange that is pending
    return statistics.median(timed[1:] or timed)  # the first step allocates and loads
