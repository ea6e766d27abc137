"""The settings of a run: one dataclass for each group, and `Config`, which joins them.

Each field is declared once, in one line: type, default, unit and meaning. A value that is impossible raises `UserError`
naming the field. `conf/` has the values of recipes.

A resumed run must keep the data and the model, except the fields in `FREE`, and may change the rest, except those in
`FIXED`: with a change midway, no configuration would reproduce the run. Those in `IRRELEVANT` change the loss at a step
no more than rounding or another seed. `--help` does not print those in `HIDDEN`.
"""

import codecs
import dataclasses
import json
import logging
import math
import os
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, cast

from omegaconf import MISSING

from engine.errors import UserError, check_only_one, check_option, check_range
from engine.files import is_local
from engine.portable import is_installed

log = logging.getLogger("gpt")

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
# n_layer, n_head, n_embd of the named sizes; names and values as in karpathy/minGPT
SIZES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
    "openai-gpt": (12, 12, 768),
    "gopher-44m": (8, 16, 512),
    "gpt-mini": (6, 6, 192),
    "gpt-micro": (4, 4, 128),
    "gpt-nano": (3, 3, 48),
}


TEXT_OPTIONS = {
    "format": ("text", "jsonl", "json", "csv", "tsv", "parquet"),
    "shuffle": ("documents", "lines", "paragraphs", "files", "none"),  # files: documents, of older runs
    "newlines": ("lf", "keep"),
    "normalize": ("NFC", "NFD", "NFKC", "NFKD"),
}
# What separates the items of `data.shuffle`, as `data.separator` names it.
ITEM_SEPARATORS = {"lines": "newline", "paragraphs": "blank_line", "files": "none"}


def expanded(key: str, path: Any) -> str | list[str]:
    """A path, or several, with home directories expanded. Raises `UserError`, naming the `key`, for anything else."""
    paths = path if isinstance(path, list) else [path]
    if not paths or any(each in (None, "") or isinstance(each, list | dict) for each in paths):
        raise UserError(f"{key}={path}: must be a path or URL, or a list of these")
    paths = [os.path.expanduser(str(each)) for each in paths]
    if "-" in paths and (key, path) != ("data.path", "-"):
        raise UserError(f"{key}={path}: standard input is a text of its own: data.path=-")
    return paths if isinstance(path, list) else paths[0]


