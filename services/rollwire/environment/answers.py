"""Finds the answer in what a policy says. The text is a stranger's: the built-in patterns are read in linear time."""

from __future__ import annotations

import re
from collections.abc import Sequence

ANSWER_PATTERN = r"<answer>(.*?)</answer>"
THINK_PATTERN = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
_CLOSING_TAG = "</answer>"
# What a match of the built-in patterns starts with.
_OPENING_TAGS = {ANSWER_PATTERN: "<answer>", THINK_PATTERN: "<think>"}


def is_quick(action_pattern: str) -> bool:
    """Tells whether a pattern is read in linear time whatever a policy says; any other may take hours for 1 MiB."""
    return action_pattern in _OPENING_TAGS


class AnswerReader:
    """Reads the answer from a response: the last group of the first match of a pattern."""

    def __init__(self, action_pattern: str = ANSWER_PATTERN, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> None:
        """Compiles the pattern.

        Args:
            action_pattern: Regular expression (dot matches newline) whose last group is the answer.
            special_tokens: Texts removed from a response before it is read.

        Raises:
            ValueError: The pattern is no regular expression with a group.
        """
        try:
            self._pattern = re.compile(action_pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"action_pattern {action_pattern!r} is no regular expression: {error}") from error
        if self._pattern.groups < 1:
            raise ValueError(
                f"action_pattern {action_pattern!r} has no group; allowed: a pattern whose last group is the action"
            )
        self._opening_tag = _OPENING_TAGS.get(action_pattern)
        self._special_tokens = tuple(special_tokens)

    def read(self, response: str) -> str | None:
        """Returns the answer without space around it, or None when the pattern does not match."""
        for token in self._special_tokens:
            response = response.replace(token, "")
        match = self._first_match(response.strip())
        return None if match is None else (match.group(self._pattern.groups) or "").strip()

    def _first_match(self, response: str) -> re.Match[str] | None:
        if self._opening_tag is None:
            return self._pattern.search(response)
        # A search would try every opening tag and scan to the end from each, for a hostile text of 20 kB more than a
        # minute. If any opening tag starts a match the first one does, and no match passes the last closing tag.
        start, end = response.find(self._opening_tag), response.rfind(_CLOSING_TAG) + len(_CLOSING_TAG)
        return self._pattern.match(response, start, end) if 0 <= start < end else None
