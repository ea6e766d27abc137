"""Parallel training: process group, sharded models, and the launchers that start the ranks.

Offers `distributed` (rank, device, collectives), `sharding` (DDP or FSDP2 around a model), `launch`
(several processes from one command) and `slurm` (srun and submitit); `rendezvous` is for `distributed`
alone. Knows neither the model, the run directory nor the configuration.
"""
