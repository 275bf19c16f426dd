"""Function calls in the form that most open models write: JSON between `<tool_call>` and `</tool_call>`. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from rollwire.rollout.agents.strict_json import strict_loads

BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_BLOCK: Final = re.compile(re.escape(BEGIN) + r"(.*?)(?:" + re.escape(_END) + r"|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call of a function.

    Attributes:
        call_id: Identifier within the conversation.
        name: Function.
        arguments: JSON object as text.
    """

    call_id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """Returns the call as OpenAI's clients expect it."""
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def parse_tool_calls(text: str, number: int) -> list[ToolCall]:
    """Returns the calls in a text, or none at all when one of them is not well formed: then the text is an answer.

    Args:
        text: From the first `<tool_call>` on; the end of the last one may be missing.
        number: Number of the policy's call, from which identifiers derive.
    """
    found: list[ToolCall] = []
    for block in _BLOCK.findall(text):
        try:
            content = strict_loads(block)
        except ValueError:
            return []
        if not isinstance(content, dict) or not isinstance(content.get("name"), str):
            return []
        arguments = content.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = strict_loads(arguments)
            except ValueError:
                return []
        if not isinstance(arguments, dict):
            return []
        found.append(
            ToolCall(f"call_{number}_{len(found)}", content["name"], json.dumps(arguments, ensure_ascii=False))
        )
    return found