@dataclass
class DataConfig:
    """Text, split and context."""

    # fmt: off
    path: Any = MISSING  # the text: a path, folder, archive, URL or pattern ('a/*.txt'), or a list; -: standard input
    val_path: Any = None  # held-out text, as path; null: the end of path, by train_split
    test_path: Any = None  # text that is scored once, after training, as path; null: by final_split
    url: str | None = None  # downloaded from here if path does not exist; null: path must exist
    sha256: str | None = None  # SHA-256 of the files, decompressed, hexadecimal; null: any text
    block_size: int | None = 128  # characters of context: the length of a window; null: chosen, see docs/own-text.md
    train_split: float | None = 0.9  # share of the text to train on, from its start; the rest is held out; null: chosen
    final_split: float = 0.0  # share of the text, at its end, that is scored once, after training
    truncate: float = 1.0  # share of the text to use, from its start
    format: str | None = None  # text, jsonl, json, csv, tsv or parquet; null: by the file's name
    field: str | None = None  # the field or column of a record that has its text; a.b is the field b in a
    separator: str | None = None  # between documents: newline, blank_line, none or a string (\n, \t); null: chosen
    shuffle: str | None = None  # documents, lines, paragraphs or none: shuffled before the split; null: rows of tables
    encoding: str = "utf-8"  # a codec of Python (cp1252); bytes: any file; each byte is a character of the model
    newlines: str = "lf"  # lf: CRLF and CR become LF; keep: they stay
    normalize: str | None = None  # a normal form of Unicode: NFC, NFD, NFKC or NFKD; null: none
    max_bytes: float | None = None  # most bytes to read, decompressed; null: 10 GB of an archive, else no limit
    cache_dir: str = "data/cache"  # local directory for encoded copies of texts, except small local files
    held_out: list[int] | None = None  # from, to (exclusive); set by init_from= for a text that has grown
    # fmt: on
    # A text is compared by its content.
    FREE: ClassVar = ("path", "val_path", "test_path", "url", "sha256", "format", "field", "max_bytes", "cache_dir")
    IRRELEVANT: ClassVar = ("url", "sha256", "max_bytes", "cache_dir")
    HIDDEN: ClassVar = ("held_out",)

    def __post_init__(self):
        self.path = expanded("data.path", self.path)
        for name in ("val_path", "test_path"):
            if getattr(self, name) is not None:
                setattr(self, name, expanded(f"data.{name}", getattr(self, name)))
        if self.url == SHAKESPEARE_URL and self.path != "data/input.txt":
            raise UserError(
                f"data.path={self.path}: data.url and data.sha256 are those of data=shakespeare; for "
                f"another text: data=text data.path={self.path}"
            )
        if self.url is not None and isinstance(self.path, list):
            raise UserError(f"data.url={self.url}: needs a single data.path; set data.url=null")
        check_range("data.block_size", self.block_size, 1)
        check_range("data.train_split", self.train_split, above=0, below=1)
        check_range("data.truncate", self.truncate, above=0, high=1)
        check_range("data.final_split", self.final_split, 0, below=1)
        if self.val_path is not None and self.final_split:
            raise UserError(f"data.final_split={self.final_split}: with data.val_path, give data.test_path")
        if self.val_path is None and (self.train_split or 0) + self.final_split >= 1:
            raise UserError(
                f"data.train_split={self.train_split}, data.final_split={self.final_split}: must add up to less than 1"
            )
        for name, allowed in TEXT_OPTIONS.items():
            if getattr(self, name) is not None:
                check_option(f"data.{name}", getattr(self, name), allowed)
        if self.held_out is not None:
            check_only_one(**{"data.held_out": self.held_out, "data.val_path": self.val_path})
            if len(self.held_out) != 2 or not 0 <= self.held_out[0] < self.held_out[1]:
                raise UserError(f"data.held_out={self.held_out}: must be [FROM,TO], two increasing numbers")
        if self.encoding == "bytes" and self.normalize:
            raise UserError(f"data.normalize={self.normalize}: has no effect on bytes; leave it out")
        own = ITEM_SEPARATORS.get(self.shuffle or "")
        if own and self.separator not in (None, "none", own):
            raise UserError(
                f"data.separator={self.separator}: data.shuffle={self.shuffle} has one of its own, {own}; leave one out"
            )
        check_range("data.max_bytes", self.max_bytes, above=0, null=True)
        try:
            if self.encoding != "bytes":
                "".encode(self.encoding)  # a codec of text
                codecs.getincrementaldecoder(self.encoding)
                self.encoding = codecs.lookup(self.encoding).name
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(f"data.encoding={self.encoding}: must be bytes, or a codec that Python knows") from error
        self.cache_dir = os.path.expanduser(self.cache_dir)
        if not self.cache_dir or "://" in self.cache_dir:
            raise UserError(f"data.cache_dir={self.cache_dir}: must be a local directory")


