"""Low-rank adapters, which ROLL trains where `lora_target` is set."""

from __future__ import annotations

from typing import Final

from rollwire.cli.import_roll.account import Fate
from rollwire.cli.import_roll.conversion import Conversion

_SECTION: Final = "actor_train.model_args"
_NAMES: Final = ("lora_rank", "lora_alpha", "lora_dropout")
_EVERYTHING: Final = ("all", "all-linear")


def map_lora(conversion: Conversion) -> None:
    """Maps rank, scale and target modules."""
    target, rank, alpha, dropout = (f"{_SECTION}.{name}" for name in ("lora_target", *_NAMES))
    modules = conversion.value(target)
    if modules is None:
        conversion.used(target)
        for key in (rank, alpha, dropout):
            conversion.rest(key, Fate.IGNORED, "without lora_target all parameters are trained")
        return
    size = conversion.integer(rank, 1)
    conversion.put("learner.lora.rank", size, rank)
    scale = conversion.number(alpha) if conversion.value(alpha) else 2.0 * size
    conversion.put("learner.lora.alpha", scale, alpha)
    names = [part.strip() for part in modules.split(",")] if isinstance(modules, str) else modules
    if isinstance(names, list) and all(isinstance(name, str) and name.isidentifier() for name in names):
        conversion.put("learner.lora.target_modules", names if set(names).isdisjoint(_EVERYTHING) else "auto", target)
    else:
        change = "" if modules in _EVERYTHING else "names modules, not patterns: every linear module of the layers"
        conversion.put("learner.lora.target_modules", "auto", target, change=change)
    if conversion.value(dropout):
        conversion.mark(dropout, Fate.UNSUPPORTED, "adapters are trained without dropout")
    conversion.used(dropout)
