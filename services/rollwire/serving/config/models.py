"""The whole configuration of a run and the rules that span sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollwire.rpc.ids import NAME_RULE, is_name
from rollwire.serving.config.algorithm import COMPARING, AlgorithmSection
from rollwire.serving.config.environments import TrainEnvironment, check_entries
from rollwire.serving.config.sections import (
    CoordinatorSection,
    EnvironmentSection,
    LearnerSection,
    ModelSection,
    NotNegative,
    Positive,
    RolloutSection,
    SamplingSection,
    Seconds,
    Section,
    ServicesSection,
)


class RunSection(Section):
    """The run."""

    name: str = "rollwire"
    """Name of the run: directory names derive from it. Lower-case letters, digits, `_`, `.`, `-`; at most 63."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """Determines environment seeds, sampling seeds and shuffles."""

    max_steps: Positive = 100
    """Training steps."""

    output_dir: str = "output"
    """Directory under which run directories and event files are written."""

    checkpoint_every_steps: NotNegative = 20
    """Save everything that a resumed run needs before the first step, after every so many, and at the end; 0 means only
    at the end. See docs/checkpoints.md."""

    keep_checkpoints: Positive = 2
    """Checkpoints that stay, the ones saved last."""

    deterministic: bool = False
    """On CPU: two runs with the same seed give the same trajectories and weights, bit for bit."""

    @model_validator(mode="after")
    def _name(self) -> RunSection:
        if not is_name(self.name):
            raise ValueError(f"run.name is {self.name!r}; allowed: {NAME_RULE}")
        return self


class BatchSection(Section):
    """What one training step consumes."""

    groups_per_step: Positive = 16
    """Groups of episodes; the episodes of a group share environment, seed and start state."""

    episodes_per_group: Annotated[int, Field(ge=1, le=1024)] = 8
    """Episodes in each group."""


class ValidationSection(Section):
    """Validation on a fixed set of start states that training never uses."""

    episodes: NotNegative = 128
    """Number of start states per environment tag, each played once; 0 switches validation off."""

    every_steps: NotNegative = 10
    """Validate after this many training steps; 0 means only before the first and after the last."""

    sampling: SamplingSection = SamplingSection()
    """Sampling for validation; independent of training."""

    greedy_at_end: bool = False
    """Play the set once more with temperature 0 after the last step and log it as `val_greedy/*`."""


class TrackingSection(Section):
    """What is logged and where."""

    log_dir: str | None = None
    """Directory of TensorBoard event files; default `<run.output_dir>/tensorboard`."""

    text_samples_every_steps: NotNegative = 10
    """Write the text of two episodes every so many steps; 0 is off."""


class TimeoutsSection(Section):
    """How long the coordinator waits. All in seconds."""

    ready_s: Seconds = 300.0
    """For a service to become ready."""

    group_s: Seconds = 1800.0
    """For one group of episodes. With `source: agent` or `pushed`: for the next session or group to come.
    An agent's session without a call for so long has failed, even if its lease is longer."""

    train_s: Seconds = 3600.0
    """For one training step of the learner."""

    update_s: Seconds = 600.0
    """For one weight update."""


