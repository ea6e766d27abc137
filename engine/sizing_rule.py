"""The rule of sizing: what is best for a text and a training, as fitted to runs (benchmarks/sizing.md)."""

# Layers, width and context of the model with which the speed of a machine is measured.
REFERENCE = (4, 128, 128)
REFERENCE_FLOPS = 5.5e6  # of it, for each character of training
USEFUL_PASSES = 20  # over the text, at most: more overfit


def best_sizes(characters: int, operations: float) -> tuple[int, int, int]:
    """Layers, width and context for a text of so many `characters` and so many floating-point operations
    of training. Width 128 is best in a wide range of times; beyond it depth pays first, then width.
    """
    affordable = operations / REFERENCE_FLOPS  # characters of training a reference model
    enough = min(
        4e6, USEFUL_PASSES * characters
    )  # of them, for a model that learns all that the text has
    # The width of the reference from `least` to `most`, beyond them in proportion to a power of the distance.
    least, most = min(1e6, 10 * characters), 2e7
    for_the_time = 128 * (affordable / min(max(affordable, least), most)) ** 0.4
    for_the_text = 96 * (characters / 30_000) ** 0.25
    width = min(max(32 * round(min(for_the_time, for_the_text) / 32), 64), 1024)
    has_time = affordable >= 0.9 * enough
    if (
        characters >= 200_000
    ):  # n-gram embeddings take the place of a layer or two ("Fewer layers ...")
        layers = 3 if affordable < 8e6 else 4 if affordable < most or characters < 500_000 else 6
    elif characters >= 20_000 and affordable >= 1.35 * enough:
        # A short text is better served by depth and context than by width ("Depth for short texts").
        layers = 8 if characters < 50_000 and affordable >= 1.8 * enough else 6
    else:
        layers = 3 if width <= 96 and not has_time else 4
    is_long = characters >= 200_000 and affordable >= 2e6
    return layers, width, 256 if is_long or has_time else 128


def step_size(characters: int, width: int, affordable: float, on_gpu: bool) -> int:
    """Characters of a step for a text of so many `characters` and a model of that width, where the time is enough to
    train a reference model on `affordable` of them.
    """
    step = 1024 if characters < 50_000 else 2048 if characters < 500_000 else 3072
    if on_gpu:  # where larger steps take little longer: 200 for a pass over the text are enough
        step = max(step, int(min(characters / 200, affordable / 2000, 64 * width, 24_576)))
    return step


def dropout(characters: int, passes: float) -> float:
    """Dropout for so many passes over a training text of so many `characters`."""
    # It costs a third of the steps on a CPU, and pays for many passes over a short text alone.
    return round(0.1 + (passes - 10) / 160, 2) if passes >= 10 and characters < 200_000 else 0.0


def ngram_rows(characters: int) -> int:
    """Rows of the n-gram tables for a training text of so many `characters`."""
    # They learn a shorter one by heart, however much they decay.
    return 16_384 if characters >= 70_000 else 0


def learning_rate(characters: int, width: int, steps: float) -> float:
    """Peak learning rate of Muon for a model of this width, a text of so many `characters` and so many steps."""
    factor = max((900_000 / characters) ** 0.3, (600 / steps) ** 0.6, 1.0)
    return rounded(min(0.008 * (128 / width) ** 0.5 * factor, 0.1))


def fine_tuning_rate(passes: float, width: int) -> float:
    """Peak learning rate for pretrained weights: less, the more passes may overfit."""
    return rounded(0.008 * (128 / width) ** 0.5 * (2 / max(passes, 2.0)) ** 1.5, least=0.001)


def weight_decay(passes: float, weights: int, rate_sum: float) -> float:
    """Weight decay of so many `weights` for so many passes over the text; `rate_sum`: peak learning rate x steps."""
    # Decay times rate, summed over the training: more for more passes, and for a model that can learn more by heart.
    total = 9 * (passes / 11) ** 1.75 * max(weights / 800_000, 1.0) ** (1 / 3)
    return rounded(min(max(total, 1.5) / rate_sum, 3.0), least=0.2)


def fine_tuning_decay(rate_sum: float) -> float:
    """Weight decay of pretrained weights, which more would forget; `rate_sum`: peak learning rate x steps."""
    return rounded(min(0.3 / rate_sum, 3.0))


def ngram_decay(passes: float, share: float, rate: float) -> float:
    """Weight decay of the n-gram tables, for so many passes, in steps of that share of the text."""
    # A vector that is not seen again falls to 1/e within 0.6 / passes of a pass at the peak rate: the more passes, the
    # sooner, or the tables learn the text by heart.
    forgotten = min(passes * share / 0.6, 0.7)  # share of a vector in a step
    return rounded(min(forgotten / rate, 1000.0), least=0.5)


def rounded(value: float, least: float = 0.0) -> float:
    """`value` with two significant digits, or `least` if that is more."""
    return float(f"{max(value, least):.2g}")
