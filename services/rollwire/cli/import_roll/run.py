"""Name, seed, length, logging and batch of a run."""

from __future__ import annotations

import math
import re
from typing import Final

from rollwire.cli.import_roll.account import Fate
from rollwire.cli.import_roll.conversion import Conversion
from rollwire.serving.config import ConfigError

_NAME_CHARS: Final = 63
_DEFAULT_STEPS: Final = 100


def map_run(conversion: Conversion) -> None:
    """Maps what a run is called, how long it is and where it writes."""
    _name(conversion)
    conversion.put("run.seed", conversion.integer("seed"), "seed")
    _steps(conversion)
    conversion.put("run.output_dir", conversion.text("output_dir"), "output_dir")
    _tracking(conversion)
    _checkpoints(conversion)


def map_batch(conversion: Conversion) -> None:
    """Maps how many episodes a step consumes, in groups of how many, and how old they may be."""
    size = conversion.integer("train_env_manager.group_size", 1)
    episodes = conversion.integer("rollout_batch_size", -1)
    if episodes < 1 or episodes % size:
        raise conversion.refused("rollout_batch_size", f"a multiple of train_env_manager.group_size, which is {size}")
    keys = ("rollout_batch_size", "train_env_manager.group_size")
    conversion.put("batch.groups_per_step", episodes // size, *keys)
    conversion.put("batch.episodes_per_group", size, "train_env_manager.group_size")
    _environment_groups(conversion, "train_env_manager", episodes // size)
    ratio = conversion.number("async_generation_ratio")
    if ratio < 0:
        raise conversion.refused("async_generation_ratio", "0 or more")
    change = "" if ratio == int(ratio) else "rounded up to whole steps, as ROLL needs them as well"
    conversion.put("max_staleness", math.ceil(ratio), "async_generation_ratio", change=change)


def _environment_groups(conversion: Conversion, manager: str, needed: int) -> None:
    key = f"{manager}.num_env_groups"
    groups = conversion.integer(key, 1)
    if groups > needed:
        why = (
            f"{groups} groups for the {needed} of a step are redundancy, of which ROLL takes the fastest; Rollwire "
            "plays exactly the groups that it needs, so that short episodes are not preferred"
        )
        conversion.mark(key, Fate.CHANGED, why)
    else:
        conversion.mark(
            key, Fate.IGNORED, "groups are not tied to environments; rollout.max_episodes bounds what runs at once"
        )


def _name(conversion: Conversion) -> None:
    name = conversion.text("exp_name") or ""
    allowed = re.sub(r"\.\.+", ".", re.sub(r"[^a-z0-9_.-]", "-", name.lower()).lstrip("_.-"))[:_NAME_CHARS]
    if not allowed:
        raise conversion.refused("exp_name", "a name with a letter or digit")
    change = (
        "" if allowed == name else f"is {allowed!r}: lower-case letters, digits, '_', '.', '-', at most {_NAME_CHARS}"
    )
    conversion.put("run.name", allowed, "exp_name", change=change)


def _steps(conversion: Conversion) -> None:
    steps = conversion.integer("max_steps", -1)
    if steps == 0:
        raise conversion.refused("max_steps", "a number above 0, or -1")
    if steps > 0:
        conversion.put("run.max_steps", steps, "max_steps")
    else:
        why = f"-1 has no end here, for environments do not run out of data; set to {_DEFAULT_STEPS}"
        conversion.put("run.max_steps", _DEFAULT_STEPS, "max_steps", change=why)


def _tracking(conversion: Conversion) -> None:
    tracker = conversion.text("track_with")
    if tracker == "tensorboard":
        conversion.used("track_with")
        key = "tracker_kwargs.log_dir"
        log_dir = conversion.text(key)
        source = key if log_dir is not None else "output_dir"
        conversion.put("tracking.log_dir", log_dir or conversion.text("output_dir"), source)
        why = "event files take nothing but their directory"
    else:
        why = "only TensorBoard's event files and metrics.jsonl in the run's directory are written"
        conversion.mark("track_with", Fate.UNSUPPORTED, why)
    conversion.rest("tracker_kwargs", Fate.UNSUPPORTED, why)
    conversion.put("tracking.text_samples_every_steps", conversion.integer("logging_steps"), "logging_steps")


def _checkpoints(conversion: Conversion) -> None:
    every = max(0, conversion.integer("save_steps", -1))
    conversion.put("run.checkpoint_every_steps", every, "save_steps")
    kept = "max_ckpt_to_keep"
    if conversion.integer(kept) > 0:
        conversion.put("run.keep_checkpoints", conversion.integer(kept, 1), kept)
    else:
        conversion.mark(kept, Fate.CHANGED, "0 keeps all in ROLL; run.keep_checkpoints stays at its default")
    conversion.mark("checkpoint_config", Fate.IGNORED, "checkpoints are in the run's directory, complete or not there")
    if conversion.value("resume_from_checkpoint"):
        why = "a run is resumed with --resume; checkpoints of ROLL cannot be continued, only exported models"
        conversion.mark("resume_from_checkpoint", Fate.UNSUPPORTED, why)
    conversion.used("resume_from_checkpoint")


def episode_tokens(conversion: Conversion) -> tuple[int, list[str]]:
    """Returns the longest episode in tokens, and the keys that say so.

    Raises:
        ConfigError: The file does not say.
    """
    if conversion.value("sequence_length") is not None:
        return conversion.integer("sequence_length", 16), ["sequence_length"]
    if conversion.value("response_length") is None:
        raise ConfigError(f"{conversion.file.name} sets neither sequence_length nor response_length; set one")
    keys = ["response_length", "prompt_length"]
    return conversion.integer(keys[0], 1) + conversion.integer(keys[1], 1), keys