@dataclass
class GPTConfig:
    """Architecture and size. None means: sizes follow from `model_type`, `bias` and `tie_weights` from `arch`,
    `vocab_size` and `block_size` from the data; the rest is chosen for the text. Raises `UserError` for impossible
    values.
    """

    # fmt: off
    arch: str = "gpt2"  # gpt2 or modern (rotary positions, RMSNorm, QK norm, squared ReLU, capped logits)
    model_type: str | None = None  # size: auto, gpt2[-medium,-large,-xl], openai-gpt, gopher-44m, gpt-[mini,micro,nano]
    n_layer: int | None = None  # blocks; null: from model_type (default gpt2)
    n_head: int | None = None  # attention heads of a block; null: from model_type (default gpt2)
    n_embd: int | None = None  # width of the residual stream, divisible by n_head; null: from model_type (default gpt2)
    vocab_size: int | None = None  # distinct characters; null: taken from the text
    block_size: int | None = None  # characters of context; set data.block_size
    embd_pdrop: float | None = 0.1  # dropout probability of the embeddings; null: chosen, see docs/own-text.md
    resid_pdrop: float | None = 0.1  # dropout probability of the outputs of attention and MLP; null: chosen
    attn_pdrop: float = 0.1  # dropout probability of the attention weights
    bias: bool | None = None  # biases in linear layers and norms; null: as in arch (gpt2: true, modern: false)
    tie_weights: bool | None = None  # share the weights of embedding and head; null: as in arch (gpt2: true)
    token_shift: bool = False  # MLPs also see the previous position (RWKV, Peng et al., 2023)
    ngram_rows: int | None = 0  # rows of each n-gram table (last 3 characters, last 4); 0: none; null: chosen
    activation_checkpointing: bool = False  # recompute blocks in the backward pass: less memory, a third more time
    # fmt: on
    FREE: ClassVar = ("model_type", "activation_checkpointing")  # a name; memory for time
    IRRELEVANT: ClassVar = ("vocab_size", "block_size", "activation_checkpointing")  # two: from the data
    HIDDEN: ClassVar = ("vocab_size", "block_size")

    def __post_init__(self):
        check_option("model.arch", self.arch, ("gpt2", "modern"))
        self._resolve_sizes()
        for name in ("n_head", "vocab_size", "block_size"):
            check_range(f"model.{name}", getattr(self, name), 1)
        # Below these, no size of a tensor overflows: it is the memory that ends.
        check_range("model.n_layer", self.n_layer, 1, 2**16)
        check_range("model.n_embd", self.n_embd, 1, 2**24)
        check_range("model.ngram_rows", self.ngram_rows, 0, 2**31)
        for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop"):
            check_range(f"model.{name}", getattr(self, name), 0, below=1)
        if self.n_embd is not None and self.n_head is not None:
            width, rest = divmod(self.n_embd, self.n_head)
            what = f"model.n_embd={self.n_embd}"
            if rest:
                raise UserError(f"{what}: must be divisible by model.n_head={self.n_head}")
            if self.arch == "modern" and width % 2:
                raise UserError(f"{what}: the head size, {width}, is odd; rotary positions need an even one")
        for name in ("bias", "tie_weights"):
            if getattr(self, name) is None:
                setattr(self, name, self.arch == "gpt2")
            elif getattr(self, name) and self.arch == "modern":
                raise UserError(f"model.{name}=true: model.arch=modern does not support it; leave it null")

    def _resolve_sizes(self) -> None:
        """Resolves None sizes from `model_type`, which becomes None."""
        if self.model_type == "auto":
            return
        if self.model_type is not None:
            check_option("model.model_type", self.model_type, (*SIZES, "auto"))
        named, given = SIZES[self.model_type or "gpt2"], (self.n_layer, self.n_head, self.n_embd)
        if self.model_type and None not in given and given != named:
            raise UserError(
                f"model.model_type={self.model_type}: n_layer, n_head and n_embd are given, too, as "
                f"{given}; to have {named}: model.n_layer=null model.n_head=null model.n_embd=null"
            )
        sizes = tuple(b if a is None else a for a, b in zip(given, named, strict=True))
        self.n_layer, self.n_head, self.n_embd, self.model_type = *sizes, None

    @classmethod
    def recorded(cls, values: dict[str, Any]) -> "GPTConfig":
        """Rebuilds the configuration stored in a snapshot of any format. Raises `UserError`."""
        values = {name: value for name, value in values.items() if name != "attention"}
        if None not in (values.get("n_layer"), values.get("n_head"), values.get("n_embd")):
            values.pop("model_type", None)  # old snapshots kept it with other sizes
        if unknown := values.keys() - {field.name for field in fields(cls)}:
            missing = f"model.{min(unknown)}, which GPTConfig does not have"
            raise UserError(f"the snapshot's model has {missing}; was model.py changed since?")
        return cls(**values)

    def complete(self) -> "CompleteGPTConfig":
        """Returns self, typed without None. Raises `UserError` if a size or dropout is None."""
        sizes = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
        for name in (*sizes, "embd_pdrop", "resid_pdrop", "ngram_rows"):
            if getattr(self, name) is None:
                raise UserError(f"model.{name} is missing (vocab_size and block_size come from the dataset)")
        return cast(CompleteGPTConfig, self)


class CompleteGPTConfig(GPTConfig):
    """The type of a `GPTConfig` that is `complete`."""

    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    block_size: int
    embd_pdrop: float
    resid_pdrop: float
    bias: bool
    tie_weights: bool
    ngram_rows: int


# Fields that `init_from` does not copy from a pretrained model; the others are its architecture.
NOT_ARCHITECTURE = {"model_type", "vocab_size", "embd_pdrop", "resid_pdrop", "attn_pdrop", "activation_checkpointing"}
ARCHITECTURE = tuple(field.name for field in fields(GPTConfig) if field.name not in NOT_ARCHITECTURE)


