"""Python clients of the four services. Importing this package loads no torch."""

from rollwire.client.coordinator import CoordinatorClient
from rollwire.client.environment import EnvironmentClient
from rollwire.client.learner import LearnerClient
from rollwire.client.provider import serve_environment, serve_environment_async
from rollwire.client.rollout import RolloutClient
from rollwire.rpc.errors import Reason, RollwireError

__all__ = [
    "CoordinatorClient",
    "EnvironmentClient",
    "LearnerClient",
    "Reason",
    "RolloutClient",
    "RollwireError",
    "serve_environment",
    "serve_environment_async",
]
