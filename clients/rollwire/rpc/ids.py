"""Identifiers: what they look like and how new ones are made."""

from __future__ import annotations

import re
import secrets
from typing import Final

NAME_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
"""Runs, groups, lineages and export names: safe as a file name; `..` is refused as well."""

NAME_RULE: Final = (
    "1 to 63 lower-case letters, digits, '_', '.' and '-', first a letter or digit, without '..' "
    f"({NAME_PATTERN.pattern})"
)
"""The same, in words for errors."""

TAG_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
"""Environment tags; `..` is refused as well."""

TAG_RULE: Final = (
    f"1 to 63 letters, digits, '_', '.' and '-', first a letter or digit, without '..' ({TAG_PATTERN.pattern})"
)
"""The same, in words for errors."""

METRIC_PATTERN: Final = re.compile(r"[A-Za-z0-9_./-]{1,128}")
"""Metric names."""

REQUEST_ID_PATTERN: Final = re.compile(r"[!-~]{1,64}")
"""Idempotency keys."""


def is_name(text: str) -> bool:
    """Tells whether `text` is a valid identifier of a run, group, lineage or export."""
    return NAME_PATTERN.fullmatch(text) is not None and ".." not in text


def is_tag(text: str) -> bool:
    """Tells whether `text` is a valid environment tag."""
    return TAG_PATTERN.fullmatch(text) is not None and ".." not in text


def new_id(prefix: str) -> str:
    """Returns a new random identifier, `prefix-` and 16 hexadecimal digits."""
    return f"{prefix}-{secrets.token_hex(8)}"


def new_secret() -> str:
    """Returns 32 random hexadecimal digits, for identifiers that are bearer secrets."""
    return secrets.token_hex(16)
