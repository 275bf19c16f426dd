"""Prompts and the way in which an episode becomes tokens."""

from __future__ import annotations

import string
from typing import Final

from rollwire.cli.import_roll.account import Fate
from rollwire.cli.import_roll.conversion import Conversion
from rollwire.cli.import_roll.environments import PlayedTags
from rollwire.rollout.prompts import SYSTEM_TEMPLATE, TURN_FIELDS, TURN_TEMPLATE

_TRAJECTORY_MANAGER: Final = "TrajEnvManager"
_STEP_MANAGERS: Final = ("StepEnvManager", "StepConcatEnvManager")


def map_prompts(conversion: Conversion, tags: PlayedTags) -> None:
    """Maps prompt templates and environment managers of the tags that are played.

    Rollwire has one pair of templates for all tags: those of the first tag win.
    """
    _template(conversion, tags, "agent_system_template", "rollout.system_prompt", SYSTEM_TEMPLATE)
    _template(conversion, tags, "agent_template", "rollout.turn_template", TURN_TEMPLATE)
    for tag in tags.all:
        _manager(conversion, ("custom_envs", tag, "env_manager_cls"))


def _template(conversion: Conversion, tags: PlayedTags, name: str, target: str, default: str) -> None:
    first: str | None = None
    for tag in tags.all:
        key = ("custom_envs", tag, name)
        text = conversion.text(key)
        if text is None or text == default:
            conversion.used(key)
            text = default
        elif name == "agent_template" and (unknown := _unknown_fields(text)):
            why = (
                f"has the fields {', '.join(sorted(unknown))}, but a turn of Rollwire has only "
                f"{', '.join(sorted(TURN_FIELDS))}; the default template is used"
            )
            conversion.mark(key, Fate.UNSUPPORTED, why)
            text = default
        elif first is None:
            conversion.put(target, text, key)
        if first is None:
            first = text
        elif text != first:
            conversion.mark(key, Fate.CHANGED, f"one template for all tags, that of {tags.all[0]}")


def _unknown_fields(template: str) -> set[str]:
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError:
        return {"?"}
    return fields - TURN_FIELDS


def _manager(conversion: Conversion, key: tuple[str, ...]) -> None:
    name = (conversion.text(key) or _TRAJECTORY_MANAGER).rpartition(".")[2]
    if name == _TRAJECTORY_MANAGER:
        conversion.used(key)
    elif name in _STEP_MANAGERS:
        why = "the policy sees the whole conversation, not the last turns; an episode is one sample, not one a turn"
        conversion.mark(key, Fate.CHANGED, why)
    else:
        conversion.mark(
            key, Fate.UNSUPPORTED, f"{name} has no counterpart; episodes are played as {_TRAJECTORY_MANAGER} does"
        )
