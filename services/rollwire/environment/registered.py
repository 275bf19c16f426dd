"""What stands behind one tag."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollwire.client.results import MAX_METRICS
from rollwire.environment.options import OptionSchema
from rollwire.environment.protocol import Environment
from rollwire.v1 import environment_pb2 as pb


@dataclass(frozen=True)
class RegisteredEnvironment:
    """An environment that can be opened by its tag.

    Attributes:
        tag: The tag.
        factory: Constructs the environment from options.
        options: Options from the configuration, checked.
        schema: What the constructor takes.
        step_timeout_s: Longest time for a start or a turn.
        built_in: Whether its turns are known to be short and to end.
        description: As the catalogue shows it. The aggregation of metrics grows as environments declare more.
    """

    tag: str
    factory: Callable[..., Environment]
    options: Mapping[str, Any]
    schema: OptionSchema
    step_timeout_s: float
    built_in: bool
    description: pb.EnvironmentDescription = field(default_factory=pb.EnvironmentDescription)

    def learn(self, modes: Mapping[str, pb.MetricAggregation.ValueType]) -> None:
        """Adds what a turn declares to the description, up to the number of metrics that the contract allows."""
        known = self.description.metric_aggregation
        for name, mode in modes.items():
            if name not in known and len(known) < MAX_METRICS:
                known[name] = mode
