"""The conversion in progress: reads keys of the ROLL file, writes keys of Rollwire, and keeps account of the former."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rollwire.cli.import_roll.account import Account, Fate, Path, dotted
from rollwire.cli.import_roll.compose import RollFile
from rollwire.cli.import_roll.output import Settings
from rollwire.serving.config import ConfigError

Key = str | Path

ROLL_DEFAULTS: Final[dict[str, Any]] = {
    "exp_name": "start_agentic_pipeline",
    "seed": 42,
    "output_dir": "./output",
    "track_with": "tensorboard",
    "max_steps": 500,
    "save_steps": 50,
    "max_ckpt_to_keep": 0,
    "logging_steps": 1,
    "eval_steps": 10,
    "rollout_batch_size": 128,
    "val_batch_size": 128,
    "max_running_requests": 128,
    "prompt_length": 1024,
    "async_generation_ratio": 0,
    "ppo_epochs": 1,
    "adv_estimator": "gae",
    "gamma": 1.0,
    "lambd": 0.95,
    "step_reward_gamma": 0.95,
    "step_reward_weight": 1.0,
    "episode_reward_weight": 1.0,
    "pg_clip": 0.2,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "init_kl_coef": 0.2,
    "kl_horizon": 10_000,
    "kl_penalty": "kl",
    "kl_loss_coef": 0.0,
    "entropy_loss_coef": 0.0,
    "loss_agg_mode": "seq-mean-token-mean",
    "ratio_type": "token",
    "max_grad_norm": 1.0,
    "critic_warmup": 0,
    "train_env_manager.group_size": 1,
    "train_env_manager.num_env_groups": 128,
    "val_env_manager.group_size": 1,
    "val_env_manager.num_env_groups": 128,
    "reward_normalization.grouping": "batch",
    "reward_normalization.method": "identity",
    "train_infer_correction.is_weight.weight_type": "token",
    "train_infer_correction.is_weight.upper_bound": 1.2,
    **{
        f"{worker}.{key}": value
        for worker in ("actor_train", "critic")
        for key, value in {
            "training_args.learning_rate": 5e-5,
            "training_args.lr_scheduler_type": "linear",
            "training_args.weight_decay": 0.0,
            "training_args.adam_beta1": 0.9,
            "training_args.adam_beta2": 0.999,
            "training_args.warmup_steps": 0,
            "training_args.warmup_ratio": 0.0,
            "training_args.per_device_train_batch_size": 8,
            "training_args.gradient_accumulation_steps": 1,
        }.items()
    },
    "actor_train.model_args.dtype": "bf16",
    "actor_train.model_args.lora_rank": 8,
    "actor_infer.model_args.dtype": "bf16",
}
"""What ROLL takes where a file is silent, as far as the conversion reads it."""


class Conversion:
    """Everything that the mappings work on.

    Attributes:
        tree: Keys of the ROLL file.
        account: Their fates so far.
        settings: The configuration so far.
        pairs: Which key of ROLL became which of Rollwire, for the documentation's test.
    """

    def __init__(self, file: RollFile) -> None:
        self.file = file
        self.tree = file.tree
        self.account = Account()
        self.settings = Settings()
        self.pairs: set[tuple[str, str]] = set()

    def has(self, key: Key) -> bool:
        """True if the file says something at or below a key."""
        return bool(self.tree.below(_path(key)))

    def value(self, key: Key) -> Any:
        """Returns a value, or ROLL's default where the file is silent or says null; None without a default.

        Raises:
            ConfigError: Its interpolation has no value.
        """
        path = _path(key)
        leaf = self.tree.leaves.get(path)
        if leaf is not None and leaf.problem is not None:
            raise ConfigError(f"{self.file.name}: {dotted(path)} has no value: {leaf.problem}")
        found = leaf.value if leaf is not None else None
        return ROLL_DEFAULTS.get(dotted(path)) if found is None else found

    def integer(self, key: Key, least: int = 0) -> int:
        """Returns an integer, as `value` does.

        Raises:
            ConfigError: It is none, or less than `least`.
        """
        found = self.value(key)
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int) or found < least:
            raise self.refused(key, f"an integer, at least {least}")
        return found

    def number(self, key: Key) -> float:
        """Returns a number, as `value` does. Raises `ConfigError`."""
        found = self.value(key)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self.refused(key, "a number")
        return float(found)

    def text(self, key: Key) -> str | None:
        """Returns a text or None, as `value` does. Raises `ConfigError`."""
        found = self.value(key)
        if found is not None and not isinstance(found, str):
            raise self.refused(key, "a text")
        return found

    def flag(self, key: Key, default: bool = False) -> bool:
        """Returns true or false, as `value` does. Raises `ConfigError`."""
        found = self.value(key)
        if found is not None and not isinstance(found, bool):
            raise self.refused(key, "true or false")
        return default if found is None else found

    def choice(self, key: Key, allowed: Sequence[str]) -> str:
        """Returns one of the values that ROLL knows, as `value` does. Raises `ConfigError`."""
        found = self.value(key)
        if found not in allowed:
            raise self.refused(key, ", ".join(allowed))
        return str(found)

    def refused(self, key: Key, allowed: str) -> ConfigError:
        """Returns the error about a value that ROLL would not take either."""
        return ConfigError(f"{self.file.name}: {dotted(_path(key))} is {self.value(key)!r:.100}; allowed: {allowed}")

    def put(self, target: Key, value: Any, *keys: Key, change: str = "", note: str = "") -> None:
        """Writes a key of Rollwire.

        Args:
            target: The key.
            value: Its value.
            keys: Keys of ROLL that it comes from; those that the file does not have count as ROLL's defaults.
            change: What is different now, for people; empty if nothing is.
            note: Comment for the value instead of the keys.
        """
        sources = [dotted(_path(key)) for key in keys if self.has(key)]
        self.settings.put(_path(target), value, [note] if note else sources)
        self.pairs.update((dotted(_path(key)), dotted(_path(target))) for key in keys)
        for key in keys:
            if change:
                self.mark(key, Fate.CHANGED, change)
            else:
                self.used(key)

    def link(self, target: Key, *keys: Key) -> None:
        """Records that keys had their effect, as they are, on a key of Rollwire that is written elsewhere."""
        self.pairs.update((dotted(_path(key)), dotted(_path(target))) for key in keys)
        self.used(*keys)

    def used(self, *keys: Key) -> None:
        """Records that keys had their effect, as they are."""
        for key in keys:
            self.account.mark(self.tree.below(_path(key)), Fate.MAPPED)

    def mark(self, key: Key, fate: Fate, why: str) -> None:
        """Records what became of the keys at or below one."""
        self.account.mark(self.tree.below(_path(key)), fate, why)

    def rest(self, key: Key, fate: Fate, why: str) -> None:
        """Records what became of those keys at or below one that nothing accounts for yet."""
        self.account.mark([path for path in self.tree.below(_path(key)) if path not in self.account], fate, why)

    def unstated(self, key: Key, why: str) -> None:
        """Records that a default of ROLL was replaced that the file does not state."""
        self.account.mark([_path(key)], Fate.UNSTATED, why)


def _path(key: Key) -> Path:
    return tuple(key.split(".")) if isinstance(key, str) else key
