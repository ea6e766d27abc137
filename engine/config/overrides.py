"""Command-line overrides, `KEY=VALUE`: the default recipe, the command that repeats a run, one-line errors."""

import difflib
import hashlib
import itertools
import logging
import os
import re
import shlex
from collections.abc import Iterable
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.config.arguments import explain_value
from engine.config.settings import HIDDEN
from engine.errors import UserError, one_line
from engine.machine.hardware import computes_in_bfloat16

log = logging.getLogger("gpt")
GROUPS = ("data", "model", "optimizer", "experiment")
# Names in other trainers that are unlike the ones here, or nearer to a wrong one.
USUAL_NAMES = {
    "amp": "trainer.amp_dtype",
    "depth": "model.n_layer",
    "dropout": "model.resid_pdrop, model.embd_pdrop and model.attn_pdrop",
    "eval_interval": "trainer.eval_every_steps",
    "gradient_accumulation_steps": "trainer.micro_batch_size",
    "heads": "model.n_head",
    "log_interval": "trainer.log_every_steps",
    "max_iters": "trainer.max_steps",
    "num_workers": "trainer.data_loader_workers",
    "output_dir": "run_dir",
    "report_to": "trainer.trackers",
    "wd": "optimizer.weight_decay",
    **dict.fromkeys(("batch", "bs"), "trainer.batch_size"),
    **dict.fromkeys(("context", "seq_len"), "data.block_size"),
    **dict.fromkeys(("d_model", "hidden_size", "width"), "model.n_embd"),
    **dict.fromkeys(("dataset", "file", "text"), "data.path"),
    **dict.fromkeys(("lr", "max_lr", "rate"), "optimizer.learning_rate"),
}


def override_key(override: str) -> str:
    """`trainer.seed` of `+trainer.seed=1`."""
    return override.split("=", 1)[0].lstrip("+~")


def without(overrides: Iterable[str], *prefixes: str) -> list[str]:
    """The overrides that do not start with one of `prefixes`, such as `run_dir=`."""
    return [o for o in overrides if not o.lstrip("+~").startswith(prefixes)]


def add_default_recipe(arguments: list[str]) -> list[str]:
    """`arguments`, with the recipe that fits this machine unless they name one. A typed time limit replaces the
    recipe's steps, and typed steps replace the time limit of `experiment=auto`.
    """
    typed = {override_key(argument): argument.partition("=")[2] for argument in arguments}
    recipe = typed.get("experiment")
    added = []
    if recipe is None and "--hydra-help" not in typed:
        recipe = fitting_recipe("data.path" in typed or typed.get("data") == "text", arguments)
        added.append(f"experiment={recipe}")
    ends = ("trainer.max_steps", "trainer.max_epochs")
    has_end = not typed.keys().isdisjoint(ends)
    if not has_end and typed.get("trainer.max_minutes", "null") != "null":
        added += [f"{end}=null" for end in ends]
    elif has_end and recipe in ("auto", "auto_gpu") and "trainer.max_minutes" not in typed:
        added.append("trainer.max_minutes=null")
    # null is the default, and not an override that Hydra has.
    given = [as_text(argument) for argument in arguments if argument != "experiment=null"]
    # Hydra needs all overrides together, so flags and their values go first. conf/config.yaml cannot choose the
    # recipe: an interpolated group may not override other groups.
    flags: list[str] = []
    overrides: list[str] = []
    for before, argument in itertools.pairwise(["", *given]):
        is_flag = argument.startswith("-") or (before.startswith("-") and "=" not in argument)
        (flags if is_flag else overrides).append(argument)
    return [*flags, *added, *overrides]


def as_text(override: str) -> str:
    """`override`, quoted if it is a name or path that Hydra would read as a number or a boolean: 1_1 as 11."""
    key, _, value = override.partition("=")
    is_name = key in ("run_name", "run_dir", "data.path", "data.cache_dir", "init_from", "trainer.snapshot_path")
    is_typed = re.fullmatch(r"[-+]?([\d._]+(e[-+]?\d+)?|nan|inf)|true|false", value, re.I)
    return quoted(key, value) if is_name and is_typed else override


def fitting_recipe(has_own_text: bool, arguments: list[str]) -> str:
    """The recipe that fits this machine; logged, unless `arguments` ask Hydra for something else."""
    # torch's default check would make the GPU unusable in forks of this process.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if torch.cuda.is_available() and "trainer.device=cpu" not in arguments:
        recipe = "auto_gpu" if has_own_text else "shakespeare_gpu"
    elif has_own_text:
        recipe = "auto"
    elif computes_in_bfloat16(torch.device("cpu")):
        recipe = "shakespeare_cpu"
    else:
        recipe = "shakespeare_half"
    if all(a in ("-m", "--multirun") for a in arguments if a.startswith("-")):  # not with --cfg
        fits = "your text and this machine" if has_own_text else "this machine"
        log.info("recipe      %s, which fits %s; --help lists the others", recipe, fits)
    return recipe