@dataclass
class OptimizerConfig:
    """Optimizer, learning-rate schedule and weight decay."""

    # fmt: off
    name: str = "adamw"  # adamw, or muon: Muon for the matrices inside the blocks, AdamW for the rest
    learning_rate: float | None = 3e-4  # peak learning rate; null: chosen, see docs/own-text.md
    weight_decay: float | None = 0.1  # decoupled, times learning rate; matrices only; null: chosen
    ngram_decay: float | None = 2.0  # weight decay of n-gram embeddings, which overfit; null: chosen
    decay_embeddings: bool = False  # whether embedding tables decay too (nanoGPT: true, minGPT: false)
    beta1: float = 0.9  # decay rate of AdamW's first moment estimate, per step
    beta2: float = 0.95  # decay rate of AdamW's second moment estimate, per step
    momentum: float = 0.95  # momentum of Muon, per step
    schedule: str = "constant"  # constant, linear, cosine or wsd, after the warm-up
    warmup_steps: int = 0  # steps over which the learning rate rises to its peak; at most the run
    min_lr_ratio: float = 0.0  # end of the schedule, as a share of the peak
    cooldown_ratio: float = 0.4  # share of all steps in which wsd decays
    # fmt: on
    FIXED: ClassVar = ("name",)  # another optimizer state

    def __post_init__(self):
        check_option("optimizer.name", self.name, ("adamw", "muon"))
        check_option("optimizer.schedule", self.schedule, ("constant", "linear", "cosine", "wsd"))
        check_range("optimizer.learning_rate", self.learning_rate, above=0, high=1e38)  # float32
        check_range("optimizer.weight_decay", self.weight_decay, 0, 1000)
        check_range("optimizer.ngram_decay", self.ngram_decay, 0, 1000)
        check_range("optimizer.warmup_steps", self.warmup_steps, 0)
        for name in ("beta1", "beta2", "momentum"):
            check_range(f"optimizer.{name}", getattr(self, name), 0, below=1)
        for name in ("min_lr_ratio", "cooldown_ratio"):
            check_range(f"optimizer.{name}", getattr(self, name), 0, 1)

    def learning_rate_factor(self, step: int, total_steps: int) -> float:
        """The factor on the peak learning rate at `step` (0-based) of `total_steps`: a pure function, with nothing
        to save. It rises linearly over `warmup_steps` (at most the run), and then

        - `constant`: stays at 1;
        - `linear`: falls in a straight line to `min_lr_ratio`;
        - `cosine`: falls along half a cosine to `min_lr_ratio` (Loshchilov and Hutter, SGDR, 2017);
        - `wsd`: stays at 1, then falls in a straight line over the last `cooldown_ratio` of all steps
          (warm-up, stable, decay: Hu et al., MiniCPM, 2024).
        """
        warmup_steps = min(self.warmup_steps, total_steps)
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if self.schedule == "constant":
            return 1.0
        start = warmup_steps
        if self.schedule == "wsd":
            start = max(start, total_steps - round(self.cooldown_ratio * total_steps))
        progress = min(max((step - start) / max(total_steps - start, 1), 0.0), 1.0)
        if self.schedule == "cosine":
            progress = 0.5 * (1.0 - math.cos(math.pi * progress))
        return 1.0 + (self.min_lr_ratio - 1.0) * progress