class RunConfig(Section):
    """A run."""

    run: RunSection = RunSection()
    """Name, seed, length, place."""

    model: ModelSection = ModelSection()
    """Policy model."""

    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Device of learner and rollout servers."""

    batch: BatchSection = BatchSection()
    """Batch arithmetic."""

    max_staleness: Annotated[int, Field(ge=0, le=64)] = 0
    """Most training steps that a trained episode may lag behind the weights. 0 alternates rollout and training."""

    placement: Literal["separate", "colocated"] = "separate"
    """`colocated`: learner and rollout servers share devices and take turns, each in host memory while the other works.
    Needs `max_staleness: 0`, and with vLLM `rollout.vllm.sleep_mode`."""

    environments: list[TrainEnvironment] = Field(default=[TrainEnvironment(tag="FrozenLake")])
    """What the run plays."""

    sampling: SamplingSection = SamplingSection()
    """Sampling for training."""

    algorithm: AlgorithmSection = AlgorithmSection()
    """Advantages and objective."""

    validation: ValidationSection = ValidationSection()
    """Validation."""

    tracking: TrackingSection = TrackingSection()
    """Logging."""

    timeouts: TimeoutsSection = TimeoutsSection()
    """Waiting."""

    environment: EnvironmentSection = EnvironmentSection()
    """The environment server."""

    rollout: RolloutSection = RolloutSection()
    """The rollout server."""

    learner: LearnerSection = LearnerSection()
    """The learner."""

    services: ServicesSection = ServicesSection()
    """Running servers."""

    coordinator: CoordinatorSection = CoordinatorSection()
    """Where the coordinator listens."""

    @property
    def training_temperature(self) -> float:
        """Temperature that all trained tokens are drawn and scored at."""
        return next((entry.sampling or self.sampling).temperature for entry in self.environments if entry.weight > 0)

    @property
    def needs_critic(self) -> bool:
        """True if the learner has a critic."""
        return self.algorithm.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        """True if the learner has a reference."""
        return self.algorithm.kl.coefficient > 0

    @model_validator(mode="after")
    def _critic_and_reference(self) -> RunConfig:
        critic, reference = self.learner.critic, self.learner.reference
        if not self.needs_critic and (critic.path is not None or critic.warmup_steps > 0):
            raise ValueError(
                f"learner.critic is configured, but algorithm.advantage={self.algorithm.advantage} uses no critic; "
                "remove it, or choose algorithm.advantage=gae"
            )
        if critic.warmup_steps >= self.run.max_steps:
            raise ValueError(
                f"learner.critic.warmup_steps is {critic.warmup_steps}, but the run has only run.max_steps="
                f"{self.run.max_steps} steps: the policy would never be trained; lower it"
            )
        if reference.path is not None and not self.needs_reference:
            raise ValueError(
                f"learner.reference.path is {reference.path!r}, but algorithm.kl.coefficient is 0: nothing would use "
                "the reference; remove it, or set the coefficient"
            )
        return self

    @model_validator(mode="after")
    def _across_sections(self) -> RunConfig:
        check_entries(self.environments, self.sampling)
        if self.algorithm.advantage in COMPARING and self.batch.episodes_per_group < 2:
            raise ValueError(
                f"batch.episodes_per_group is {self.batch.episodes_per_group}, but algorithm.advantage="
                f"{self.algorithm.advantage} compares episodes of a group and needs at least 2; "
                "raise it, or choose algorithm.advantage=reinforce"
            )
        if self.run.deterministic and self.max_staleness > 0:
            raise ValueError(
                f"run.deterministic is true, but max_staleness is {self.max_staleness}: which weights play an episode "
                "would depend on timing; set max_staleness=0"
            )
        if self.placement == "colocated" and self.max_staleness > 0:
            raise ValueError(
                f"placement is colocated, but max_staleness is {self.max_staleness}: rollout servers and learner take "
                "turns, so episodes cannot be played while the learner trains; set max_staleness=0"
            )
        if self.rollout.max_new_tokens_per_turn >= self.rollout.max_episode_tokens:
            raise ValueError(
                f"rollout.max_new_tokens_per_turn is {self.rollout.max_new_tokens_per_turn}, but an episode holds "
                f"rollout.max_episode_tokens={self.rollout.max_episode_tokens} tokens, prompts included; "
                "raise the latter"
            )
        for entry in self.environments:
            if (entry.max_new_tokens_per_turn or 0) >= self.rollout.max_episode_tokens:
                raise ValueError(
                    f"environments entry {entry.tag!r} has max_new_tokens_per_turn {entry.max_new_tokens_per_turn}, "
                    f"but an episode holds rollout.max_episode_tokens={self.rollout.max_episode_tokens} tokens, "
                    "prompts included; raise the latter"
                )
        episodes = self.batch.groups_per_step * self.batch.episodes_per_group
        if self.learner.optimizer_steps_per_batch > episodes:
            raise ValueError(
                f"learner.optimizer_steps_per_batch is {self.learner.optimizer_steps_per_batch}, but a step has only "
                f"{episodes} episodes (batch.groups_per_step x batch.episodes_per_group); lower it"
            )
        if self.batch.episodes_per_group > self.rollout.max_episodes:
            raise ValueError(
                f"batch.episodes_per_group is {self.batch.episodes_per_group}, but a rollout server runs at most "
                f"rollout.max_episodes={self.rollout.max_episodes} at once; raise the latter"
            )
        return self

    @model_validator(mode="after")
    def _sources(self) -> RunConfig:
        outside = [entry for entry in self.environments if entry.source != "environment"]
        if len(outside) == len(self.environments) and self.validation.episodes > 0:
            raise ValueError(
                f"validation.episodes is {self.validation.episodes}, but environments has no entry with source "
                "environment that could be played; set validation.episodes=0, or add an entry with weight 0"
            )
        for entry in outside:
            if self.run.deterministic:
                raise ValueError(
                    f"run.deterministic is true, but environments entry {entry.tag!r} has source {entry.source}: what "
                    "comes from outside depends on timing; set run.deterministic=false"
                )
            if entry.source == "pushed" and self.placement == "colocated":
                raise ValueError(
                    f"placement is colocated, but environments entry {entry.tag!r} has source pushed: rollout servers "
                    "sleep while the learner trains, and a pusher could not generate; set placement=separate"
                )
        return self