def job_name(overrides: list[str], swept: str = "") -> str:
    """Directory name of a sweep's job: its swept overrides, whose keys are in `swept` (separated by spaces;
    all without it), and a digest of all.
    """
    own = sorted(overrides)
    shown = ",".join(o for o in own if not swept or override_key(o) in swept.split()) or "defaults"
    digest = hashlib.sha256(",".join(own).encode()).hexdigest()
    return re.sub(r"[^\w.,=+-]", "_", shown)[:100] + f"-{digest[:8]}"


def text_name(path: Any) -> str:
    """Run name for the text at `path`: its first file's name without extension or, for a pattern, its directory's."""
    first = str(path[0] if isinstance(path, list | ListConfig) else path)
    parts = re.split("[/:]", re.split("[?#]", first)[0])
    parts = [re.sub(r"(\.\w{1,10})?(\.(gz|bz2|xz|zst))?$", "", part) for part in parts]
    names = [re.sub(r"[^\w-]+", "_", part) for part in parts if "*" not in part]
    return next((name for name in reversed(names) if name.strip("_")), "text")


OmegaConf.register_new_resolver("home", os.path.expanduser, replace=True)  # ~/runs
OmegaConf.register_new_resolver("job_name", job_name, replace=True)
OmegaConf.register_new_resolver("text_name", text_name, replace=True)


def check_overrides(arguments: list[str], keys: list[str], architecture: set[str]) -> None:
    """Raises `UserError` for a key that is not among the dotted `keys`, for a key of the `architecture` given
    together with init_from=, and for mistakes that Hydra does not explain.
    """
    known = [*keys, *GROUPS]
    names = {key.rpartition(".")[2]: key for key in reversed(known) if key not in HIDDEN} | USUAL_NAMES
    pretrained = [a for a in arguments if override_key(a) == "init_from" and not a.endswith("=null")]
    for argument in arguments:
        key, equals, value = argument.lstrip("+~-").partition("=")
        last = key.rpartition(".")[2]
        if argument.startswith("-"):
            if meant := names.get(last.replace("-", "_")):
                raise UserError(f"{argument}: settings have no dashes; did you mean {meant}=?")
        elif not key or key != key.strip():
            raise UserError(f"{argument}: settings are KEY=VALUE, without spaces around the =")
        elif key in GROUPS and re.fullmatch("null|true|false|[-+]?[0-9.]+", value.lower()):
            raise UserError(f"{argument}: must name a file in conf/{key}")
        elif pretrained and key in architecture and value != "null":
            raise UserError(f"{argument}: with init_from= the architecture is the pretrained model's; leave it out")
        elif equals and not key.startswith("hydra"):
            if any(f"{name}.".startswith(f"{key}.") for name in known):  # a field, or a group of fields
                continue
            near = difflib.get_close_matches(last, names, n=1, cutoff=0.63)  # at 0.6, time is timeout_s
            hint = f"did you mean {names[near[0]]}?" if near else "python main.py --help lists all"
            raise UserError(f"{key}: unknown key; {hint}")


def quoted(key: str, value: str) -> str:
    """The override KEY=VALUE with the value quoted for Hydra."""
    return f"{key}={QuotedString(value, Quote.double).with_quotes()}"


def repeating_command(overrides: list[str], run_name: str) -> str:
    """The shell command that repeats a run: what was typed, then the chosen `overrides`. Without Hydra, as in a
    notebook, the `overrides` alone.
    """
    if not HydraConfig.initialized():
        return shlex.join(overrides)
    own = (f"{override_key(override)}=" for override in overrides)
    others = ("run_name=", "run_dir=", "trainer.resume=")
    typed = without(HydraConfig.get().overrides.task, *own, *others)
    name = re.sub(r"[^\w-]", "_", run_name) + "_again"
    named = f"run_name={name}" if name.isascii() else quoted("run_name", name)
    return shlex.join(["python", "main.py", *typed, *overrides, named])


def explain(error: Exception) -> str:
    """One line for an error of Hydra or OmegaConf."""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        file = error.missing_cfg_file  # data//a/book.txt for `data=/a/book.txt`
        group, _, name = file.rpartition("/") if file.startswith("hydra/") else file.partition("/")
        own = "; for a text of your own: data=text data.path=FILE" if group == "data" else ""
        return f"{group}={name}: no such file; choose from {', '.join(error.options)}{own}"
    refused = error.override if isinstance(error, OverrideParseException) else ""
    why = "Hydra cannot read this; a list has no spaces"
    if ambiguous := re.match("Ambiguous value for argument '(.*)'", str(error)):
        refused, why = ambiguous[1], "a comma separates the values of a sweep (-m); a list is [A,B]"
    if refused:
        key, equals, value = refused.partition("=")
        if not equals:
            return f"{refused}: settings are KEY=VALUE, as in data=text data.path=FILE"
        text = shlex.quote(quoted(key, value))
        return f"{refused}: {why}; quote text for Hydra, and all of it for the shell: {text}"
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return explain_value(cause)
    return one_line(cause)
