"""Benchmarks: README.md has what is measured, how, and where the figures go."""
