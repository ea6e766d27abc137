"""Overrides, `KEY=VALUE` as they are typed: what they mean beyond what they say."""

import hashlib
import logging
import os
import re
from collections.abc import Iterable
from typing import cast

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config import CONF, GROUPS, KNOWN, LAST, compose, explain, no_such_option
from engine.errors import UserError
from engine.machine.hardware import computes_in_bfloat16
from engine.parallel.launch import without
from model import ARCHITECTURE

log = logging.getLogger("gpt")


def check_overrides(arguments: Iterable[str]) -> None:
    """Raises `UserError` for what Hydra has no clear word for: a setting with dashes, as other
    programs' options have; one without a key, or that is taken away; a group's file that is a
    number, true, false or null.
    """
    for argument in arguments:
        name, _, value = argument.lstrip("-").replace("-", "_").partition("=")
        key = name if name in GROUPS else LAST.get(name.split(".")[-1])
        if argument.startswith("--") and key:
            raise UserError(f"{argument}: settings have no dashes: {key}={value or 'VALUE'}")
        if argument.startswith("="):
            raise UserError(f"{argument}: settings are KEY=VALUE, without spaces around the =")
        if argument.startswith("~") and (argument[1:] in KNOWN or argument[1:] in GROUPS[:-1]):
            raise UserError(f"{argument}: cannot be taken away; give another value, or null")
        group, _, name = argument.lstrip("+").partition("=")
        if group in GROUPS and re.fullmatch("null|true|false|[-+]?[0-9.]+", name.lower()):
            files = sorted(os.listdir(os.path.join(CONF, group)))
            options = [os.path.splitext(file)[0] for file in files]
            raise UserError(no_such_option(group, name, options))


def with_recipe(arguments: list[str]) -> list[str]:
    """`arguments` and the recipe that fits this machine, unless they name one."""
    if "experiment=null" in arguments:  # Hydra has no such override; null is what config.yaml has
        return [a for a in arguments if a != "experiment=null"]
    names = {argument.split("=")[0].lstrip("+~") for argument in arguments}
    if names & {"experiment", "--hydra-help", "--version"}:
        return arguments
    # torch's own way to ask would keep the GPU from processes that begin as copies of this one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if torch.cuda.is_available() and "trainer.device=cpu" not in arguments:
        recipe = "shakespeare_gpu"
    elif computes_in_bfloat16(torch.device("cpu")):
        recipe = "shakespeare_cpu"
    else:
        recipe = "shakespeare_float32"
    if names.isdisjoint(
        {"--help", "-h", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
    ):
        log.info("recipe      %s, which fits this machine; --help lists the others", recipe)
    # A choice made inside conf/config.yaml would be an interpolated group, and those may not
    # override other groups. Hydra wants all overrides in one place.
    overrides = (i for i, a in enumerate(arguments) if "=" in a and not a.startswith("-"))
    first = next(overrides, 0)
    return [*arguments[:first], f"experiment={recipe}", *arguments[first:]]


def compose_config(overrides: list[str]) -> DictConfig:
    """The configuration that these overrides make, with what they mean beyond what they say.
    Raises `UserError`.
    """
    composed = compose(overrides)
    try:
        follow_overrides(composed, overrides)
    except OmegaConfBaseException as error:
        raise UserError(explain(error, overrides)) from error
    return composed


def follow_overrides(composed: DictConfig, overrides: Iterable[str]) -> None:
    """Changes in `composed` what its overrides, as they were typed, mean beyond what they say."""
    named = {key.lstrip("+~"): value for key, _, value in (o.partition("=") for o in overrides)}
    sizes = ("n_layer", "n_head", "n_embd")
    if named.get("model.model_type", "null") != "null":
        for size in sizes:  # the recipe's sizes are not those of the type that was asked for
            if f"model.{size}" not in named:
                composed.model[size] = None
    optimizer = named.get("optimizer", "").strip("'\"")
    chosen = os.path.join(CONF, "optimizer", f"{optimizer}.yaml")
    if os.path.exists(chosen):  # the recipe's values are for its own
        for name, value in cast(DictConfig, OmegaConf.load(chosen)).items():
            if f"optimizer.{name!s}" not in named:
                composed.optimizer[name] = value
    if "data.path" in named:  # the configured url and digest are those of another text
        for name in ("url", "sha256"):
            if f"data.{name}" not in named:
                composed.data[name] = None
    if named.keys() & {"data", "data.path", "data.url"} and "data.fallback" not in named:
        composed.data.fallback = None  # no other text stands in for one that was chosen
    if composed.init_from is not None:
        means = {"model": ["arch"], "model.model_type": sizes, "data.block_size": ["block_size"]}
        if composed.model.model_type is None:
            del means["model.model_type"]
        asked = {name for key in named for name in means.get(key, ())}
        asked |= {
            n for n in ARCHITECTURE if f"model.{n}" in named and composed.model[n] is not None
        }
        composed.explicit = sorted(asked)


def job_name(overrides: list[str], swept: str = "") -> str:
    """A directory name for one job of a sweep: the overrides of the keys in `swept` (separated by
    spaces), and a digest of all; without `swept`, all of them. Those of `launch` do not count.

    The same overrides give the same name, so that the same sweep goes on where it stopped. Others
    give another: where characters are replaced, or many left out, it ends with a digest, too.
    """
    own = sorted(without(overrides, "launch."))
    shown = [o for o in own if not swept or o.split("=")[0].lstrip("+~") in swept.split()]
    whole = ",".join(shown) or "defaults"
    name = re.sub(r"[^\w.,=+-]", "_", whole)
    if name == whole and len(name) <= 120 and shown == own:
        return name
    return f"{name[:100]}-{hashlib.sha256(','.join(own).encode()).hexdigest()[:8]}"


# Not in `register`: a job of submitit's names its directory before it calls anything of ours.
OmegaConf.register_new_resolver("job_name", job_name, replace=True)
