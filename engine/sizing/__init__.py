"""Sizing: the model, the regularization and the steps for a text, a machine and a time limit."""
