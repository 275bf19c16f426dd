"""What every environment of every server has to do, whoever wrote it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import grpc
import grpc.aio

from rollwire.client.environment import EnvironmentClient
from rollwire.client.environment_stream import SessionStream
from rollwire.client.results import MAX_METRICS
from rollwire.compliance.game import blocking, check_start, opening, play, refused, session
from rollwire.rpc.channel import open_environment_channel
from rollwire.rpc.errors import Reason, from_rpc_error
from rollwire.rpc.ids import METRIC_PATTERN, is_tag
from rollwire.v1 import environment_pb2 as pb
from rollwire.v1 import environment_pb2_grpc as pb_grpc

_HOSTILE: tuple[str, ...] = ("", " \n\t ", "\0\x01\x1b[31m", "<answer>" * 1000, "🙂" * 1000, "a" * (1 << 20))


class EnvironmentCompliance:
    """Tests of one environment tag; subclass it in a test module.

    The subclass has `tag`, `actions`, and a fixture `target` that gives `host:port` of the server that offers the tag.

    Attributes:
        tag: The environment.
        actions: Answers that it understands; they are played one after the other, again and again.
        options: Options that sessions are opened with.
        most_turns: Episodes are played no longer than this.
        sessions: How many are played at the same time.
    """

    tag: ClassVar[str]
    actions: ClassVar[Sequence[str]]
    options: ClassVar[Mapping[str, Any]] = {}
    most_turns: ClassVar[int] = 50
    sessions: ClassVar[int] = 8

    def _opening(self, seed: int, **changes: Any) -> pb.OpenSessionRequest:
        return opening(self.tag, seed, self.options, **changes)

    @blocking
    async def test_the_catalogue_describes_it(self, target: str) -> None:
        """The tag is listed once, with what a run has to know."""
        async with EnvironmentClient(target) as client:
            listed = await client.list_environments()
        tags = [entry.tag for entry in listed.environments]
        assert tags == sorted(set(tags)), "tags ascend, each once"
        assert listed.session_capacity >= 1
        (entry,) = [entry for entry in listed.environments if entry.tag == self.tag]
        assert is_tag(entry.tag)
        assert entry.max_turns >= 1
        assert len(entry.metric_aggregation) <= MAX_METRICS
        assert all(METRIC_PATTERN.fullmatch(name) for name in entry.metric_aggregation)

    @blocking
    async def test_the_same_seed_gives_the_same_episode(self, target: str) -> None:
        """Groups of training start from one state: options, seed and actions decide everything."""
        async with EnvironmentClient(target) as client:
            for seed in (0, 1, 2**32 + 7, 2**64 - 1):
                first = await play(client, self._opening(seed), self.actions, self.most_turns)
                again = await play(client, self._opening(seed), self.actions, self.most_turns)
                assert first == again, f"seed {seed}"

    @blocking
    async def test_calls_that_come_again_are_answered_as_before(self, target: str) -> None:
        """Networks repeat calls; a turn is played once all the same."""
        async with EnvironmentClient(target) as client:
            once = await play(client, self._opening(3), self.actions, self.most_turns)
            thrice = await play(client, self._opening(3), self.actions, self.most_turns, repeats=3)
            assert once == thrice

    @blocking
    async def test_sessions_do_not_see_each_other(self, target: str) -> None:
        """Episodes that run at the same time are those that run alone."""
        async with EnvironmentClient(target) as client:
            alone = [await play(client, self._opening(seed), self.actions, self.most_turns) for seed in (5, 6)]
            together = await asyncio.gather(
                *(
                    play(client, self._opening(5 + index % 2), self.actions, self.most_turns)
                    for index in range(self.sessions)
                )
            )
            assert list(together) == [alone[index % 2] for index in range(self.sessions)]

    @blocking
    async def test_a_stream_of_calls_plays_the_same(self, target: str) -> None:
        """`Play`, which rollout servers use, answers as the unary methods do."""
        async with EnvironmentClient(target) as client:
            unary = await play(client, self._opening(4), self.actions, self.most_turns)
            async with SessionStream(client) as stream:
                streamed = await play(stream, self._opening(4), self.actions, self.most_turns, repeats=2)
            assert unary == streamed

    @blocking
    async def test_an_opening_under_a_used_request_id(self, target: str) -> None:
        """A request id belongs to one session."""
        async with EnvironmentClient(target) as client:
            request = self._opening(1)
            start = await client.open_session(request)
            check_start(start)
            request.seed = 2
            await refused(client.open_session(request), Reason.INVALID_FIELD)
            await client.close_session(start.session_id)

    @blocking
    async def test_turns_out_of_order(self, target: str) -> None:
        """A turn that is neither the next nor the latest one is refused and changes nothing."""
        async with EnvironmentClient(target) as client:
            control = await play(client, self._opening(1), self.actions, 1)
            start = await session(client, self.tag, self.options)
            for turn in (1, 7, 2**32 - 1):
                await refused(client.step(start.session_id, turn, self.actions[0]), Reason.WRONG_TURN)
            reply = await client.step(start.session_id, 0, self.actions[0])
            assert reply.observation == control.observations[1]
            await client.close_session(start.session_id)

    @blocking
    async def test_a_turn_after_the_end(self, target: str) -> None:
        """An episode that has ended is not played on; one that has not, reaches its turn limit."""
        async with EnvironmentClient(target) as client:
            start = await session(client, self.tag, self.options)
            turn, ended = 0, False
            while not ended and turn < min(start.max_turns, self.most_turns):
                reply = await client.step(start.session_id, turn, self.actions[turn % len(self.actions)])
                turn, ended = turn + 1, reply.terminated or reply.truncated
            assert ended or start.max_turns > self.most_turns
            if ended:
                await refused(client.step(start.session_id, turn, self.actions[0]), Reason.EPISODE_ENDED)
            await client.close_session(start.session_id)

    @blocking
    async def test_sessions_that_are_closed_or_never_were(self, target: str) -> None:
        """Closing is idempotent; everything else on such a session is refused."""
        async with EnvironmentClient(target) as client:
            start = await session(client, self.tag, self.options)
            await client.close_session(start.session_id)
            await client.close_session(start.session_id)
            await client.close_session("no-such-session")
            for session_id in (start.session_id, "no-such-session"):
                await refused(client.step(session_id, 0, self.actions[0]), Reason.UNKNOWN_SESSION)
                await refused(client.renew_session(session_id), Reason.UNKNOWN_SESSION)
                await refused(client.render(session_id, pb.RENDER_FORMAT_TEXT), Reason.UNKNOWN_SESSION)

    @blocking
    async def test_leases_end_and_are_renewed(self, target: str) -> None:
        """A session without calls is gone after its lease, and not before."""
        async with EnvironmentClient(target) as client:
            short, renewed, shortened = [
                await client.open_session(self._opening(1, lease_s=lease_s)) for lease_s in (1, 30, 30)
            ]
            answer = await client.renew_session(renewed.session_id, 120)
            assert answer.lease.ToSeconds() == 120
            answer = await client.renew_session(shortened.session_id, 1)
            assert answer.lease.ToSeconds() == 1
            await asyncio.sleep(1.5)
            for ended in (short, shortened):
                await refused(client.step(ended.session_id, 0, self.actions[0]), Reason.UNKNOWN_SESSION)
            assert not (await client.step(renewed.session_id, 0, self.actions[0])).HasField("failure")
            await client.close_session(renewed.session_id)

    @blocking
    async def test_fields_outside_their_range(self, target: str) -> None:
        """Each is refused with the path of the field."""
        async with EnvironmentClient(target) as client:
            start = await session(client, self.tag, self.options)
            for field, value in (
                ("request_id", ""),
                ("request_id", "x" * 65),
                ("request_id", "two words"),
                ("environment_tag", "../tag"),
            ):
                request = self._opening(1)
                setattr(request, field, value)
                assert field in (await refused(client.open_session(request), Reason.INVALID_FIELD)).fields
            for lease_s in (0, 3601):
                request = self._opening(1, lease_s=lease_s)
                assert "lease" in (await refused(client.open_session(request), Reason.INVALID_FIELD)).fields
            request = self._opening(1)
            request.options.update({"no_such_option_of_this_environment": 1})
            await refused(client.open_session(request), Reason.INVALID_FIELD)
            unknown = pb.OpenSessionRequest(request_id="unknown", environment_tag="NoSuchEnvironment-0")
            await refused(client.open_session(unknown), Reason.UNKNOWN_ENVIRONMENT)
            too_long = client.step(start.session_id, 0, "a" * ((1 << 20) + 1))
            assert "action" in (await refused(too_long, Reason.INVALID_FIELD)).fields
            await client.close_session(start.session_id)

    @blocking
    async def test_a_call_without_a_deadline(self, target: str) -> None:
        """No server waits for ever, nor lets a client do so."""
        async with open_environment_channel(target) as channel:
            try:
                await pb_grpc.EnvironmentServiceStub(channel).ListEnvironments(pb.ListEnvironmentsRequest())
            except grpc.aio.AioRpcError as error:
                assert from_rpc_error(error).reason == Reason.DEADLINE_REQUIRED
            else:
                raise AssertionError("must be refused with DEADLINE_REQUIRED")

    @blocking
    async def test_answers_that_make_no_sense(self, target: str) -> None:
        """A policy says anything; the environment takes it, or the episode fails as data, and others go on."""
        async with EnvironmentClient(target) as client:
            for action in _HOSTILE:
                start = await session(client, self.tag, self.options)
                reply = await client.step(start.session_id, 0, action)
                if reply.HasField("failure"):
                    assert reply.reward == 0 and not reply.metrics
                await client.close_session(start.session_id)
            await play(client, self._opening(1), self.actions, self.most_turns)

    @blocking
    async def test_drawings(self, target: str) -> None:
        """What the catalogue offers can be drawn, and drawing changes nothing."""
        async with EnvironmentClient(target) as client:
            listed = await client.list_environments()
            (entry,) = [entry for entry in listed.environments if entry.tag == self.tag]
            control = await play(client, self._opening(1), self.actions, 1)
            start = await session(client, self.tag, self.options)
            for shape in (pb.RENDER_FORMAT_TEXT, pb.RENDER_FORMAT_PNG):
                if shape in entry.render_formats:
                    drawn = await client.render(start.session_id, shape)
                    assert drawn.text if shape == pb.RENDER_FORMAT_TEXT else drawn.png.startswith(b"\x89PNG")
                else:
                    await refused(client.render(start.session_id, shape), Reason.RENDER_UNSUPPORTED)
            reply = await client.step(start.session_id, 0, self.actions[0])
            assert reply.observation == control.observations[1]
            await client.close_session(start.session_id)
