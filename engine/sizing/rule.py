"""Rule: the best settings for a text and a compute budget, fitted to runs (benchmarks/sizing.md)."""

# Reference model, timed to measure the speed of a machine: layers, width, context.
REFERENCE = (4, 128, 128)
REFERENCE_FLOPS = 5.5e6  # per character of training
USEFUL_PASSES = 20  # over the text; more overfit


def best_sizes(characters: int, flops: float) -> tuple[int, int, int]:
    """Layers, width and context for a text of length `characters` and a budget of training `flops`.
    Width 128 in a wide range of budgets; larger budgets first get more layers, then more width.
    """
    affordable = flops / REFERENCE_FLOPS  # characters for the reference model
    enough = min(4e6, USEFUL_PASSES * characters)  # more does not pay
    # Width 128 from `least` to `most`; below narrower, above wider, by a power of the ratio to that bound.
    least, most = min(2e6, 10 * characters), 2e7
    for_the_time = 128 * (affordable / min(max(affordable, least), most)) ** 0.4
    for_the_text = 96 * (characters / 30_000) ** 0.25
    width = min(max(32 * round(min(for_the_time, for_the_text) / 32), 64), 1024)
    if 20_000 <= characters < 50_000 and affordable >= 1.05 * enough:
        layers = 8  # a short text gains more from depth than from width
    elif 50_000 <= characters < 200_000 and affordable >= 1.35 * enough:
        layers = 6
    elif not ngram_rows(round(0.95 * characters)):  # a twentieth is held out
        layers = 3 if width <= 96 and affordable < 0.9 * enough else 4
    elif characters >= 500_000 and affordable >= most:
        layers = 6
    else:  # n-gram embeddings take the place of some layers
        bounds = min(1.5 * characters, 4e6), min(4 * characters, 5e6), min(12 * characters, most)
        layers = 1 + sum(affordable >= bound for bound in bounds)
    return layers, width, 256 if affordable >= min(5e5, 10 * characters) else 128


def characters_per_step(characters: int, width: int, affordable: float, on_cuda: bool) -> int:
    """Characters per step, for a text of length `characters` and a model of `width`. `affordable`: characters for the
    reference model in the time.
    """
    step = 768 if characters < 50_000 else 2048 if characters < 500_000 else 3072
    if on_cuda:  # larger steps take little longer: 200 steps per pass are enough
        step = max(step, int(min(characters / 200, affordable / 2000, 64 * width, 24_576)))
    return step


def dropout(characters: int, passes: float) -> float:
    """Dropout probability for `passes` over a training text of `characters`."""
    # It pays only in many passes over a short text.
    return round(0.1 + (passes - 10) / 160, 2) if passes >= 10 and characters < 160_000 else 0.0


def ngram_rows(characters: int) -> int:
    """Rows of each n-gram table for a training text of length `characters`."""
    # The tables memorize a shorter text, whatever the decay.
    return 16_384 if characters >= 70_000 else 0


def learning_rate(characters: int, width: int, steps: float) -> float:
    """Peak learning rate of Muon for a model of `width`, a text of length `characters` and `steps` steps."""
    factor = max((900_000 / characters) ** 0.3, (600 / steps) ** 0.6, 1.0)
    return rounded(min(0.008 * (128 / width) ** 0.5 * factor, 0.1))


def fine_tuning_rate(characters: int, width: int, passes: float) -> float:
    """Peak learning rate for pretrained weights: lower for more passes, and for a training text of fewer characters."""
    factor = (2 / max(passes, 2.0)) ** 1.5 * min(characters / 100_000, 1.0) ** 0.5
    return rounded(0.008 * (128 / width) ** 0.5 * factor, least=0.001)


def weight_decay(passes: float, weights: int, rate_sum: float) -> float:
    """Weight decay for a model of `weights` weights and `passes` over the text; `rate_sum`: peak rate x steps."""
    # `total`: decay x rate, summed over the steps; it grows with the passes and with the size of the model.
    total = 9 * (passes / 11) ** 1.75 * max(weights / 800_000, 1.0) ** (1 / 3)
    return rounded(min(max(total, passes, 1.5) / rate_sum, 3.0), least=0.2)


def fine_tuning_decay(rate_sum: float) -> float:
    """Weight decay for fine-tuning: more would forget pretrained weights; `rate_sum`: peak rate x steps."""
    return rounded(min(0.3 / rate_sum, 3.0))


def ngram_decay(passes: float, share: float, rate: float) -> float:
    """Weight decay of the n-gram tables. `share`: fraction of the training text in a step; `rate`: peak rate."""
    # At the peak rate, a vector that no step uses decays to 1/e in 0.6 / passes of a pass. With more passes it has to
    # decay sooner, or the tables memorize the text.
    forgotten = min(passes * share / 0.6, 0.7)  # fraction of a vector per step
    return rounded(min(forgotten / rate, 1000.0), least=0.5)


def rounded(value: float, least: float = 0.0) -> float:
    """`value` with two significant digits, or `least` if that is more."""
    return float(f"{max(value, least):.2g}")
