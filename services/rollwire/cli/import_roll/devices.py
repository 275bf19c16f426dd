"""Reads `device_mapping`, which ROLL hands to `eval`: device numbers, written as Python. Nothing is run here."""

from __future__ import annotations

import ast
from typing import Any, Final

MAX_DEVICES: Final = 65_536


def device_list(text: Any) -> list[int]:
    """Returns the devices of a mapping such as `list(range(0,8))`, `[0, 1]` or a sum of such lists.

    Args:
        text: The setting; a list is taken as it is.

    Raises:
        ValueError: It is anything else, or names more than `MAX_DEVICES` devices.
    """
    if isinstance(text, list):
        text = repr(text)
    try:
        devices = _evaluate(ast.parse(str(text).strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("no list of devices") from error
    if len(devices) > MAX_DEVICES:
        raise ValueError(f"more than {MAX_DEVICES} devices")
    return list(devices)


def _evaluate(node: ast.expr) -> list[int] | range:
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_number(item) for item in items]
        case ast.Call(func=ast.Name(id="list"), args=[inner], keywords=[]):
            return _evaluate(inner)
        case ast.Call(func=ast.Name(id="range"), args=bounds, keywords=[]) if 1 <= len(bounds) <= 3:
            return _bounded(range(*(_number(bound) for bound in bounds)))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [*_evaluate(left), *_evaluate(right)]
    raise ValueError("no list of devices")


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= MAX_DEVICES:
        return node.value
    raise ValueError("no list of devices")


def _bounded(devices: range) -> range:
    if len(devices) > MAX_DEVICES:
        raise ValueError(f"more than {MAX_DEVICES} devices")
    return devices