@dataclass
class TrainerConfig:
    """The training loop: length, batch, precision, evaluation, snapshots, processes."""

    # fmt: off
    max_epochs: int | None = 10  # epochs; each is block_size passes over the text, one from each offset; null: no limit
    max_steps: int | None = None  # optimizer steps; null: no limit; if both are set, whichever is reached first
    max_minutes: float | None = None  # time limit, minutes, from which main.py computes max_steps; null: no limit
    batch_size: int | None = 64  # global batch: windows per optimizer step, over all processes; null: chosen
    micro_batch_size: int | None = None  # windows per process and pass; null: what fits a GPU, else 65536 characters
    grad_norm_clip: float | None = 1.0  # maximum L2 norm of the gradient over all parameters; null: no clipping
    data_loader_workers: int = 0  # prefetch threads; 0: none, usually enough
    snapshot_path: str = "gpt_snapshot.pt"  # latest snapshot: a path, in run_dir unless absolute, or a URL
    save_every: int | None = 1  # epochs between snapshots; null: not by epochs; the last step always saves
    save_every_steps: int | None = None  # steps between snapshots; null: not by steps
    save_every_minutes: float | None = 5.0  # minutes without a snapshot after which one is saved; null: no limit
    keep_snapshots: int | None = None  # numbered snapshots to keep; null: only latest, .prev and .best
    snapshot_format: str = "single"  # single: one file; sharded: one part per process, for models beyond one host
    eval_every_steps: int | None = None  # steps between evaluations; null: every epoch; at least halfway and at the end
    patience: int | None = None  # evaluations without a lower held-out loss after which the run ends; null: no limit
    log_every_steps: int = 10  # steps between progress lines
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])  # tensorboard (if installed), wandb, or both
    amp_dtype: str = "auto"  # bfloat16, float16 (with loss scaling), float32 (TF32 on GPUs); auto: bfloat16 if possible
    seed: int = 1337  # seed of the weights, the window order and dropout
    device: str = "auto"  # cpu, cuda, auto (cuda if there is a GPU), or another torch device: mps, xpu
    threads: int | None = None  # CPU threads per process; null: its share of the host's cores
    compile: str = "auto"  # torch.compile: true, false or auto: for runs long enough to gain from it
    deterministic: str = "auto"  # deterministic algorithms: true, false or auto: on a CPU
    cuda_graph: bool = True  # replay each step as one CUDA graph, on a single GPU; not with float16
    strategy: str = "ddp"  # ddp: the whole model in every process; fsdp: sharded (FSDP2)
    resume: str = "auto"  # from snapshot_path: auto (if it exists), must (or fail), never (rename the old files)
    timeout_s: float = 600.0  # seconds to wait for another process before giving up
    use_amp: bool | None = None  # the tutorial's name: false is amp_dtype=float32; null once applied
    max_save_failures: int | None = None  # accepted, without effect: failed saves are repeated
    # fmt: on
    HIDDEN: ClassVar = ("use_amp", "max_save_failures")
    FIXED: ClassVar = ("batch_size", "seed")  # other windows
    IRRELEVANT: ClassVar = (
        "seed", "device", "threads", "strategy", "compile", "deterministic", "cuda_graph", "micro_batch_size",
        "data_loader_workers", "log_every_steps", "eval_every_steps", "trackers", "snapshot_path", "snapshot_format",
        "save_every", "save_every_steps", "save_every_minutes", "keep_snapshots", "resume", "max_save_failures",
        "timeout_s", "patience",  # ends earlier, with the same losses
    )  # fmt: skip

    def __post_init__(self):
        path = TrainerConfig.snapshot_path if self.snapshot_path is None else self.snapshot_path  # None: the tutorial's
        path = path.removeprefix("file://").removeprefix("local://")  # fsspec's names for a local path
        self.snapshot_path = os.path.expanduser(path)
        check_option("trainer.amp_dtype", self.amp_dtype, ("auto", "bfloat16", "float16", "float32"))
        if self.use_amp is False:
            self.amp_dtype = "float32"
        self.use_amp = self.max_save_failures = None
        for name in ("compile", "deterministic"):  # True, from Python and from YAML
            setattr(self, name, str(getattr(self, name)).lower())
            check_option(f"trainer.{name}", getattr(self, name), ("auto", "true", "false"))
        check_option("trainer.strategy", self.strategy, ("ddp", "fsdp"))
        check_option("trainer.snapshot_format", self.snapshot_format, ("single", "sharded"))
        check_option("trainer.resume", self.resume, ("auto", "must", "never"))
        for name in (
            "max_epochs", "max_steps", "micro_batch_size", "grad_norm_clip", "save_every", "save_every_steps",
            "save_every_minutes", "keep_snapshots", "eval_every_steps", "patience",
        ):  # fmt: skip
            check_range(f"trainer.{name}", getattr(self, name), above=0, null=True)
        check_range("trainer.log_every_steps", self.log_every_steps, above=0)
        check_range("trainer.batch_size", self.batch_size, 1, 2**20)
        check_range("trainer.data_loader_workers", self.data_loader_workers, 0, 1024)
        check_range("trainer.threads", self.threads, 1, 1024, null=True)
        check_range("trainer.timeout_s", self.timeout_s, above=0, high=1e6)
        check_range("trainer.seed", self.seed, 0, 2**63 - 1)
        check_range("trainer.max_minutes", self.max_minutes, above=0, high=1e6, null=True)
        if self.max_epochs is None and self.max_steps is None and self.max_minutes is None:
            raise UserError("trainer.max_epochs, max_steps and max_minutes are all null: one must end the run")
        if self.snapshot_format == "sharded" and not is_local(self.snapshot_path):
            raise UserError(
                f"trainer.snapshot_path={self.snapshot_path}: a sharded snapshot needs a folder that all hosts see"
            )
        for name in self.trackers:
            check_option("trainer.trackers", name, ("tensorboard", "wandb"))
            if name != "tensorboard" and not is_installed(name):
                raise UserError(f"trainer.trackers: {name} is not installed: pip install {name}")


