"""Converts a ROLL file: mappings in order, then the rest of its keys, then a check of what came out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from rollwire.cli.import_roll.account import Fate, report
from rollwire.cli.import_roll.advantages import map_advantages
from rollwire.cli.import_roll.compose import RollFile, read_roll_file
from rollwire.cli.import_roll.conversion import Conversion
from rollwire.cli.import_roll.divergence import map_divergence
from rollwire.cli.import_roll.environments import map_environments
from rollwire.cli.import_roll.learner import map_critic, map_learner, map_model
from rollwire.cli.import_roll.lora import map_lora
from rollwire.cli.import_roll.objective import map_objective
from rollwire.cli.import_roll.prompts import map_prompts
from rollwire.cli.import_roll.rollout import map_rollout
from rollwire.cli.import_roll.rules import apply_rules
from rollwire.cli.import_roll.run import map_batch, map_run
from rollwire.cli.import_roll.sampling import map_lengths, map_sampling
from rollwire.cli.import_roll.sharding import map_sharding
from rollwire.cli.import_roll.validation import map_validation
from rollwire.serving.config import ConfigError, RunConfig

_DEFAULTS = ("defaults",)


@dataclass(frozen=True)
class Converted:
    """A converted file.

    Attributes:
        yaml: Rollwire's configuration.
        report: What happened to the keys.
        conversion: How it came about.
    """

    yaml: str
    report: str
    conversion: Conversion


def convert(path: Path) -> Converted:
    """Converts a configuration of ROLL's agentic pipeline.

    Raises:
        ConfigError: It cannot be read, is not one, or asks for what cannot be configured.
    """
    file = read_roll_file(path)
    conversion = Conversion(file)
    _refuse_distillation(conversion)
    map_run(conversion)
    map_batch(conversion)
    map_model(conversion)
    tags = map_environments(conversion)
    map_prompts(conversion, tags)
    map_validation(conversion, tags)
    map_sampling(conversion)
    map_lengths(conversion, tags)
    map_advantages(conversion)
    map_divergence(conversion)
    map_objective(conversion)
    map_rollout(conversion)
    map_sharding(conversion)
    map_learner(conversion)
    map_lora(conversion)
    map_critic(conversion)
    apply_rules(conversion)
    _includes(conversion, file)
    _check(file, conversion)
    head = [
        f"Converted from {file.name} by `rollwire config import-roll`, which told what it changed and left out.",
        "",
    ]
    head.append("Behind each value is the key of ROLL that it comes from.")
    order = [*(_DEFAULTS for _ in [0] if _DEFAULTS in conversion.account), *conversion.tree.own()]
    told = report(file.name, conversion.account, order, conversion.tree.written_key)
    return Converted(conversion.settings.yaml(head), told, conversion)


def _refuse_distillation(conversion: Conversion) -> None:
    for key in ("is_pure_opd", "use_opd"):
        if conversion.flag(key):
            raise ConfigError(f"{conversion.file.name}: {key} is true, but Rollwire does no on-policy distillation")


def _includes(conversion: Conversion, file: RollFile) -> None:
    if file.assumed:
        names = ", ".join(file.assumed)
        why = f"{names}: not there; what ROLL's own file of this name says is known and was used"
        conversion.account.mark([_DEFAULTS], Fate.CHANGED, why)
    elif file.included:
        conversion.account.mark([_DEFAULTS], Fate.MAPPED)


def _check(file: RollFile, conversion: Conversion) -> None:
    try:
        RunConfig.model_validate(conversion.settings.plain())
    except ValidationError as error:
        texts = [
            f"{'.'.join(map(str, item['loc']))} {item['msg'].removeprefix('Value error, ')}" for item in error.errors()
        ]
        raise ConfigError("\n".join(f"{file.name} cannot be converted: {text.strip()}" for text in texts)) from error
