"""The library behind the programs at the root.

Each package has one purpose, stated in its `__init__.py`. It may use those before it in this order, and none
imports a program of the root (tests/test_architecture.py):

    errors, portable, files, signals  one-line errors; platform differences; local files; signals
    machine                  device names and capabilities
    kernels                  the operations of a model: plain PyTorch, C kernels on a CPU
    config                   settings: the dataclasses, clear errors, what a resumed run may change
    precision                dtype, torch.compile, determinism: the `auto` settings
    text                     sources of a text, and its encoding as ids
    repeats                  held-out text that stands in the training text
    parallel                 processes: ranks, sharding, launchers, clusters
    optim                    AdamW, Muon
    generation               sampling from a model, with a KV cache
    snapshots                the state of a run: saved atomically, verified, restored
    run                      the run directory: its lock, log, metrics, trackers, evaluation, provenance
    sizing                   the model and the steps for a text, a machine and a time limit
    interop                  Transformers and back; pretrained weights; a page that runs a model
    reports                  the page of a run, its verdict, the table of a sweep
"""
