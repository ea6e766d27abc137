"""Parallel training: process group, sharded models, the variables of launchers."""
