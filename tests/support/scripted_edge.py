"""The HTTP edge on a loopback port in front of an engine that says what a test wants, token by token."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import openai

from rollwire.coordinator.intake import check_trajectory
from rollwire.rollout.agents.answering import Answering
from rollwire.rollout.agents.edge import Edge
from rollwire.rollout.agents.http_server import HttpServer
from rollwire.rollout.agents.plans import SessionPlan
from rollwire.rollout.agents.registry import PolicySessions
from rollwire.rollout.chat import ChatEncoder
from rollwire.rollout.engine import Engine, EngineDescription, GenerationRequest, Piece, Sampling
from rollwire.rollout.episode import Hashes
from rollwire.rollout.groups import EpisodeSlots
from rollwire.rollout.policy import Policy
from rollwire.serving.config.sections import HttpSection, ModelSection
from rollwire.serving.model_files import load_tokenizer
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

FENCE = trajectory_pb2.Fence(run_id="run", epoch=1)
# ChatML with functions as Qwen and Hermes show them: descriptions in the system message, results as user messages.
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ScriptedEngine:
    """Draws the tokens of `says`; with `permits` set, each token waits for a permit.

    Attributes:
        requests: What was asked, in order.
        aborted: Generations whose caller went away.
        released: Cache keys that were released.
        failure: Raised at the start of a generation.
    """

    def __init__(self, vocabulary_size: int, max_sequence_tokens: int) -> None:
        self.description = EngineDescription(
            "scripted", "Script", "cpu", weights_pb2.DATA_TYPE_FLOAT32, vocabulary_size, max_sequence_tokens, 8
        )
        self.says: Callable[[GenerationRequest], list[int]] = lambda request: [0]
        self.step = 0
        self.permits: asyncio.Semaphore | None = None
        self.requests: list[GenerationRequest] = []
        self.aborted = 0
        self.released: list[str] = []
        self.failure: Exception | None = None
        self.waiting = asyncio.Event()
        self._abort = asyncio.Event()
        self._running = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Piece, None]:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        abort, tokens, reported, drawn = self._abort, self.says(request), 0, list[int]()
        self._running += 1
        ended = False
        try:
            while not ended:
                if await self._interrupted(abort):
                    reason = trajectory_pb2.STOP_REASON_ABORTED
                else:
                    drawn.append(tokens[len(drawn)])
                    reason = self._reason(request, drawn, tokens)
                ended = reason != trajectory_pb2.STOP_REASON_UNSPECIFIED
                if ended or request.stream:
                    new = drawn[reported:]
                    reported = len(drawn)
                    version = weights_pb2.WeightVersion(lineage="main", step=self.step)
                    yield Piece(new, [-0.5] * len(new), version, reason)
        finally:
            self._running -= 1
            self.aborted += not ended

    async def _interrupted(self, abort: asyncio.Event) -> bool:
        if self.permits is None:
            await asyncio.sleep(0)
            return abort.is_set()
        self.waiting.set()
        permit, aborted = asyncio.create_task(self.permits.acquire()), asyncio.create_task(abort.wait())
        try:
            await asyncio.wait((permit, aborted), return_when=asyncio.FIRST_COMPLETED)
            return abort.is_set()
        finally:
            permit.cancel()
            aborted.cancel()

    def _reason(self, request: GenerationRequest, drawn: list[int], tokens: list[int]) -> Any:
        if drawn[-1] in request.sampling.stop_token_ids:
            return trajectory_pb2.STOP_REASON_STOP_TOKEN
        if len(request.token_ids) + len(drawn) >= request.length_limit_tokens:
            return trajectory_pb2.STOP_REASON_LENGTH_LIMIT
        if len(drawn) >= request.sampling.max_tokens or len(drawn) == len(tokens):
            return trajectory_pb2.STOP_REASON_MAX_TOKENS
        return trajectory_pb2.STOP_REASON_UNSPECIFIED

    async def abort_all(self) -> None:
        self._abort.set()
        self._abort = asyncio.Event()
        while self._running:
            await asyncio.sleep(0)

    def release(self, cache_key: str) -> None:
        self.released.append(cache_key)


@dataclass
class EdgeBench:
    """An edge, its sessions, and OpenAI's clients for them."""

    engine: ScriptedEngine
    policy: Policy
    tokenizer: Any
    sessions: PolicySessions
    http: HttpServer
    slots: EpisodeSlots
    stack: AsyncExitStack
    end_token: int
    plans: dict[str, SessionPlan] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text without special tokens around it."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def says(self, *texts: str) -> None:
        """Lets the engine say one text after the other; it ends where a text ends, or with the end token in it."""
        left = [self.encode(text) for text in texts]
        self.engine.says = lambda request: left.pop(0)

    async def open(self, session_id: str = "s1", **changes: Any) -> openai.AsyncOpenAI:
        """Opens a session and returns the client for it."""
        sampling = Sampling(1.0, 1.0, 0, 256, frozenset({self.end_token}), trajectory_pb2.LOGPROB_MODE_SAMPLED)
        key = f"key-{session_id}"
        plan = SessionPlan(
            run_id="run",
            session_id=session_id,
            key_digest=hashlib.sha256(key.encode()).digest(),
            sampling=sampling,
            sampling_seed=5,
            max_sequence_tokens=self.engine.description.max_sequence_tokens,
            max_calls=20,
            lease_s=60.0,
            group_id="g1",
            episode_index=2,
            attempt=1,
            environment_tag="Agent",
            environment_seed=11,
        )
        self.sessions.open(replace(plan, **changes), lambda: None)
        client = openai.AsyncOpenAI(base_url=self.http.base_url, api_key=key, max_retries=0, timeout=30)
        return await self.stack.enter_async_context(client)

    def close(self, session_id: str = "s1", **changes: Any) -> rollout_pb2.ClosePolicySessionResponse:
        """Closes a session; its record passes the coordinator's checks."""
        request = rollout_pb2.ClosePolicySessionRequest(fence=FENCE, session_id=session_id, **changes)
        answer = self.sessions.close(request)
        if answer.HasField("trajectory"):
            check_trajectory(answer.trajectory, "g1", 1, [2])
        return answer

    def text(self, token_ids: Any) -> str:
        """Returns tokens as text."""
        return str(self.tokenizer.decode(list(token_ids)))


