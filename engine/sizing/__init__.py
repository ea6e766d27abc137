"""Sizing: the model, the regularization and the steps for a text, a machine and a time limit.

`choose_sizes` (choose.py) sets the null fields of a configuration by the formulas of rule.py, with the time of a few
steps on this machine; a run that resumes keeps what was chosen.
"""
