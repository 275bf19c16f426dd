"""What an agent asks for: a chat completion or a text completion. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from rollwire.rollout.agents.errors import CallError, bad_request
from rollwire.rollout.agents.messages import read_messages, read_tools
from rollwire.rollout.agents.parameters import Options, Parameters, read_options
from rollwire.rollout.chat import Message
from rollwire.rollout.engine import Sampling

_NO_ALTERNATIVES: Final = "the engine reports the sampled tokens alone"


@dataclass(frozen=True)
class ChatRequest:
    """A chat completion.

    Attributes:
        options: How it is answered.
        messages: The conversation, at least one message.
        tools: Functions that the policy is told about.
        parse_tools: Look for function calls in the answer.
    """

    options: Options
    messages: list[Message]
    tools: list[dict[str, Any]]
    parse_tools: bool


@dataclass(frozen=True)
class CompletionRequest:
    """A text completion.

    Attributes:
        options: How it is answered.
        prompt: A text, or token ids.
    """

    options: Options
    prompt: str | list[int]


def read_chat(body: bytes, session: Sampling, *, renders_tools: bool) -> ChatRequest:
    """Reads a chat completion. Raises `CallError`.

    Args:
        body: The request.
        session: The session's settings.
        renders_tools: Whether the chat template shows functions to the policy.
    """
    parameters = Parameters(body)
    logprobs = parameters.flag("logprobs")
    parameters.only("top_logprobs", 0, why=_NO_ALTERNATIVES)
    options = read_options(parameters, session, logprobs=logprobs, limits=("max_tokens", "max_completion_tokens"))
    messages = read_messages(parameters.take("messages"))
    tools = read_tools(parameters.take("tools"))
    if tools and not renders_tools:
        raise CallError(
            400,
            "tools_not_rendered",
            "tools were given, but the chat template of this model does not show them to the policy; describe them in "
            "a message, or set model.chat_template of the run to a template that renders tools",
            param="tools",
        )
    choice = parameters.take("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise bad_request("tool_choice", choice, '"auto" or "none": sampling cannot be forced', "unsupported_value")
    parameters.only("parallel_tool_calls", True, why="sampling cannot be forced")
    parameters.only("response_format", {"type": "text"}, why="sampling cannot be forced")
    parameters.only("modalities", ["text"])
    parameters.finish()
    return ChatRequest(options, messages, tools, parse_tools=bool(tools) and choice == "auto")


def read_completion(body: bytes, session: Sampling, vocabulary_size: int) -> CompletionRequest:
    """Reads a text completion. Raises `CallError`.

    Args:
        body: The request.
        session: The session's settings.
        vocabulary_size: Valid token ids are 0 to this minus 1.
    """
    parameters = Parameters(body)
    asked = parameters.integer("logprobs", 0, 1)
    options = read_options(parameters, session, logprobs=asked is not None)
    prompt = _prompt(parameters.take("prompt"), vocabulary_size)
    parameters.only("echo", False)
    parameters.only("best_of", 1)
    parameters.only("suffix", "")
    parameters.finish()
    return CompletionRequest(options, prompt)


def _prompt(value: Any, vocabulary_size: int) -> str | list[int]:
    allowed = f"one text, or one list of token ids from 0 to {vocabulary_size - 1}; not empty"
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise bad_request("prompt", value, allowed)
    for position, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary_size:
            raise bad_request(f"prompt[{position}]", token, allowed)
    return value
