"""Recall: what was chosen when a run first started, restored from its snapshot; another time limit scales its steps."""

import logging
import math
from typing import Any

from engine.config.settings import flatten
from engine.errors import UserError
from engine.sizing.draft import CHOSEN, NO_NGRAMS, Draft
from engine.sizing.rule import USEFUL_PASSES

log = logging.getLogger("gpt")


def recall(draft: Draft, recorded: dict[str, Any]) -> None:
    """Sets the null fields from the settings `recorded` in the run's snapshot. Another time limit than its
    `trainer.max_minutes` scales its `trainer.max_steps` in proportion; if the model was chosen for the text, up to
    `USEFUL_PASSES`. Raises `UserError` for a time limit that would extend a run started without one.
    `check_can_resume` refuses another text later.
    """
    trainer = draft.config.trainer
    before: Any = flatten(recorded)
    was_chosen = bool(draft.nulls)
    if draft.is_incomplete:
        keys = (*CHOSEN, "trainer.eval_every_steps", "trainer.save_every_steps")
        draft.fill({key: before.get(key) for key in keys})
    draft.fill(NO_NGRAMS)  # snapshots that predate them
    minutes, steps = before.get("trainer.max_minutes"), before.get("trainer.max_steps")
    if minutes is None:
        is_same_text = before.get("data.path") == draft.config.data.path
        is_longer = steps is None or trainer.max_steps is None or trainer.max_steps > steps
        if trainer.max_minutes is not None and is_same_text and is_longer:
            above = f" above {steps}" if steps else ""
            raise UserError(
                f"trainer.max_minutes={trainer.max_minutes:g}: the length of this run does not follow from a time "
                f"limit; to train longer, give trainer.max_steps{above} or trainer.max_epochs, and no max_minutes"
            )
        trainer.max_minutes = None
    elif trainer.max_minutes is not None:
        useful = max(draft.useful_steps, steps) if was_chosen else math.inf
        scaled = max(1, round(steps * trainer.max_minutes / minutes))
        if minutes == trainer.max_minutes and steps < (trainer.max_steps or 0):
            log.info("sizing      this run keeps its %d steps; to train longer, set trainer.max_minutes=null", steps)
        trainer.max_steps = int(min(scaled, useful, draft.planned_steps))
        if trainer.max_steps == useful < scaled:
            log.info(
                "sizing      %d steps: more time adds none beyond %d passes over the text; for more, set "
                "trainer.max_steps and trainer.max_minutes=null",
                useful, USEFUL_PASSES,
            )  # fmt: skip
    if trainer.max_steps is None and trainer.max_epochs is None:
        trainer.max_steps = steps or 1  # of another text, which is refused later
