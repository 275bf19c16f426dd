"""The entries of `environments`: what a run trains on, where its episodes come from, and which settings go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rollwire.rpc.ids import TAG_RULE, is_tag
from rollwire.serving.config.sections import Positive, SamplingSection, Section


class TrainEnvironment(Section):
    """One environment that the run plays, or one task that agents play or trajectories are pushed for."""

    tag: str
    """Tag on the environment server; with another `source` a name that agents and pushers give."""

    source: Literal["environment", "agent", "pushed"] = "environment"
    """Where episodes come from: rollout servers play them on environment servers; agents open sessions and play them
    (docs/agents.md); or finished trajectories are pushed."""

    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Share of groups, relative to the other entries; 0 is for validation alone."""

    options: dict[str, Any] = Field(default={})
    """Options for each session, as `EnvironmentService.OpenSession` takes them; agents and pushers are told them."""

    sampling: SamplingSection | None = None
    """Sampling of this entry in training, in place of `sampling`; the temperature must be that of the other entries."""

    validation_sampling: SamplingSection | None = None
    """Sampling of this entry in validation, in place of `validation.sampling`."""

    max_new_tokens_per_turn: Positive | None = None
    """Most tokens that the policy may draw in one turn of this entry, in place of `rollout.max_new_tokens_per_turn`."""

    @model_validator(mode="after")
    def _entry(self) -> TrainEnvironment:
        here = f"environments entry {self.tag!r}"
        if not is_tag(self.tag):
            raise ValueError(f"environments holds the tag {self.tag!r}; allowed: {TAG_RULE}")
        if self.source != "environment" and (self.weight == 0 or self.validation_sampling is not None):
            raise ValueError(
                f"{here} has source {self.source} and {'weight 0' if self.weight == 0 else 'validation_sampling'}, but "
                "validation plays only entries with source environment; remove it"
            )
        if self.weight == 0 and self.sampling is not None:
            raise ValueError(f"{here} has weight 0 and sampling, but is not trained; set validation_sampling instead")
        return self


def check_entries(entries: Sequence[TrainEnvironment], default_sampling: SamplingSection) -> None:
    """Checks that entries go together. Raises `ValueError`."""
    tags = [entry.tag for entry in entries]
    if not tags:
        raise ValueError("environments is empty; it needs at least one entry such as {tag: FrozenLake}")
    if len(set(tags)) != len(tags):
        raise ValueError(f"environments lists a tag twice: {tags}; merge the entries and add their weights")
    if not any(entry.weight > 0 for entry in entries):
        raise ValueError("environments has only entries with weight 0: nothing is trained; give one a weight > 0")
    _check_sampling("sampling", default_sampling)
    for entry in entries:
        if entry.sampling is not None:
            _check_sampling(f"environments entry {entry.tag!r}: sampling", entry.sampling)
    temperatures = {
        entry.tag: (entry.sampling or default_sampling).temperature for entry in entries if entry.weight > 0
    }
    if len(set(temperatures.values())) > 1:
        shown = ", ".join(f"{tag} {temperature:g}" for tag, temperature in temperatures.items())
        raise ValueError(
            f"environments are to be trained at different temperatures ({shown}), but a training step scores all "
            "of its samples at one; give all of them the same"
        )


def _check_sampling(path: str, sampling: SamplingSection) -> None:
    if sampling.temperature == 0:
        raise ValueError(f"{path}.temperature is 0; training needs a policy that explores: choose a value > 0")
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise ValueError(
            f"{path}.top_p is {sampling.top_p} and {path.rpartition(' ')[2]}.top_k is {sampling.top_k}; training "
            "needs 1.0 and 0, because the learner scores the unfiltered distribution (validation.sampling is free)"
        )
