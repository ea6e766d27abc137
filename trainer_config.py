"""What is set under `trainer`, and what follows from that alone."""

from dataclasses import dataclass, field

from engine.errors import UserError
from engine.run import trackers
from engine.snapshots.storage import is_local


@dataclass
class TrainerConfig:
    """How long, in which portions, and on what to train; the fields are explained in
    `conf/trainer/`.
    """

    max_epochs: int | None = 10
    max_steps: int | None = None
    batch_size: int = 64
    micro_batch_size: int | None = None
    grad_norm_clip: float | None = 1.0
    data_loader_workers: int = 0
    snapshot_path: str = "gpt_snapshot.pt"
    save_every: int | None = 1
    save_every_steps: int | None = None
    keep_snapshots: int | None = None
    snapshot_format: str = "single"
    max_save_failures: int = 3
    eval_every_steps: int | None = None
    log_every_steps: int = 10
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    use_amp: bool = True
    amp_dtype: str = "auto"
    seed: int = 1337
    device: str = "auto"
    threads: int | None = None
    compile: str = "auto"
    deterministic: str = "auto"
    strategy: str = "ddp"
    offload: bool = False
    resume: str = "auto"
    on_nonfinite: str = "stop"
    timeout_s: float = 600.0

    def __post_init__(self):
        # From Python as well as from YAML, where `true` needs no quotes.
        self.compile = str(self.compile).lower()
        self.deterministic = str(self.deterministic).lower()
        for protocol in ("file://", "local://"):  # what fsspec calls a file of this machine
            self.snapshot_path = self.snapshot_path.removeprefix(protocol)
        options = {
            "amp_dtype": ("auto", "bfloat16", "float16"),
            "device": ("auto", "cpu", "cuda"),
            "compile": ("auto", "true", "false"),
            "deterministic": ("auto", "true", "false"),
            "strategy": ("ddp", "fsdp"),
            "snapshot_format": ("single", "sharded"),
            "resume": ("auto", "must", "never"),
            "on_nonfinite": ("stop", "skip"),
        }
        for name, allowed in options.items():
            if getattr(self, name) not in allowed:
                raise UserError(
                    f"trainer.{name}={getattr(self, name)}: must be one of {', '.join(allowed)}"
                )
        positive = [
            "max_epochs",
            "max_steps",
            "batch_size",
            "micro_batch_size",
            "grad_norm_clip",
            "save_every",
            "save_every_steps",
            "keep_snapshots",
            "max_save_failures",
            "eval_every_steps",
            "log_every_steps",
            "threads",
            "timeout_s",
        ]
        for name in positive:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"trainer.{name}={value}: must be above 0")
        trackers.check(self.trackers)
        if self.max_epochs is None and self.max_steps is None:
            raise UserError(
                "trainer.max_epochs and trainer.max_steps are both null: one must say when to stop"
            )
        if self.snapshot_format == "sharded" and not is_local(self.snapshot_path):
            raise UserError(
                f"trainer.snapshot_path={self.snapshot_path}: sharded snapshots "
                "(trainer.snapshot_format) need a folder that all hosts see, not a URL"
            )
        if self.offload and self.strategy != "fsdp":
            raise UserError("trainer.offload=true: requires trainer.strategy=fsdp")
        if self.data_loader_workers < 0:
            raise UserError(
                f"trainer.data_loader_workers={self.data_loader_workers}: must not be negative"
            )
        for name, most in (("batch_size", 2**20), ("threads", 1024), ("data_loader_workers", 1024)):
            value = getattr(self, name)
            if value is not None and value > most:
                raise UserError(f"trainer.{name}={value}: must be at most {most}")
        if not self.timeout_s <= 1e6:
            raise UserError(f"trainer.timeout_s={self.timeout_s}: must be at most 1e6 seconds")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"trainer.seed={self.seed}: must be at least 0 and below 2^63")

    def check_world_size(self, size: int) -> None:
        """Raises `UserError` if `size` processes cannot share the batch equally, or a single one is
        to offload, which only those do that shard the model.
        """
        if self.offload and size == 1:
            raise UserError(
                "trainer.offload=true: is for several processes that shard the model; this is "
                "one (launch.nproc_per_node=N starts N)"
            )
        if self.batch_size % size:
            raise UserError(
                f"trainer.batch_size={self.batch_size}: must be divisible by the number of "
                f"processes, {size}; the "
                f"nearest that are: {self.batch_size // size * size or size}, "
                f"{-(-self.batch_size // size) * size}"
            )


def planned_steps(config: TrainerConfig, num_windows: int) -> int:
    """Optimizer steps of the whole run: `max_steps`, or enough for `max_epochs` to see every
    window, or the fewer.
    """
    plans = []
    if config.max_steps is not None:
        plans.append(config.max_steps)
    if config.max_epochs is not None:
        plans.append(-(-config.max_epochs * num_windows // config.batch_size))
    return min(plans)
