"""The processes of a cluster: torchrun's names for what SLURM's srun, or submitit, says of them.

Nothing else in the application reads the variables of these launchers.
"""

import os
import re
import socket
from collections.abc import MutableMapping

from engine.errors import UserError

FIRST_PORT, PORTS = 10_000, 20_000  # below those that Linux gives to outgoing connections


def export_torchrun_env(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in
    `environment` where srun or submitit has started this process as one of several.

    Call it before anything asks which process this is. Where RANK is set, there is a launcher
    between, torchrun or Accelerate, and nothing is changed; a MASTER_ADDR or MASTER_PORT that is
    set stays. A batch script, a shell of salloc, `srun --pty` and a single task stay one process:
    they too can have SLURM_PROCID, and SLURM_NTASKS of the whole allocation, but not a step of
    several tasks. Raises `UserError` that names the variable which is missing or cannot be read.
    """
    if "RANK" in environment:
        return
    if environment.get("SUBMITIT_EXECUTOR") == "local":
        size = local_size = _number("SUBMITIT_LOCAL_NTASKS", environment)
        names = {"RANK": "SUBMITIT_LOCAL_GLOBALID", "LOCAL_RANK": "SUBMITIT_LOCAL_LOCALID"}
        host, job, step = socket.gethostname(), _number("SUBMITIT_LOCAL_JOB_ID", environment), 0
    elif environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        size = _number("SLURM_STEP_NUM_TASKS", environment)
        tasks_per_node = _tasks_per_node("SLURM_STEP_TASKS_PER_NODE", environment)
        node = _number("SLURM_NODEID", environment)
        if node >= len(tasks_per_node) or sum(tasks_per_node) != size:
            raise UserError(
                f"SLURM_STEP_TASKS_PER_NODE={environment['SLURM_STEP_TASKS_PER_NODE']}: does not "
                f"fit SLURM_STEP_NUM_TASKS={size} and SLURM_NODEID={node}; these three are srun's"
            )
        local_size = tasks_per_node[node]
        names = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID"}
        host = first_host("SLURM_STEP_NODELIST", environment)
        job, step = (_number(f"SLURM_{name}", environment) for name in ("JOB_ID", "STEP_ID"))
    else:
        return
    if size == 1:
        return
    ranks = {name: str(_number(source, environment)) for name, source in names.items()}
    environment.update(ranks, WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(local_size))
    environment.setdefault("MASTER_ADDR", host)
    # The same for all tasks of a step, another for the next step or job on the same host.
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + (job + 7919 * step) % PORTS))


def is_restart() -> bool:
    """Whether SLURM has started this job before and put it back into its queue."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def shows_own_gpus() -> bool:
    """Whether srun was told to let each task see its own GPUs alone, numbered from 0."""
    return any(name in os.environ for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"))


def first_host(name: str, environment: MutableMapping[str, str]) -> str:
    """The first host in the list of hosts of the variable `name`: node01 of node[01-03,07],gpu5.

    It is where SLURM puts task 0. Raises `UserError` for what is no such list.
    """
    hosts = _value(name, environment)
    first = re.match(r"(?:\[[^][]+\]|[^][,])+(?=,|$)", hosts)  # a comma in brackets parts no names
    host = re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0]) if first else ""
    if not re.fullmatch(r"\w[\w.-]*", host):
        raise UserError(f"{name}={hosts}: is not a list of hosts such as node[01-03,07],gpu5")
    return host


def _tasks_per_node(name: str, environment: MutableMapping[str, str]) -> list[int]:
    """Of every node in turn: [4, 4, 2] of 4(x2),2."""
    value, counts = _value(name, environment), []
    for part in value.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UserError(f"{name}={value}: is not a list of numbers of tasks such as 4(x2),2")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _number(name: str, environment: MutableMapping[str, str]) -> int:
    value = _value(name, environment)
    if not value.isdecimal():
        raise UserError(f"{name}={value}: must be a number; the launcher sets it for every task")
    return int(value)


def _value(name: str, environment: MutableMapping[str, str]) -> str:
    if name not in environment:
        raise UserError(f"{name}: missing; the launcher sets it for every task, so pass it on")
    return environment[name]
