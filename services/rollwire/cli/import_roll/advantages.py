"""Advantage estimator: from ROLL's estimator together with its reward normalisation, which decides as much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rollwire.cli.import_roll.account import Fate
from rollwire.cli.import_roll.conversion import Conversion

Scope = Literal["group", "batch"] | None

_ESTIMATORS: Final = ("gae", "reinforce", "grpo", "gigpo", "step_reinforce", "agentic_reinforce")
_NORMALISED: Final = ("reinforce", "grpo", "agentic_reinforce")
_METHODS: Final[dict[str, tuple[bool, bool]]] = {
    "identity": (False, False),
    "mean": (True, False),
    "mean_std": (True, True),
    "asym_clip": (True, True),
}
_SECTION: Final = "reward_normalization"
_KEYS: Final = tuple(f"{_SECTION}.{name}" for name in ("grouping", "method", "norm_mean_type", "norm_std_type"))


@dataclass(frozen=True)
class Normalisation:
    """What ROLL subtracts from scores and what it divides them by.

    Attributes:
        mean: Over what the mean is taken; None if none is subtracted.
        std: Over what the standard deviation is taken; None if scores are not divided.
        stated: Whether the file says anything about it.
    """

    mean: Scope
    std: Scope
    stated: bool


def map_advantages(conversion: Conversion) -> None:
    """Maps estimator, normalisation, discounts, whitening and clips."""
    name = conversion.choice("adv_estimator", _ESTIMATORS)
    whiten = conversion.flag("whiten_advantages")
    if name in _NORMALISED:
        whiten = _map_normalised(conversion, name, whiten)
    else:
        conversion.put("algorithm.advantage", name, "adv_estimator")
        _other_normalisation(conversion, name)
    _discounts(conversion, name)
    conversion.put("algorithm.whiten_advantages", whiten, "whiten_advantages")
    conversion.put("algorithm.filter_zero_variance", False, note="ROLL trains every group")
    if conversion.value("advantage_clip") is not None:
        conversion.put("algorithm.advantage_clip", conversion.number("advantage_clip"), "advantage_clip")
    conversion.used("advantage_clip")
    if conversion.value("reward_clip") is not None:
        why = "the reward of every turn is clipped before anything else; ROLL clips the normalised score of an episode"
        conversion.put("algorithm.reward_clip", conversion.number("reward_clip"), "reward_clip", change=why)
    conversion.used("reward_clip")


def normalisation(conversion: Conversion) -> Normalisation:
    """Returns what ROLL makes of `reward_normalization`; the older `method` counts where the newer keys say nothing.

    Raises:
        ConfigError: A value that ROLL does not know.
    """
    grouping = conversion.text(_KEYS[0]) or "batch"
    method = conversion.choice(_KEYS[1], tuple(_METHODS))
    scope: Scope = "group" if grouping == "traj_group_id" else "batch"
    found: list[Scope] = []
    for key, by_method in zip(_KEYS[2:], _METHODS[method], strict=True):
        stated = conversion.value(key)
        if stated is None:
            found.append(scope if by_method else None)
        else:
            conversion.choice(key, ("batch", "group"))
            found.append(scope if stated == "group" else "batch")
    return Normalisation(found[0], found[1], conversion.has(_SECTION))


def estimator_for(scores: Normalisation, episodes_per_group: int) -> tuple[str, bool, str]:
    """Returns Rollwire's estimator for a normalisation of scores, whether it needs whitening, and what is different."""
    if episodes_per_group < 2 and scores.mean == "group":
        return "reinforce", False, "groups of one episode have nothing to compare: scores stay as they are"
    match (scores.mean, scores.std):
        case ("group", "group"):
            return "grpo", False, ""
        case ("group", None):
            return "dr_grpo", False, ""
        case (None, None):
            return "reinforce", False, ""
        case ("group", "batch"):
            return (
                "dr_grpo",
                True,
                "the deviation over the batch is that of whitening, which weighs episodes by their tokens",
            )
    why = "scores are normalised over the batch by whitening, which weighs episodes by their tokens"
    return "reinforce", True, why


def _map_normalised(conversion: Conversion, name: str, whiten: bool) -> bool:
    """Maps an estimator whose meaning the normalisation decides; returns whether advantages are whitened."""
    scores = normalisation(conversion)
    size = conversion.integer("train_env_manager.group_size", 1)
    if name == "grpo" and not scores.stated and size > 1:
        why = (
            "means the group's mean and standard deviation here; without reward_normalization ROLL has no baseline of "
            "the group at all, which is algorithm.advantage=reinforce"
        )
        conversion.put("algorithm.advantage", "grpo", "adv_estimator", change=why)
        return whiten
    chosen, whitens, coarser = estimator_for(scores, size)
    if coarser:
        conversion.mark(_SECTION, Fate.CHANGED, coarser)
    conversion.link("algorithm.advantage", *_KEYS)
    change = "" if chosen == name else f"{name} with this reward_normalization is called {chosen} here"
    whiten = whiten or whitens
    if conversion.number("gamma") != 1 and chosen == "reinforce":
        if name == "agentic_reinforce":
            chosen, change = "step_reinforce", "discounts per turn the rewards of the turns, not the episode's score"
        elif whiten:
            chosen, whiten = "reinforce_plus_plus", False
            change = "is REINFORCE++: a discount per token, then whitening; rewards stand at the end of their turns"
    conversion.put("algorithm.advantage", chosen, "adv_estimator", change=change)
    return whiten


def _other_normalisation(conversion: Conversion, name: str) -> None:
    """Accounts for the normalisation of estimators that do not read it here."""
    scores = normalisation(conversion)
    if name == "gigpo":
        if (scores.mean, scores.std) == ("group", "group"):
            conversion.used(_SECTION)
        else:
            conversion.mark(_SECTION, Fate.CHANGED, "gigpo compares within the group, by mean and standard deviation")
    elif (scores.mean, scores.std) == (None, None):
        conversion.used(_SECTION)
    else:
        conversion.mark(_SECTION, Fate.UNSUPPORTED, f"{name} takes rewards as they are")


def _discounts(conversion: Conversion, name: str) -> None:
    chosen = conversion.settings.get(("algorithm", "advantage"))
    gamma = conversion.number("gamma")
    if chosen in ("gigpo", "step_reinforce") and name != "agentic_reinforce":
        conversion.put("algorithm.gamma", conversion.number("step_reward_gamma"), "step_reward_gamma")
    elif gamma != 1 and chosen in ("gae", "reinforce_plus_plus", "step_reinforce"):
        conversion.put("algorithm.gamma", gamma, "gamma")
    elif gamma != 1:
        conversion.mark("gamma", Fate.UNSUPPORTED, f"{chosen} has no discount")
    conversion.used("gamma")
    if chosen == "gae":
        conversion.put("algorithm.gae_lambda", conversion.number("lambd"), "lambd")
    else:
        conversion.mark("lambd", Fate.IGNORED, "only adv_estimator=gae reads it")
    _step_weights(conversion, chosen)


def _step_weights(conversion: Conversion, chosen: str) -> None:
    keys = ("step_reward_weight", "episode_reward_weight")
    if chosen == "gigpo":
        step, episode = (conversion.number(key) for key in keys)
        if episode <= 0:
            raise conversion.refused(keys[1], "a number above 0")
        change = "" if episode == 1 else "the episode's part has weight 1; only the ratio of the two is kept"
        conversion.put("algorithm.step_advantage_weight", step / episode, *keys, change=change)
    for key in (*keys, "step_reward_gamma"):
        conversion.rest(key, Fate.IGNORED, "only step-level estimators read it")
