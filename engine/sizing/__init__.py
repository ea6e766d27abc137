"""Sizing: the model, the regularization and the steps for a text, a machine and a time limit.

Offers `choose_sizes` (choose.py), which sets the null fields of a configuration by the formulas of rule.py, with what
trial.py measures of the machine; recall.py restores them when a run resumes. draft.py names the fields and has the
quantities that follow from them, such as the characters of a step.
"""
