"""Checks before a run that its servers fit each other and the configuration. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rollwire.coordinator.errors import RunError
from rollwire.coordinator.peers import Descriptions
from rollwire.coordinator.wording import did_you_mean
from rollwire.serving.config import ConfigError, RunConfig
from rollwire.serving.config.server_settings import differences, learner_settings, rollout_settings
from rollwire.v1 import environment_pb2, learner_pb2, rollout_pb2


def check_fit(config: RunConfig, found: Descriptions) -> None:
    """Checks environments, model, tokenizer, lengths, capacity, loss, and settings that only servers act on.

    Args:
        config: The run, with the addresses of its servers.
        found: What the servers say about themselves.

    Raises:
        RunError: The first thing that does not fit.
    """
    for target, catalogue in zip(config.services.environment, found.environments, strict=True):
        _check_environments(config, target, catalogue)
    for target, rollout in zip(config.services.rollout, found.rollouts, strict=True):
        _check_rollout(config, target, rollout, found.learner)
    _check_same_prompts(config.services.rollout, found.rollouts)
    _check_learner(config, found.learner)
    _check_settings(config, found)


def check_launch(config: RunConfig) -> None:
    """Checks that agents can call the policy of rollout servers that are started with this configuration.

    Raises:
        ConfigError: They cannot.
    """
    agents = [entry.tag for entry in config.environments if entry.source == "agent"]
    if agents and config.rollout.http.address is None:
        raise ConfigError(
            f"environments entry {agents[0]!r} has source agent, but rollout.http.address is null: agents could not "
            "call the policy; set rollout.http.address=127.0.0.1:0, or an address that they reach"
        )


def _check_environments(config: RunConfig, target: str, catalogue: environment_pb2.ListEnvironmentsResponse) -> None:
    offered = sorted(description.tag for description in catalogue.environments)
    for entry in config.environments:
        if entry.source == "environment" and entry.tag not in offered:
            raise RunError(
                f"environments names the tag {entry.tag!r}, which the environment server at {target} does not offer"
                f"{did_you_mean(entry.tag, offered)}; it offers {', '.join(offered)}. Define further tags under "
                "environment.definitions, or start a provider that serves it"
            )


def _check_rollout(
    config: RunConfig,
    target: str,
    rollout: rollout_pb2.RolloutServiceGetInfoResponse,
    learner: learner_pb2.LearnerServiceGetInfoResponse,
) -> None:
    here = f"the rollout server at {target}"
    if rollout.model_architecture != learner.model_architecture:
        raise RunError(
            f"{here} has a {rollout.model_architecture}, the learner at {config.services.learner[0]} a "
            f"{learner.model_architecture}; start both with the same model.path"
        )
    if learner.tokenizer_hash and rollout.tokenizer_hash != learner.tokenizer_hash:
        raise RunError(
            f"{here} has the tokenizer {rollout.tokenizer_hash[:12]}, the learner at {config.services.learner[0]} has "
            f"{learner.tokenizer_hash[:12]}; start both with the same model.path"
        )
    if config.rollout.max_episode_tokens > rollout.max_sequence_tokens:
        raise RunError(
            f"rollout.max_episode_tokens is {config.rollout.max_episode_tokens}, but {here} holds at most "
            f"{rollout.max_sequence_tokens} tokens in a sequence; lower it"
        )
    if config.batch.episodes_per_group > rollout.episode_capacity:
        raise RunError(
            f"batch.episodes_per_group is {config.batch.episodes_per_group}, but {here} runs at most "
            f"{rollout.episode_capacity} episodes at once; lower it or raise rollout.max_episodes there"
        )


def _check_same_prompts(targets: Sequence[str], rollouts: Sequence[rollout_pb2.RolloutServiceGetInfoResponse]) -> None:
    for target, rollout in zip(targets, rollouts, strict=True):
        if rollout.template_hash != rollouts[0].template_hash:
            raise RunError(
                f"the rollout servers at {targets[0]} and {target} have different prompts or chat templates; "
                "start them with the same configuration"
            )


def _check_learner(config: RunConfig, learner: learner_pb2.LearnerServiceGetInfoResponse) -> None:
    here = f"the learner at {config.services.learner[0]}"
    if config.rollout.max_episode_tokens > learner.max_sequence_tokens:
        raise RunError(
            f"rollout.max_episode_tokens is {config.rollout.max_episode_tokens}, but {here} trains at most "
            f"{learner.max_sequence_tokens} tokens in a sample; lower it"
        )
    if config.algorithm.policy_loss not in learner.policy_losses:
        raise RunError(
            f"algorithm.policy_loss is {config.algorithm.policy_loss}, but {here} has only "
            f"{', '.join(learner.policy_losses)}"
        )
    needed = {
        learner_pb2.SCORED_MODEL_REFERENCE: ("algorithm.kl.coefficient > 0", "reference", config.needs_reference),
        learner_pb2.SCORED_MODEL_CRITIC: ("algorithm.advantage=gae", "critic", config.needs_critic),
    }
    for model, (setting, name, is_needed) in needed.items():
        if is_needed and model not in learner.models:
            raise RunError(f"{setting} needs a {name}, which {here} does not have; start it with the same setting")


def _check_settings(config: RunConfig, found: Descriptions) -> None:
    servers = [
        (f"rollout server at {target}", dict(rollout.settings), rollout_settings(config))
        for target, rollout in zip(config.services.rollout, found.rollouts, strict=True)
    ]
    servers.append((f"learner at {config.services.learner[0]}", dict(found.learner.settings), learner_settings(config)))
    lines = [
        f"{key} is {ours} in this run's configuration, but the {server} was started with {theirs}"
        for server, settings, own in servers
        for key, theirs, ours in differences(settings, own)
    ]
    if lines:
        raise RunError(
            "\n".join(
                (*lines, "Only servers act on these settings: start them and the run with the same configuration")
            )
        )
