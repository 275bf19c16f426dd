"""From chat messages to token ids, block by block, so that nothing the policy generated is ever tokenised again.

The first block is the chat template's rendering of the opening messages. A later block is what the template puts
between the end of an assistant message and the next generation prompt; it is found by rendering a conversation whose
assistant message is a marker and cutting there, which works for any template that repeats assistant messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Final

from rollwire.serving.logs import get_logger
from rollwire.serving.server import ServeError

_log = get_logger(__name__)
Message = dict[str, Any]
"""A message as chat templates take it: `role`, `content`, and what else the role has."""

Tools = Sequence[dict[str, Any]]
"""Descriptions of functions as chat templates take them."""

_MARKER: Final = "RollwireMarker7f3a91"
_PROBE: Final = "RollwireProbe52c8d4"
# Observations repeat within a group, so most blocks are tokenised once per group.
_CACHED_BLOCKS: Final = 4096
_LONGEST_CACHED: Final = 8192
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": _MARKER,
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}


class ChatEncoder:
    """Tokenises conversations with one tokenizer and its chat template.

    Args:
        tokenizer: A transformers tokenizer with a chat template.

    Attributes:
        extends: False if the template does not repeat assistant messages, so that later prompts cannot extend earlier
            tokens and every turn is a sequence of its own.
        end_of_turn_id: Special token with which the template ends an assistant message; None if it has none.

    Raises:
        ServeError: The template cannot render a conversation.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cached_encode = lru_cache(maxsize=_CACHED_BLOCKS)(self._encode_text)
        self._cached_continuation = lru_cache(maxsize=_CACHED_BLOCKS)(self._continuation_text)
        self._system_allowed = self._try_opening()
        probe = self._following_text([{"role": "user", "content": _PROBE}], ())
        self.extends = probe is not None and _PROBE in probe
        if not self.extends:
            _log.warning(
                "the chat template does not repeat assistant messages; every turn becomes a sequence of its own"
            )
        self.end_of_turn_id = self._first_special(probe.partition(_PROBE)[0]) if probe is not None else None

    @cached_property
    def renders_tools(self) -> bool:
        """True if the template shows the descriptions of functions to the policy."""
        try:
            return _MARKER in self._render([{"role": "user", "content": _PROBE}], [_PROBE_TOOL])
        except Exception:  # templates raise what they like
            return False

    @cached_property
    def longest_token(self) -> int:
        """Most characters of one token, in the tokenizer's own writing, which has at least as many as the text."""
        return max((len(token) for token in self._tokenizer.get_vocab()), default=1)

    def opening(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Returns the tokens of a conversation from its start up to the generation prompt; raises as templates do."""
        return list(self._encode(self._render(messages, tools)))

    def following(
        self, messages: Sequence[Message], tools: Tools, response_ids: Sequence[int], *, stopped: bool
    ) -> list[int] | None:
        """Returns the tokens between a response and the next one, whatever messages lie between; see `continuation`.

        Returns:
            None if the template does not show these messages after an assistant message that it repeats.
        """
        text = self._following_text(messages, tools) if self.extends else None
        return None if text is None else self._after_response(text, response_ids, stopped=stopped)

    def prompt(self, text: str) -> list[int]:
        """Returns the tokens of a bare text, with the special tokens that the tokenizer puts before one."""
        return list(self._tokenizer(text)["input_ids"])

    def block(self, text: str) -> list[int]:
        """Returns the tokens of a text that follows others."""
        return list(self._encode(text))

    def decoded(self, token_ids: Sequence[int]) -> str:
        """Returns tokens as text, special ones included."""
        return self._decode(token_ids)

    def continuation(self, message: Message, response_ids: Sequence[int], *, stopped: bool) -> list[int]:
        """Returns the tokens between a response and the next one: the end of the turn, the user message, the prompt.

        Args:
            message: The user's message.
            response_ids: What the policy generated last.
            stopped: True if the last of these ended the response. If it is the end token that the template would write,
                it is not repeated; a response that was cut gets the template's end, so that the conversation stays
                well formed.

        Raises:
            ValueError: The encoder does not extend.
        """
        text = self._cached_continuation(message["content"])
        if text is None or not self.extends:
            raise ValueError("this chat template does not extend conversations")
        return self._after_response(text, response_ids, stopped=stopped)

    def _after_response(self, text: str, response_ids: Sequence[int], *, stopped: bool) -> list[int]:
        """Returns the tokens of what the template writes after an assistant message, less the end that was drawn."""
        if stopped and response_ids:
            end = self._decode([response_ids[-1]])
            blank = len(text) - len(text.lstrip())
            if end and text.startswith(end, blank):
                text = text[blank + len(end) :]
        return list(self._encode(text))

    def text(self, response_ids: Sequence[int], *, stopped: bool) -> str:
        """Returns what the policy said, without the token that ended it; other special tokens stay visible."""
        return self._decode(response_ids[:-1] if stopped else response_ids)

    def _try_opening(self) -> bool:
        """Finds out whether the template accepts a system message."""
        user = {"role": "user", "content": _PROBE}
        for system_allowed in (True, False):
            self._system_allowed = system_allowed
            try:
                rendered = self._render([{"role": "system", "content": _MARKER}, user])
            except Exception as error:  # templates raise what they like
                failure = error
                continue
            if _PROBE in rendered and _MARKER in rendered:
                return system_allowed
            failure = ValueError("the messages are missing from what it renders")
        lines = str(failure).splitlines()
        raise ServeError(
            f"the chat template cannot render a conversation ({lines[0][:200] if lines else type(failure).__name__}); "
            "set model.chat_template=FILE to a template for user and assistant messages"
        ) from failure

    def _continuation_text(self, content: str) -> str | None:
        return self._following_text([{"role": "user", "content": content}], ())

    def _following_text(self, messages: Sequence[Message], tools: Tools) -> str | None:
        """Returns what the template writes after an assistant message; None if it hides that."""
        before = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _MARKER}]
        try:
            rendered = self._render([*before, *messages], tools)
        except Exception:  # templates raise what they like
            return None
        _, marker, rest = rendered.partition(_MARKER)
        return rest if marker else None

    def _render(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        if not self._system_allowed and messages[0]["role"] == "system" and len(messages) > 1:
            first = {"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
            messages = [first, *messages[2:]]
        rendered: str = self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return rendered

    def _encode(self, text: str) -> tuple[int, ...]:
        return self._cached_encode(text) if len(text) <= _LONGEST_CACHED else self._encode_text(text)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        if getattr(self._tokenizer, "is_fast", False):
            # The same tokens as a call of the tokenizer, at a fraction of the time.
            return tuple(self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _first_special(self, text: str) -> int | None:
        added = self._tokenizer.added_tokens_decoder
        return next((token for token in self._encode_text(text) if token in added and added[token].special), None)
