"""Python clients of the four services. Importing this package loads no torch."""

from rollwire.client.agent import AgentSession, agent_session, open_agent_session
from rollwire.client.coordinator import CoordinatorClient
from rollwire.client.environment import EnvironmentClient
from rollwire.client.environment_stream import SessionStream
from rollwire.client.learner import LearnerClient
from rollwire.client.patience import RunEndedError
from rollwire.client.provider import serve_environment, serve_environment_async
from rollwire.client.pusher import TrajectoryPusher
from rollwire.client.rollout import RolloutClient
from rollwire.client.trajectories import TrajectoryBuilder
from rollwire.rpc.errors import Reason, RollwireError

__all__ = [
    "AgentSession",
    "CoordinatorClient",
    "EnvironmentClient",
    "LearnerClient",
    "Reason",
    "RolloutClient",
    "RollwireError",
    "RunEndedError",
    "SessionStream",
    "TrajectoryBuilder",
    "TrajectoryPusher",
    "agent_session",
    "open_agent_session",
    "serve_environment",
    "serve_environment_async",
]
