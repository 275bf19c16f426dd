"""Messages of OpenAI's chat protocol: checked, brought into one form, written as lines that compare. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from rollwire.rollout.agents.errors import CallError, bad_request
from rollwire.rollout.agents.strict_json import strict_loads
from rollwire.rollout.chat import Message, Tools

MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 128
_ROLES: Final = ("system", "user", "assistant", "tool")
# What messages may hold besides; OpenAI's own objects, sent back as they came, have these set to null or to nothing.
_EMPTY: Final = ("refusal", "annotations", "audio", "function_call")


def read_messages(value: Any) -> list[Message]:
    """Returns messages in one form: text contents, no empty keys, arguments of functions as objects.

    Raises:
        CallError: A message is malformed, or holds something that is not text.
    """
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise bad_request("messages", value, f"a list of 1 to {MAX_MESSAGES} messages")
    return [_message(message, f"messages[{position}]") for position, message in enumerate(value)]


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Returns descriptions of functions. Raises `CallError`."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise bad_request("tools", value, f"a list of at most {MAX_TOOLS} functions")
    for position, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise bad_request(f"tools[{position}]", tool, '{"type": "function", "function": {"name": ..., ...}}')
    return value


def header_line(tools: Tools) -> bytes:
    """Returns the first line of a conversation: what the policy was told about functions."""
    return _line({"tools": list(tools)})


def message_line(message: Message) -> bytes:
    """Returns a message as one line; equal lines are equal messages."""
    content = message["content"]
    if message.get("tool_calls") and not content.strip():
        message = {**message, "content": ""}  # agents write none, "" or a line break beside a call
    return _line(message)


def assistant_message(text: str, tool_calls: Sequence[dict[str, Any]]) -> Message:
    """Returns an answer in the form that `read_messages` gives it when an agent sends it back."""
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    return _message(message, "answer")


def _message(value: Any, path: str) -> Message:
    if not isinstance(value, dict):
        raise bad_request(path, value, "an object with role and content")
    left = {name: field for name, field in value.items() if field is not None}
    role = left.pop("role", None)
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise bad_request(f"{path}.role", role, "system, developer, user, assistant or tool")
    message: Message = {"role": role, "content": _content(left.pop("content", None), f"{path}.content", role)}
    if role == "assistant" and left.get("tool_calls"):
        message["tool_calls"] = _tool_calls(left["tool_calls"], f"{path}.tool_calls")
    left.pop("tool_calls", None)
    for name in ("name", "tool_call_id"):
        if name in left:
            text = left.pop(name)
            if not isinstance(text, str):
                raise bad_request(f"{path}.{name}", text, "a text")
            message[name] = text
    for name, field in left.items():
        if name not in _EMPTY or field:
            message_text = f"{path}.{name[:100]} is not supported here; leave it out"
            raise CallError(400, "unsupported_parameter", message_text, param=f"{path}.{name[:100]}")
    return message


def _content(value: Any, path: str, role: str) -> str:
    """Returns the text of a content; several parts are joined by line breaks."""
    if isinstance(value, str):
        return value
    if value is None and role == "assistant":
        return ""
    if not isinstance(value, list) or not value:
        raise bad_request(path, value, "a text, or a list of parts of the type text")
    for position, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad_request(f"{path}[{position}]", part, '{"type": "text", "text": ...}; the policy reads text alone')
    return "\n".join(part["text"] for part in value)


def _tool_calls(value: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise bad_request(path, value, "a list of function calls")
    return [_tool_call(call, f"{path}[{position}]") for position, call in enumerate(value)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """Returns a call with its arguments as an object, as chat templates want them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(path, call, '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}')
    arguments = function.get("arguments", "{}")
    try:
        parsed = strict_loads(arguments) if isinstance(arguments, str) else None
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise bad_request(f"{path}.function.arguments", arguments, "a JSON object as text")
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": parsed},
    }


def _line(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
