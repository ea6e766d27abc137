import pytest

from model import OptimizerConfig

TABLE = [  # schedule, warm-up, floor, cool-down, {step of 100: factor}
    ("constant", 0, 0.0, 0.4, {0: 1.0, 50: 1.0, 99: 1.0, 500: 1.0}),
    ("constant", 4, 0.0, 0.4, {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 99: 1.0}),
    ("linear", 0, 0.0, 0.4, {0: 1.0, 25: 0.75, 50: 0.5, 99: 0.01, 100: 0.0, 500: 0.0}),
    ("linear", 20, 0.5, 0.4, {19: 20 / 21, 20: 1.0, 60: 0.75, 100: 0.5}),
    ("cosine", 0, 0.0, 0.4, {0: 1.0, 50: 0.5, 100: 0.0}),
    ("cosine", 20, 0.1, 0.4, {20: 1.0, 60: 0.55, 100: 0.1, 200: 0.1}),
    ("wsd", 10, 0.0, 0.4, {0: 1 / 11, 10: 1.0, 59: 1.0, 60: 1.0, 80: 0.5, 100: 0.0}),
    ("wsd", 20, 0.0, 1.0, {19: 20 / 21, 20: 1.0, 60: 0.5, 100: 0.0}),
]


@pytest.mark.parametrize("schedule, warmup, floor, cooldown, points", TABLE)
def test_learning_rate_schedules(schedule, warmup, floor, cooldown, points):
    config = OptimizerConfig(schedule=schedule, warmup_steps=warmup, min_lr_ratio=floor, cooldown_ratio=cooldown)
    for step, factor in points.items():
        assert config.learning_rate_factor(step, 100) == pytest.approx(factor)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_a_warm_up_longer_than_the_run_is_clamped_to_it(schedule):
    config = OptimizerConfig(schedule=schedule, warmup_steps=1000)
    factors = [config.learning_rate_factor(step, 10) for step in range(10)]
    assert factors == sorted(factors) and factors[-1] == pytest.approx(10 / 11)
