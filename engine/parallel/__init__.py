"""Parallel training: process group, sharded models, the variables of launchers.

Offers `distributed` (rank, device, collectives), `sharding` (DDP or FSDP2 around a model) and `slurm`
(srun's variables as torchrun's); `rendezvous` is for `distributed` alone. Knows neither the model, the
run directory nor the configuration.
"""
