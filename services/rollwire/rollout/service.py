"""The rollout server as `rollwire serve rollout` runs it: loads the model, builds the parts, reports ready."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, Final

import grpc.aio

from rollwire.rollout.agents.desk import AgentDesk
from rollwire.rollout.agents.registry import PolicySessions
from rollwire.rollout.agents.start import listen, serve_agents
from rollwire.rollout.chat import ChatEncoder
from rollwire.rollout.engine import Engine
from rollwire.rollout.engines.choose import start_engine
from rollwire.rollout.environments import EnvironmentPool
from rollwire.rollout.episode import EpisodeRunner, Hashes
from rollwire.rollout.groups import EpisodeSlots, GroupRunner
from rollwire.rollout.pause import Pauser
from rollwire.rollout.policy import Policy
from rollwire.rollout.prompts import SYSTEM_TEMPLATE, TURN_TEMPLATE, PromptTemplates
from rollwire.rollout.requests import Limits
from rollwire.rollout.servicer import Parts, RolloutServicer
from rollwire.rollout.sessions import SessionOpener
from rollwire.rollout.sleep import Sleeper
from rollwire.rollout.weight_check import WeightChecker
from rollwire.rollout.weights import WeightUpdater
from rollwire.rpc.deadlines import deadline_s
from rollwire.rpc.limits import INTERNAL_MESSAGE_BYTES
from rollwire.serving.config.models import RunConfig
from rollwire.serving.config.server_settings import rollout_settings
from rollwire.serving.model_files import load_tokenizer, template_hash, tokenizer_hash
from rollwire.serving.server import Readiness, ServeError
from rollwire.serving.weights import WeightsServicer
from rollwire.v1 import rollout_pb2_grpc

if TYPE_CHECKING:
    from rollwire.rollout.agents.http_server import HttpServer

# The environment server answers within its own limit; the network gets this much on top.
_STEP_MARGIN_S: Final = 5.0
# The decoding thread gives up the interpreter lock at every operation of torch. With Python's 5 ms it would wait that
# long to get it back whenever the event loop is busy.
_SWITCH_INTERVAL_S: Final = 0.0005


class RolloutServer:
    """A `serving.server.Service` that plays episodes with the configured model.

    It is ready once the model is loaded, so that weights can be pushed; before the first `UpdateWeights` it generates
    nothing.

    Args:
        config: The run's configuration.
    """

    full_name = "rollwire.v1.RolloutService"
    message_bytes = INTERNAL_MESSAGE_BYTES

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._servicer = RolloutServicer()
        self._opener: SessionOpener | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._http: HttpServer | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """See `Service`."""
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self._servicer, server)
        WeightsServicer(lambda: self._servicer.loaded().updater.relay).register(server)

    async def start(self, readiness: Readiness) -> None:
        """Loads the model.

        Raises:
            ServeError: Model, tokenizer, templates or engine cannot be used.
        """
        config = self._config
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        prompts = _templates(config)
        self._http = listen(config.rollout.http)
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
        encoder = ChatEncoder(tokenizer)
        started = await start_engine(config)
        engine = started.engine
        hashes = Hashes(
            tokenizer_hash(tokenizer), template_hash(tokenizer.chat_template, [prompts.system, prompts.turn])
        )
        policy, pool = Policy(engine), EnvironmentPool()
        self._opener = SessionOpener(pool, _step_timeout_s(config))
        runner = EpisodeRunner(policy, self._opener, encoder, prompts, hashes)
        limits = Limits(
            vocabulary_size=engine.description.vocabulary_size,
            max_sequence_tokens=engine.description.max_sequence_tokens,
            end_token_ids=started.end_token_ids | _end_token_ids(tokenizer, encoder),
            environment_targets=tuple(config.services.environment),
            lowest_temperature=engine.description.lowest_temperature,
        )
        slots = EpisodeSlots(config.rollout.max_episodes)
        # A kept prefix changes the last bits of what follows, so in a deterministic run callers get none.
        keep_prefixes = not config.run.deterministic
        self._servicer.parts = Parts(
            policy=policy,
            updater=WeightUpdater(policy, buffers=started.buffers, same_host=config.rollout.same_host_weights),
            pauser=Pauser(policy),
            checker=WeightChecker(policy),
            sleeper=Sleeper(policy),
            slots=slots,
            groups=GroupRunner(runner, slots),
            agents=await self._serve_agents(policy, encoder, slots, hashes, keep_prefixes=keep_prefixes),
            pool=pool,
            limits=limits,
            hashes=hashes,
            keep_prefixes=keep_prefixes,
            settings=rollout_settings(config),
        )
        await readiness.set(True)
        self._watches = [asyncio.create_task(_end_with(engine, readiness)), asyncio.create_task(self._drain(readiness))]

    async def close(self) -> None:
        """See `Service`."""
        for watch in self._watches:
            watch.cancel()
        parts = self._servicer.parts
        if self._http is not None:
            await self._http.close()
        if parts is not None and parts.agents is not None:
            parts.agents.sessions.end_all()
        if parts is not None and self._opener is not None:
            await parts.updater.close()
            parts.pauser.resume()
            await parts.checker.close()
            await parts.sleeper.close()
            await self._opener.finish()
            await parts.pool.close()
            await parts.policy.engine.close()

    async def _serve_agents(
        self, policy: Policy, encoder: ChatEncoder, slots: EpisodeSlots, hashes: Hashes, *, keep_prefixes: bool
    ) -> AgentDesk | None:
        """Serves agents, if the configuration says where."""
        if self._http is None:
            return None
        rollout = self._config.rollout
        sessions = PolicySessions(
            slots, hashes, rollout.episode_timeout_s, keep_prefixes=keep_prefixes, release=policy.engine.release
        )
        return await serve_agents(self._http, rollout.http, policy, encoder, sessions)

    async def _drain(self, readiness: Readiness) -> None:
        """Lets agents begin no call once the server shuts down."""
        await readiness.draining.wait()
        if self._http is not None:
            self._http.drain()


async def _end_with(engine: Engine, readiness: Readiness) -> None:
    """Ends the server when its engine has failed."""
    await readiness.fail(await engine.failed())


def _templates(config: RunConfig) -> PromptTemplates:
    system, turn = config.rollout.system_prompt, config.rollout.turn_template
    try:
        return PromptTemplates(
            system=SYSTEM_TEMPLATE if system is None else system, turn=TURN_TEMPLATE if turn is None else turn
        )
    except ValueError as error:
        raise ServeError(f"rollout.turn_template: {error}") from error


def _end_token_ids(tokenizer: Any, encoder: ChatEncoder) -> frozenset[int]:
    """Returns the tokenizer's own end token, and the one that ends an assistant message in its chat template."""
    return frozenset(token for token in (tokenizer.eos_token_id, encoder.end_of_turn_id) if isinstance(token, int))


def _step_timeout_s(config: RunConfig) -> float:
    """Returns the longest time that any configured environment may take for a step, and a margin."""
    configured = [definition.step_timeout_s for definition in config.environment.definitions.values()]
    return max([deadline_s("/rollwire.v1.EnvironmentService/Step"), *configured]) + _STEP_MARGIN_S
