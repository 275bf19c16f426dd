"""Answers one call from its body to its record: reads, prompts, draws, records, replies."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from rollwire.rollout.agents.answer import Answer, Delta
from rollwire.rollout.agents.bodies import Bodies, ChatBodies, CompletionBodies, Head, fingerprint, usage
from rollwire.rollout.agents.call_requests import read_chat, read_completion
from rollwire.rollout.agents.calls import Call, Prompt
from rollwire.rollout.agents.drawing import Drawer
from rollwire.rollout.agents.messages import assistant_message, message_line
from rollwire.rollout.agents.parameters import Options
from rollwire.rollout.agents.prompting import Prompter
from rollwire.rollout.agents.registry import PolicySessions
from rollwire.rollout.agents.reply import Reply
from rollwire.rollout.agents.session import PolicySession
from rollwire.rollout.chat import ChatEncoder
from rollwire.rollout.policy import Policy


@dataclass(frozen=True)
class _Asked:
    """A call that was read.

    Attributes:
        prefix: Beginning of its identifier.
        options: How it is answered.
        prompt: What it begins with.
        bodies: Writes the reply.
        parse_tools: Look for function calls.
    """

    prefix: str
    options: Options
    prompt: Prompt
    bodies: Bodies
    parse_tools: bool = False


class Answering:
    """Answers calls.

    Args:
        policy: Who answers.
        encoder: Tokenises.
        sessions: All sessions.
    """

    def __init__(self, policy: Policy, encoder: ChatEncoder, sessions: PolicySessions) -> None:
        self._policy = policy
        self._encoder = encoder
        self._sessions = sessions
        self._prompter = Prompter(encoder)
        self._drawer = Drawer(policy, encoder)

    async def chat(self, session: PolicySession, body: bytes, reply: Reply) -> None:
        """Answers a chat completion. Raises `CallError`; cancelling aborts."""
        asked = read_chat(body, session.plan.sampling, renders_tools=self._encoder.renders_tools)
        prompt = self._prompter.chat(session.book, asked, session.plan)
        bodies = ChatBodies(self._encoder.decoded if asked.options.logprobs else None)
        await self._answer(session, _Asked("chatcmpl", asked.options, prompt, bodies, asked.parse_tools), reply)

    async def completion(self, session: PolicySession, body: bytes, reply: Reply) -> None:
        """Answers a text completion. Raises `CallError`; cancelling aborts."""
        vocabulary = self._policy.engine.description.vocabulary_size
        asked = read_completion(body, session.plan.sampling, vocabulary)
        prompt = self._prompter.completion(session.book, asked.prompt, session.plan)
        bodies = CompletionBodies(self._encoder.decoded if asked.options.logprobs else None)
        await self._answer(session, _Asked("cmpl", asked.options, prompt, bodies), reply)

    async def _answer(self, session: PolicySession, asked: _Asked, reply: Reply) -> None:
        loop = asyncio.get_running_loop()
        call = session.begin(asked.prompt, asked.prefix, asked.options.sampling.max_tokens, loop.time())
        self._sessions.renew(session)
        head = Head(call.call_id, int(time.time()))
        try:
            answer = await self._drawn(session, call, asked, head, reply)
            said = assistant_message(answer.content, [tool_call.as_json() for tool_call in answer.tool_calls])
            line = message_line(said)
            session.complete(call, asked.prompt, answer.pieces, line, answer.raw.encode(), loop.time())
        finally:
            session.abandon(call, loop.time())
            self._sessions.renew(session)
            if session.ended.is_set() and call.cache_key:
                self._policy.engine.release(call.cache_key)
        counted = usage(asked.prompt.length, answer)
        if not asked.options.stream:
            choice = asked.bodies.whole(answer)
            more = {"usage": counted, "system_fingerprint": fingerprint(answer)}
            await reply.whole(head.body(asked.bodies.kind, [choice], **more))
            return
        for choice in asked.bodies.last(answer):
            await reply.event(self._chunk(head, asked, [choice]))
        if asked.options.include_usage:
            await reply.event({**self._chunk(head, asked, []), "usage": counted})
        await reply.end()

    async def _drawn(self, session: PolicySession, call: Call, asked: _Asked, head: Head, reply: Reply) -> Answer:
        """Draws the answer, and sends it piece by piece if the agent wants that."""
        begun = False

        async def emit(delta: Delta) -> bool:
            nonlocal begun
            if not delta.text and not (asked.options.logprobs and delta.token_ids):
                return False
            first = None if begun else asked.bodies.first()
            begun = True
            for choice in (first, asked.bodies.delta(delta)):
                if choice is not None:
                    await reply.event(self._chunk(head, asked, [choice]))
            return True

        return await self._drawer.draw(
            session,
            call,
            asked.options,
            parse_tools=asked.parse_tools,
            emit=emit if asked.options.stream else None,
        )

    def _chunk(self, head: Head, asked: _Asked, choices: list[dict[str, Any]]) -> dict[str, Any]:
        more = {"usage": None} if asked.options.include_usage else {}
        return head.body(asked.bodies.chunk_kind, choices, **more)
