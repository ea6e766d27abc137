"""Draft: a configuration of which some fields are null until they are chosen for a text."""

from dataclasses import dataclass
from typing import Any

from engine.config.schema import Config, GPTConfig
from engine.run import plan
from engine.sizing.rule import USEFUL_PASSES

# The fields that are chosen if null. Snapshots and config.yaml store them.
SIZES = ("data.block_size", "model.n_layer", "model.n_head", "model.n_embd", "trainer.batch_size")
DROPOUT = ("model.embd_pdrop", "model.resid_pdrop")
CHOSEN = (
    *SIZES, *DROPOUT, "model.ngram_rows", "optimizer.ngram_decay", "data.train_split", "optimizer.weight_decay",
    "optimizer.learning_rate",
)  # fmt: skip

NO_NGRAMS = {"model.ngram_rows": 0, "optimizer.ngram_decay": 0.0}
SCORING_COST = 0.4  # time to score a character, relative to training on it


@dataclass
class Draft:
    """A configuration, and the length of its text in characters."""

    config: Config
    characters: int

    def get(self, key: str) -> Any:
        """The value of a field; `key` is `group.name`."""
        group, name = key.split(".")
        return getattr(getattr(self.config, group), name)

    def fill(self, values: dict[str, Any]) -> None:
        """Sets each field of `values` that is null in the configuration."""
        for key, value in values.items():
            if self.get(key) is None:
                group, name = key.split(".")
                setattr(getattr(self.config, group), name, value)

    @property
    def nulls(self) -> list[str]:
        """The null fields of `CHOSEN`."""
        return [key for key in CHOSEN if self.get(key) is None]

    @property
    def is_incomplete(self) -> bool:
        """Whether a field is null, or steps must be chosen for a time limit."""
        return self.config.trainer.max_minutes is not None or bool(self.nulls)

    @property
    def usable_characters(self) -> int:
        """Characters outside the final part."""
        return round(self.characters * (1 - self.config.data.final_split))

    @property
    def training_characters(self) -> int:
        return max(1, int(self.characters * self.config.data.train_split))

    @property
    def held_out_characters(self) -> int:
        return self.usable_characters - self.training_characters

    @property
    def step_characters(self) -> int:
        return self.config.trainer.batch_size * self.config.data.block_size

    @property
    def flops_per_character(self) -> float:
        """Floating-point operations of training on a character, as `GPT.flops_per_character`."""
        model = self.config.model
        matrices = count_block_weights(model) + model.n_embd * model.vocab_size
        return 6 * matrices + 12 * model.n_layer * model.n_embd * self.config.data.block_size

    @property
    def planned_steps(self) -> float:
        """Steps that `max_steps` and `max_epochs` allow, or inf."""
        # Too short a text is refused when it is split.
        windows = max(self.training_characters - self.config.data.block_size, 1)
        return plan.planned_steps(self.config.trainer, windows)

    @property
    def useful_steps(self) -> int:
        """Steps for at most `USEFUL_PASSES` over the text."""
        return max(1, USEFUL_PASSES * self.training_characters // self.step_characters)

    def passes(self, steps: float) -> float:
        """Passes over the training text in so many steps."""
        return steps * self.step_characters / self.training_characters

    def scoring_steps(self, characters: float) -> float:
        """Training steps that take as long as scoring so many characters."""
        return SCORING_COST * characters / self.step_characters


def count_block_weights(model: GPTConfig) -> int:
    """The number of weights in the matrices of the blocks."""
    return 12 * model.n_layer * model.n_embd**2


def count_weights(model: GPTConfig) -> int:
    """The number of weights, without those of norms, biases and positions."""
    return count_block_weights(model) + 2 * (model.vocab_size + model.ngram_rows) * model.n_embd
