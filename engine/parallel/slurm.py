"""SLURM: the environment variables of srun, translated to torchrun's."""

import os
import re
from collections.abc import MutableMapping

from engine.errors import UserError, one_line


def export_torchrun_env(env: MutableMapping[str, str] = os.environ) -> None:
    """Sets torchrun's variables where srun started this process as one of several.

    A launcher between srun and Python (torchrun, Accelerate) has set RANK, and wins. A batch script,
    a shell of salloc and `srun --pty` are one process: they have SLURM_PROCID, and SLURM_NTASKS of
    the whole job, but no step of several tasks. Raises `UserError` for incomplete variables.
    """
    if "RANK" in env:
        return
    if env.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return

    try:
        first_host = re.sub(r"\[(\w+)[^]]*\]", r"\1", env["SLURM_STEP_NODELIST"]).split(",")[0]  # node[01-03,07],gpu5
        counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"])  # 4(x2),2
        tasks_per_node = [n for n, nodes in counts for _ in range(int(nodes or 1))]
        # The port: the same for all tasks of a step, another for the next step or job on a host; below
        # those that Linux gives to outgoing connections.
        port = 10_000 + (int(env["SLURM_JOB_ID"]) + 7919 * int(env["SLURM_STEP_ID"])) % 20_000
        env.update(
            RANK=env["SLURM_PROCID"],
            WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"],
            LOCAL_RANK=env["SLURM_LOCALID"],
            LOCAL_WORLD_SIZE=tasks_per_node[int(env["SLURM_NODEID"])],
            MASTER_ADDR=env.get("MASTER_ADDR", first_host),
            MASTER_PORT=env.get("MASTER_PORT", str(port)),
        )
    except (LookupError, ValueError) as error:
        raise UserError(
            f"SLURM_STEP_NUM_TASKS={env['SLURM_STEP_NUM_TASKS']}, but another of srun's variables is missing or wrong: "
            f"{one_line(error)}"
        ) from error
