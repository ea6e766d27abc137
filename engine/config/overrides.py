"""Command-line overrides, `KEY=VALUE`: the default recipe, names that follow from overrides, one-line errors."""

import dataclasses
import difflib
import hashlib
import logging
import os
import re
import shlex
import traceback
from typing import Any

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from engine.config.arguments import explain_value
from engine.config.schema import ARCHITECTURE, GROUPS, HIDDEN, KEYS
from engine.errors import UserError, check_only_one, one_line
from engine.files import masked
from engine.machine.hardware import computes_in_bfloat16

log = logging.getLogger("gpt")
FOLDERS = ("data", "model", "optimizer", "experiment")  # of conf/
# The settings that are texts, and their types; Any: paths, or lists of them.
TEXTS = {
    prefix + setting.name: setting.type
    for prefix, group in GROUPS.items()
    for setting in dataclasses.fields(group)
    if setting.type in (str, str | None, Any)
}
# Names in other trainers that are unlike the ones here.
ALIASES = {
    "batch": "trainer.batch_size",
    "depth": "model.n_layer",
    "dropout": "model.resid_pdrop, model.embd_pdrop and model.attn_pdrop",
    "eval_interval": "trainer.eval_every_steps",
    "file": "data.path",
    "gradient_accumulation_steps": "trainer.micro_batch_size",
    "heads": "model.n_head",
    "hidden_size": "model.n_embd",
    "log_interval": "trainer.log_every_steps",
    "lr": "optimizer.learning_rate",
    "max_iters": "trainer.max_steps",
    "num_workers": "trainer.data_loader_workers",
    "output_dir": "run_dir",
    "report_to": "trainer.trackers",
    "seq_len": "data.block_size",
}


def override_key(override: str) -> str:
    """`trainer.seed` of `+trainer.seed=1`."""
    return override.split("=", 1)[0].lstrip("+~")


def add_default_recipe(arguments: list[str]) -> list[str]:
    """`arguments`, with the recipe that fits this machine unless they name one. A typed time limit replaces the
    recipe's steps, and typed steps replace the time limit of `experiment=auto`.
    """
    typed = {override_key(argument): argument.partition("=")[2] for argument in arguments}
    recipe = typed.get("experiment")
    added = []
    if recipe is None and "--hydra-help" not in typed:
        files = typed.get("data", "shakespeare").split(",")
        has_own_text = "data.path" in typed or not {*files} <= {"shakespeare", "pydoc"}
        recipe = fitting_recipe(has_own_text, arguments)
        added.append(f"experiment={recipe}")
    ends = ("trainer.max_steps", "trainer.max_epochs")
    has_end = not typed.keys().isdisjoint(ends)
    if not has_end and typed.get("trainer.max_minutes", "null") != "null":
        added += [f"{end}=null" for end in ends]
    elif has_end and recipe in ("auto", "auto_gpu") and "trainer.max_minutes" not in typed:
        added.append("trainer.max_minutes=null")
    # Hydra needs all overrides together, so flags and their values go first. conf/config.yaml cannot choose the
    # recipe: an interpolated group may not override other groups.
    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    flags = [argument for argument in arguments if argument not in overrides]
    is_sweep = not {"-m", "--multirun"}.isdisjoint(flags)
    # null is the default, and not an override that Hydra has.
    return [*flags, *added, *(as_text(override, is_sweep) for override in overrides if override != "experiment=null")]


def as_text(override: str, is_sweep: bool = False) -> str:
    """`override`, quoted if its setting is a text which Hydra refuses (`книга.txt`) or changes: `1_1` to 11, a tab to
    nothing. In a list, and between the commas of a sweep, each item is quoted, unless all of it is an existing path.
    """
    key, _, value = override.partition("=")
    if key.lstrip("+") not in TEXTS:
        return override
    if "," in value and os.path.exists(os.path.expanduser(value)):  # as the directories of a sweep's jobs
        return quoted(key, value)
    try:
        read = OverridesParser.create().parse_override(override).value()
        others = int | float if TEXTS[key.lstrip("+")] is Any else int | float | list | dict
        is_changed = isinstance(read, others) or (isinstance(read, str) and read == value.strip() != value)
        return quoted(key, value) if is_changed else override
    except HydraException:
        is_list = value.startswith("[") and value.endswith("]")
        items = [item.strip() for item in value[1:-1].split(",")] if is_list else value.split(",")
        if not is_list and not (is_sweep and all(items)):
            items = [value]
        elif len(items) > 1 and re.search(r"[\"'{]|^\w+\(.*\)$", value):  # commas may separate no items
            return override
        texts = quoted(key, *items)
        return texts.replace("=", "=[", 1) + "]" if is_list else texts


def fitting_recipe(has_own_text: bool, arguments: list[str]) -> str:
    """The recipe that fits this machine; logged, unless `arguments` ask Hydra for something else."""
    # torch's default check would make the GPU unusable in forks of this process.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if torch.cuda.is_available() and "trainer.device=cpu" not in arguments:
        recipe = "auto_gpu" if has_own_text else "shakespeare_gpu"
    elif has_own_text:
        recipe = "auto"
    else:
        recipe = "shakespeare_cpu" if computes_in_bfloat16(torch.device("cpu")) else "shakespeare_half"
    if all(a in ("-m", "--multirun") for a in arguments if a.startswith("-")):  # not with --cfg
        log.info("recipe      %s, which fits this machine; --help lists the others", recipe)
    return recipe