@dataclass
class Config:
    """One run."""

    # fmt: off
    data: DataConfig = field(default_factory=DataConfig)  # text, split and context
    model: GPTConfig = field(default_factory=GPTConfig)  # architecture and size
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # optimizer and learning rate
    trainer: TrainerConfig = field(default_factory=TrainerConfig)  # the training loop
    init_from: str | None = None  # pretrained weights: a snapshot, a run directory, or a directory that export.py wrote
    samples: bool = True  # sample text at the log lines 1, 4, 16, 64, ... and the last, into metrics.jsonl
    report: bool = True  # write report.html into run_dir at the end
    run_name: str = "run"  # names the directory of the run; recipes set it to their own name
    run_dir: str = "runs/${run_name}"  # where the run writes
    # fmt: on
    FIXED: ClassVar = ("init_from",)  # other initial weights
    IRRELEVANT: ClassVar = ("samples", "report", "run_name", "run_dir")

    def __post_init__(self):
        self.unresolved: dict[str, Any] = {}  # URLs with ${oc.env:NAME}, by key, as the files of the run keep them

    def recorded(self) -> dict[str, Any]:
        """The settings, for files of the run."""
        settings = dataclasses.asdict(self)
        for key, value in self.unresolved.items():
            group, _, name = key.rpartition(".")
            (settings[group] if group else settings)[name] = value
        return settings

    def resolve_architecture(self, architecture: dict[str, Any]) -> None:
        """Copies a pretrained model's `architecture`; the context is the smaller of both."""
        source = GPTConfig.recorded(architecture).complete()
        block_size = min(self.data.block_size or source.block_size, source.block_size)
        values = {name: getattr(source, name) for name in ARCHITECTURE} | {"block_size": block_size}
        self.model = dataclasses.replace(self.model, model_type=None, **values)
        self.data = dataclasses.replace(self.data, block_size=block_size)
        log.info(
            "architecture %s, layers %d, heads %d, width %d, of the pretrained model; context %d",
            source.arch, source.n_layer, source.n_head, source.n_embd, block_size,
        )  # fmt: skip


# --- settings by dotted key ---

GROUPS: dict[str, Any] = {
    **{f"{group.name}.": group.type for group in fields(Config) if dataclasses.is_dataclass(group.type)},
    "": Config,
}
KEYS = [
    prefix + setting.name
    for prefix, group in GROUPS.items()
    for setting in fields(group)
    if not dataclasses.is_dataclass(setting.type)
]
FREE, FIXED, IRRELEVANT, HIDDEN = (
    {prefix + setting for prefix, group in GROUPS.items() for setting in getattr(group, name, ())}
    for name in ("FREE", "FIXED", "IRRELEVANT", "HIDDEN")
)


def is_fixed(key: str) -> bool:
    """Whether a resumed run may not change the setting `key`. Without main.py, there may be others than these."""
    return key in FIXED or (key.startswith(("data.", "model.", "optimizer.class")) and key not in FREE)


def as_plain(value: Any) -> Any:
    """`value` in JSON's types, which a snapshot can hold: dataclasses as dictionaries, others as text."""
    text = json.dumps(value, default=lambda x: vars(x) if dataclasses.is_dataclass(x) else str(x))
    return json.loads(text)


def as_typed(value: Any) -> str:
    """A value in command-line syntax: null and true, not None and True."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def defaults_of(configs: dict[str, Any]) -> dict[str, Any]:
    """The defaults of dataclasses by dotted key, except None and default factories."""
    return {
        f"{name}.{field.name}": field.default
        for name, config in configs.items()
        for field in fields(config)
        if isinstance(field.default, bool | int | float | str)
    }


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