@asynccontextmanager
async def scripted_edge(
    *, template: str = TOOLS_TEMPLATE, max_sequence_tokens: int = 1024, limit_s: float = 60.0, **section: Any
) -> AsyncIterator[EdgeBench]:
    """Serves an edge."""
    tokenizer = load_tokenizer(ModelSection(path="builtin:tiny"))
    tokenizer.chat_template = template
    engine = ScriptedEngine(len(tokenizer), max_sequence_tokens)
    policy = Policy(cast(Engine, engine))
    activate(policy, 0)
    slots = EpisodeSlots(4)
    sessions = PolicySessions(slots, Hashes("a" * 64, "b" * 64), limit_s, keep_prefixes=True, release=engine.release)
    settings = HttpSection(address="127.0.0.1:0", **section)
    http = HttpServer(settings)
    encoder = ChatEncoder(tokenizer)
    edge = Edge(
        Answering(policy, encoder, sessions), sessions, settings.max_concurrent_calls, settings.max_request_mib << 20
    )
    await http.start(edge)
    async with AsyncExitStack() as stack:
        try:
            yield EdgeBench(engine, policy, tokenizer, sessions, http, slots, stack, tokenizer.eos_token_id)
        finally:
            await stack.aclose()
            await http.close()
            sessions.end_all()


def activate(policy: Policy, step: int) -> None:
    """Makes a version active, as an update would."""
    version = weights_pb2.WeightVersion(lineage="main", step=step)
    states = policy.states
    states.begin(version)
    states.verified(version)
    states.prepared(version)
    states.drained(version)
    states.loaded(version, b"d" * 32, b"d" * 32)
    cast(Any, policy.engine).step = step
