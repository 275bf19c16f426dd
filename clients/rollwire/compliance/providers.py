"""What every provider has to do: the tests of environments through a server's hub, and those of its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final

import pytest

from rollwire.client.environment import EnvironmentClient
from rollwire.compliance.environments import EnvironmentCompliance
from rollwire.compliance.game import check_reply, play, session
from rollwire.compliance.processes import environment_server, offered, program
from rollwire.compliance.proxy import tcp_proxy

_END_LIMIT_S: Final = 60.0


class ProviderCompliance(EnvironmentCompliance):
    """Tests of a provider's program; subclass it in a test module, with `tag`, `actions` and `command`.

    Needs `rollwire[environment]`, whose server the provider attaches to.
    """

    @classmethod
    def command(cls, target: str) -> Sequence[str]:
        """Returns the command line of a program that serves `tag` to the server at `target` until SIGTERM."""
        raise NotImplementedError(f"{cls.__name__} needs a class method command(target), which starts the provider")

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls) -> Iterator[str]:
        """An environment server, with the provider attached."""
        with asyncio.Runner() as runner:
            server = environment_server()
            address = runner.run(server.__aenter__())
            try:
                provider = program(cls.command(address))
                process = runner.run(provider.__aenter__())
                try:
                    runner.run(offered(address, cls.tag, process))
                    yield address
                finally:
                    runner.run(provider.__aexit__(None, None, None))
            finally:
                runner.run(server.__aexit__(None, None, None))

    def test_a_cut_connection_loses_nothing(self) -> None:
        """Sessions go on where they were when the provider has attached again."""
        asyncio.run(self._play_through_cuts())

    def test_sigterm_lets_running_sessions_end(self) -> None:
        """The program takes no new sessions, plays on those that it has, and ends with status 0."""
        asyncio.run(self._end_with_a_running_session())

    async def _play_through_cuts(self) -> None:
        async with (
            environment_server() as address,
            tcp_proxy(address) as proxy,
            program(self.command(proxy.address)) as process,
            EnvironmentClient(address) as client,
        ):
            await offered(address, self.tag, process)
            control = await play(client, self._opening(1), self.actions, self.most_turns)
            start = await session(client, self.tag, self.options)
            observations = [start.observation]
            for turn in range(len(control.rewards)):
                playing = asyncio.create_task(
                    client.step(start.session_id, turn, self.actions[turn % len(self.actions)])
                )
                if turn < 3:
                    proxy.cut()
                reply = await playing
                check_reply(reply)
                observations.append(reply.observation)
            await client.close_session(start.session_id)
            assert tuple(observations) == control.observations

    async def _end_with_a_running_session(self) -> None:
        async with (
            environment_server() as address,
            program(self.command(address)) as process,
            EnvironmentClient(address) as client,
        ):
            await offered(address, self.tag, process)
            start = await session(client, self.tag, self.options)
            process.terminate()
            check_reply(await client.step(start.session_id, 0, self.actions[0]))
            await client.close_session(start.session_id)
            async with asyncio.timeout(_END_LIMIT_S):
                assert await process.wait() == 0