def job_name(overrides: list[str], swept: str = "") -> str:
    """Directory name of a sweep's job: its swept overrides, whose keys are in `swept` (separated by spaces;
    all without it), and a digest of all.
    """
    own = sorted(overrides)
    shown = ",".join(o for o in own if not swept or override_key(o) in swept.split()) or "defaults"
    digest = hashlib.sha256(",".join(own).encode()).hexdigest()
    return re.sub(r"[^\w.,=+-]", "_", masked(shown))[:100] + f"-{digest[:8]}"


def text_name(path: Any) -> str:
    """Run name for the text at `path`: its first file's name without extension or, for a pattern, its directory's."""
    first = str(path[0] if isinstance(path, list | ListConfig) else path)
    parts = re.split("[/:]", re.split("[?#]", masked(first))[0])
    parts = [re.sub(r"(\.\w{1,10})?(\.(gz|bz2|xz|zst))?$", "", part) for part in parts]
    names = [re.sub(r"[^\w-]+", "_", part) for part in parts if "*" not in part]
    return next((name for name in reversed(names) if name.strip("_-")), "text")


OmegaConf.register_new_resolver("home", os.path.expanduser, replace=True)  # ~/runs
OmegaConf.register_new_resolver("job_name", job_name, replace=True)
OmegaConf.register_new_resolver("text_name", text_name, replace=True)


def check_overrides(arguments: list[str]) -> None:
    """Raises `UserError` for an unknown key, for one of the architecture together with init_from=, and for mistakes
    that Hydra does not explain.
    """
    known = [*KEYS, *FOLDERS]
    names = {key.rpartition(".")[2]: key for key in reversed(known) if key not in HIDDEN} | ALIASES
    architecture = {f"model.{name}" for name in (*ARCHITECTURE, "model_type")}
    given = {override_key(argument) for argument in arguments if "=" in argument and not argument.endswith("=null")}
    for path, share in (("data.val_path", "data.train_split"), ("data.test_path", "data.final_split")):
        check_only_one(**{key: key in given for key in (path, share)})  # the recipe's share is ignored
    sizes = [argument for argument in arguments if override_key(argument) in given & architecture]
    if "init_from" in given and sizes:
        raise UserError(f"{' '.join(sizes)}: with init_from= the architecture is the pretrained model's; leave it out")
    for argument in arguments:
        key, equals, value = argument.lstrip("+~-").partition("=")
        last = key.rpartition(".")[2]
        if argument.startswith("-"):
            if last in names:
                raise UserError(f"{argument}: settings have no dashes; did you mean {names[last]}=?")
        elif not key:
            raise UserError(f"{argument}: settings are KEY=VALUE, without spaces around the =")
        elif key in FOLDERS and re.fullmatch("null|true|false|[-+]?[0-9.]+", value.lower()):
            raise UserError(f"{argument}: must name a file in conf/{key}")
        elif equals and not key.startswith("hydra") and not any(f"{name}.".startswith(f"{key}.") for name in known):
            near = difflib.get_close_matches(last, names, n=1)
            hint = f"did you mean {names[near[0]]}?" if near else "python main.py --help lists all"
            raise UserError(f"{key}: unknown key; {hint}")


def quoted(key: str, *values: str) -> str:
    """The override KEY=VALUE with the value, or each of a sweep, quoted for Hydra."""
    return f"{key}={','.join(QuotedString(value, Quote.double).with_quotes() for value in values)}"


# What Hydra raises for overrides and for the files of conf/.
COMPOSING = (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError)


def explain(error: Exception) -> str:
    """One line for an error of `COMPOSING`. Raises a `UnicodeDecodeError` again that is not Hydra's."""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        if plugin := re.fullmatch("(hydra/(launcher|sweeper))/(([a-z]+).*)", error.missing_cfg_file):
            return f"{plugin[1]}={plugin[3]}: not installed: pip install hydra-{plugin[4]}-{plugin[2]}"
        group, name = re.findall("^((?:hydra/)?[^/]*)/?(.*)", error.missing_cfg_file)[0]
        own = "; for a text of your own: data=text data.path=FILE" if group == "data" else ""
        return f"{group}={name}: no such file; choose from {', '.join(error.options)}{own}"
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if not equals:
            return f"{key}: settings are KEY=VALUE, as in data=text data.path=FILE"
        typed = shlex.quote(quoted(key, value))
        return f"{key}={value}: Hydra cannot read this; a list has no spaces; a text is quoted twice: {typed}"
    if isinstance(error, UnicodeDecodeError):
        found = [frame.f_locals.get("full_path") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not any(found):
            raise error
        return f"{next(filter(None, found))}: must be UTF-8: {error}"  # Hydra does not name the file
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if "Key 'experiment' not in 'Config'" in str(error):
        return f"{str(error).partition(':')[0]}: a recipe must begin with # @package _global_, saved without a BOM"
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return explain_value(cause)
    return one_line(cause)
