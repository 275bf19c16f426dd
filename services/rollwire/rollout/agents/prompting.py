"""From a request to token ids: what extends an earlier call keeps its tokens, and only what is new is tokenised."""

from __future__ import annotations

import hashlib
from typing import Final

from rollwire.rollout.agents.call_requests import ChatRequest
from rollwire.rollout.agents.calls import CallBook, Prompt
from rollwire.rollout.agents.errors import CallError, too_long
from rollwire.rollout.agents.messages import header_line, message_line
from rollwire.rollout.agents.plans import SessionPlan
from rollwire.rollout.chat import ChatEncoder

_MOST_SHOWN: Final = 200


class Prompter:
    """Makes prompts.

    Args:
        encoder: Tokenises.
    """

    def __init__(self, encoder: ChatEncoder) -> None:
        self._encoder = encoder

    def chat(self, book: CallBook, request: ChatRequest, plan: SessionPlan) -> Prompt:
        """Returns the prompt of a conversation. Raises `CallError`.

        A conversation that begins with that of an earlier call and its answer, exactly as it was given, keeps the
        tokens of that call. Any other is rendered from its start.
        """
        lines = [header_line(request.tools), *(message_line(message) for message in request.messages)]
        transcript = b"".join(lines)
        new = _after_last_answer(request)
        observation = hashlib.sha256(b"".join(lines[len(lines) - new :])).digest()
        found = book.by_transcript.longest(transcript)
        if found is not None:
            parent, length = found
            messages = _following(request, lines, length)
            answer = parent.response_ids
            stopped = answer[-1] in plan.sampling.stop_token_ids
            block = self._encoder.following(messages, request.tools, answer, stopped=stopped)
            if block is not None:
                return Prompt(parent, block, observation, transcript)
        self._check_size(sum(len(message["content"]) for message in request.messages), plan)
        try:
            tokens = self._encoder.opening(request.messages, request.tools)
        except Exception as error:  # templates raise what they like
            raise _refused(error) from error
        parent_call, block = book.extending(tokens)
        return Prompt(parent_call, block, observation, transcript)

    def completion(self, book: CallBook, prompt: str | list[int], plan: SessionPlan) -> Prompt:
        """Returns the prompt of a text or of token ids. Raises `CallError`.

        A text that begins with that of an earlier call and all that was drawn for it keeps the tokens of that call.
        """
        if isinstance(prompt, list):
            parent, block = book.extending(prompt)
            return Prompt(parent, block)
        self._check_size(len(prompt), plan)
        text = prompt.encode()
        found = book.by_text.longest(text)
        if found is not None:
            call, length = found
            return Prompt(call, self._encoder.block(text[length:].decode()), text=text)
        parent, block = book.extending(self._encoder.prompt(prompt))
        if parent is None and not block:
            raise CallError(400, "invalid_value", "prompt holds no token; allowed: at least one", param="prompt")
        return Prompt(parent, block, text=text)

    def _check_size(self, characters: int, plan: SessionPlan) -> None:
        """Refuses what cannot fit before it is tokenised."""
        least = characters // self._encoder.longest_token
        if least >= plan.max_sequence_tokens:
            raise too_long(least, plan.max_sequence_tokens, at_least=True)


def _after_last_answer(request: ChatRequest) -> int:
    """Returns the number of messages that follow the last answer."""
    roles = [message["role"] for message in request.messages]
    return roles[::-1].index("assistant") if "assistant" in roles else len(roles)


def _following(request: ChatRequest, lines: list[bytes], length: int) -> list[dict[str, object]]:
    """Returns the messages after the first `length` bytes of the conversation."""
    position = 0
    for index, line in enumerate(lines):
        if position == length:
            return request.messages[index - 1 :]
        position += len(line)
    return []


def _refused(error: Exception) -> CallError:
    lines = str(error).splitlines() or [type(error).__name__]
    return CallError(
        400,
        "template_error",
        f"the chat template refuses this conversation: {lines[0][:_MOST_SHOWN]}; change the roles or their order",
        param="messages",
    )
