"""Optimizers and the learning-rate schedule.

Offers `OptimizerConfig`, `create_optimizer` (optimizer.py), `learning_rate_factor` and
`set_learning_rate` (schedule.py); muon.py and adamw.py are the optimizers. The package knows parameters by
name and shape, not the model they belong to.
"""
