"""Turns the configuration into group plans. Pure: the same configuration and index give the same plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct

from rollwire.coordinator.groups import GroupPlan
from rollwire.coordinator.mixture import Mixture
from rollwire.coordinator.seeds import Split, environment_seed, sampling_seed
from rollwire.serving.config import RunConfig
from rollwire.serving.config.environments import TrainEnvironment
from rollwire.serving.config.sections import SamplingSection
from rollwire.v1 import trajectory_pb2


class Planner:
    """Plans the groups of a run.

    Args:
        config: The run; `services.environment` are the servers that episodes are played on.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._mixture = Mixture(config.environments)

    def training_group(self, index: int) -> GroupPlan:
        """Returns the training group with this index."""
        environment = self._mixture.environment(index)
        sampling = environment.sampling or self._config.sampling
        episodes = self._config.batch.episodes_per_group
        return self._plan(f"g{index:08d}", index, "train", environment, episodes, sampling)

    def training_sampling(self, environment: TrainEnvironment) -> trajectory_pb2.SamplingSettings:
        """Returns how tokens of an entry are drawn in training."""
        return self._settings(environment, environment.sampling or self._config.sampling)

    def validation_groups(self, kind: str, step: int, greedy: SamplingSection | None = None) -> list[GroupPlan]:
        """Returns the validation set: for each environment the same start states every time, one episode each.

        Args:
            kind: `val` or `val_greedy`; with `step` it makes the group ids unique.
            step: Training steps done.
            greedy: How tokens are drawn, whatever is configured; None for that.
        """
        prefix = kind.replace("_", "-")
        return [
            self._plan(
                f"{prefix}-{step:06d}-{position}-{index:06d}",
                index,
                "validation",
                environment,
                1,
                greedy or environment.validation_sampling or self._config.validation.sampling,
            )
            for position, environment in enumerate(self._config.environments)
            if environment.source == "environment"
            for index in range(self._config.validation.episodes)
        ]

    def _plan(
        self,
        group_id: str,
        index: int,
        split: Split,
        environment: TrainEnvironment,
        episodes: int,
        sampling: SamplingSection,
    ) -> GroupPlan:
        seed, tag, rollout = self._config.run.seed, environment.tag, self._config.rollout
        return GroupPlan(
            group_id=group_id,
            index=index,
            split=split,
            environment_tag=tag,
            environment_options=options_struct(environment.options),
            environment_seed=environment_seed(seed, split, tag, index),
            sampling_seed=sampling_seed(seed, split, tag, index),
            episodes=episodes,
            sampling=self._settings(environment, sampling),
            max_episode_tokens=rollout.max_episode_tokens,
            episode_timeout_s=rollout.episode_timeout_s,
            environment_targets=tuple(self._config.services.environment),
        )

    def _settings(self, environment: TrainEnvironment, sampling: SamplingSection) -> trajectory_pb2.SamplingSettings:
        return sampling_settings(
            sampling, environment.max_new_tokens_per_turn or self._config.rollout.max_new_tokens_per_turn
        )


def sampling_settings(section: SamplingSection, max_tokens: int) -> trajectory_pb2.SamplingSettings:
    """Returns the settings for a request, log-probabilities being those of the distribution sampled from."""
    return trajectory_pb2.SamplingSettings(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        max_tokens=max_tokens,
        logprob_mode=trajectory_pb2.LOGPROB_MODE_SAMPLED,
    )


def options_struct(options: Mapping[str, Any]) -> Struct:
    """Returns environment options as the contract carries them."""
    return json_format.ParseDict(dict(options), Struct())
