"""Optimizers and the learning-rate schedule.

Offers `OptimizerConfig`, `create_optimizer` and `set_learning_rate` (optimizer.py); muon.py is Muon. The package
knows parameters by name and shape, not the model they belong to.
"""
