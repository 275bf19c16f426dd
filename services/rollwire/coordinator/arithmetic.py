"""How much a run will do, from its configuration alone. Pure."""

from __future__ import annotations

from rollwire.serving.config import RunConfig


def batch_arithmetic(config: RunConfig) -> list[tuple[str, str]]:
    """Returns what the batch keys amount to: pairs of quantity and value, the value with its derivation."""
    batch, steps = config.batch, config.run.max_steps
    episodes = batch.groups_per_step * batch.episodes_per_group
    optimizer_steps = config.learner.optimizer_steps_per_batch
    in_flight = batch.groups_per_step * (config.max_staleness + 1)
    validations = count_validations(config)
    played = [entry for entry in config.environments if entry.source == "environment"]
    start_states = config.validation.episodes * len(played)
    return [
        (
            "episodes per step",
            f"{batch.groups_per_step} groups x {batch.episodes_per_group} episodes = {episodes:,}",
        ),
        (
            "tokens per step",
            f"at most {episodes:,} x {config.rollout.max_episode_tokens:,} tokens = "
            f"{episodes * config.rollout.max_episode_tokens:,}",
        ),
        (
            "optimizer steps",
            f"{steps:,} steps x {optimizer_steps} = {steps * optimizer_steps:,}, "
            f"about {episodes / optimizer_steps:g} episodes each",
        ),
        ("episodes in the run", f"{steps:,} steps x {episodes:,} = {steps * episodes:,}"),
        (
            "groups in flight",
            f"at most {batch.groups_per_step} x (max_staleness {config.max_staleness} + 1) = {in_flight}",
        ),
        ("validation", f"{validations} times x {start_states:,} episodes = {validations * start_states:,}"),
    ]


def count_validations(config: RunConfig) -> int:
    """Returns how often the validation set is played: before the first step, at every due step and after the last."""
    section, steps = config.validation, config.run.max_steps
    if section.episodes == 0:
        return 0
    due = steps // section.every_steps if section.every_steps else 0
    last = 0 if section.every_steps and steps % section.every_steps == 0 else 1
    return 1 + due + last + int(section.greedy_at_end)
