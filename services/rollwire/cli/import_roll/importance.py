"""`train_infer_correction`: importance weight and masks between engine and learner."""

from __future__ import annotations

from typing import Any, Final

from rollwire.cli.import_roll.account import Fate, Path
from rollwire.cli.import_roll.conversion import Conversion

_LEVELS: Final = {"token": "token", "sequence": "sequence", "geometric": "sequence_mean", "segment": "segment_mean"}
_SECTION: Final = "train_infer_correction"
_WEIGHT: Final = f"{_SECTION}.is_weight"
_UNBOUNDED: Final = 1e6


def map_importance(conversion: Conversion) -> bool:
    """Maps weight and masks.

    Returns:
        Whether any of them is in use.
    """
    weighted = _weight(conversion)
    masks = []
    filters: Path = (_SECTION, "filters")
    for index in conversion.tree.children(filters):
        mask = _mask(conversion, (*filters, index))
        if mask is not None:
            masks.append(mask)
    if masks:
        conversion.settings.put(("algorithm", "importance_masks"), masks, [".".join(filters)])
    elif not conversion.tree.children(filters):
        conversion.used(filters)
    return weighted or bool(masks)


def _weight(conversion: Conversion) -> bool:
    key = f"{_WEIGHT}.enabled"
    if not conversion.flag(key):
        conversion.used(key)
        conversion.rest(_WEIGHT, Fate.IGNORED, "is_weight is not enabled")
        return False
    level = _LEVELS[conversion.choice(f"{_WEIGHT}.weight_type", tuple(_LEVELS))]
    conversion.put("algorithm.importance_weight.level", level, f"{_WEIGHT}.weight_type", key)
    bound = f"{_WEIGHT}.upper_bound"
    leaf = conversion.tree.leaves.get(tuple(bound.split(".")))
    if leaf is not None and leaf.value is None:
        change = f"there is always a bound; {_UNBOUNDED:g} comes to none"
        conversion.put("algorithm.importance_weight.upper_bound", _UNBOUNDED, bound, change=change)
    else:
        conversion.put("algorithm.importance_weight.upper_bound", conversion.number(bound), bound)
    if conversion.flag(f"{_WEIGHT}.detach", default=True):
        conversion.used(f"{_WEIGHT}.detach")
    else:
        conversion.mark(f"{_WEIGHT}.detach", Fate.UNSUPPORTED, "the weight never has a gradient")
    return True


def _mask(conversion: Conversion, path: Path) -> dict[str, Any] | None:
    """Maps one filter; returns None if it is not enabled or cannot be had."""
    enabled, level = (*path, "enabled"), (*path, "agg_type")
    if not conversion.flag(enabled):
        conversion.used(enabled)
        conversion.rest(path, Fate.IGNORED, "this filter is not enabled")
        return None
    differences = [(*path, f"diff_{name}") for name in ("enabled", "low", "high")]
    uses_difference = conversion.flag(differences[0])
    for key in differences:
        if uses_difference:
            conversion.mark(key, Fate.UNSUPPORTED, "differences of probabilities are not masked, only ratios")
        elif key is differences[0]:
            conversion.used(key)
        else:
            conversion.mark(key, Fate.IGNORED, "diff_enabled is not set")
    ratios = [(*path, f"ratio_{name}") for name in ("enabled", "low", "high")]
    if not conversion.flag(ratios[0], default=True):
        conversion.used(enabled, ratios[0])
        conversion.rest(path, Fate.IGNORED, "ratio_enabled is false")
        return None
    kind = conversion.value(level) or "token"
    if kind not in _LEVELS:
        raise conversion.refused(level, ", ".join(_LEVELS))
    low, high = (
        conversion.number(key) if conversion.value(key) is not None else bound
        for key, bound in zip(ratios[1:], (0.8, 1.2), strict=True)
    )
    for target, keys in (("level", [level, enabled]), ("min_ratio", [ratios[1]]), ("max_ratio", [ratios[2]])):
        conversion.link(f"algorithm.importance_masks[].{target}", *keys)
    conversion.used(ratios[0])
    return {"level": _LEVELS[kind], "min_ratio": low, "max_ratio": high}
