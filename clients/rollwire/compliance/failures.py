"""What happens when an environment fails: for servers and providers whose environments can be made to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rollwire.client.environment import EnvironmentClient
from rollwire.compliance.game import blocking, refused, session
from rollwire.rpc.errors import Reason
from rollwire.v1 import environment_pb2 as pb


class FailureCompliance:
    """Tests of a tag that fails when told to; subclass it beside `EnvironmentCompliance`.

    Attributes:
        tag: The environment.
        failing_action: Answer at which it raises an error.
        failure_type: Name of that error, as the failure shows it; empty for any.
        options: Options that sessions are opened with.
    """

    tag: ClassVar[str]
    failing_action: ClassVar[str]
    failure_type: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}

    @blocking
    async def test_a_failure_is_data_and_ends_the_episode(self, target: str) -> None:
        """It is no error of the call, no reward, and happens to this session alone."""
        async with EnvironmentClient(target) as client:
            other = await session(client, self.tag, self.options)
            start = await session(client, self.tag, self.options)
            reply = await client.step(start.session_id, 0, self.failing_action)
            assert reply.HasField("failure"), "the turn must fail"
            assert reply.failure.kind != pb.ENVIRONMENT_FAILURE_KIND_UNSPECIFIED
            assert reply.failure.type == (self.failure_type or reply.failure.type) != ""
            assert "\n" not in reply.failure.message, "one line, without a stack trace"
            assert (reply.reward, reply.terminated, dict(reply.metrics)) == (0, False, {})
            assert await client.step(start.session_id, 0, self.failing_action) == reply
            await refused(client.step(start.session_id, 1, self.failing_action), Reason.EPISODE_ENDED)
            assert (await client.renew_session(other.session_id)).lease.ToSeconds() > 0
            for one in (start, other):
                await client.close_session(one.session_id)
