"""Divergence to a reference: in the loss or in the reward, and the sections about the reference's workers."""

from __future__ import annotations

from typing import Final

from rollwire.cli.import_roll.account import Fate
from rollwire.cli.import_roll.conversion import Conversion

_ESTIMATORS: Final = {"kl": "k1", "mse": "k2", "k3": "k3", "abs": "k1", "full": "k1"}
_APPROXIMATED: Final = ("abs", "full")
_LOSS: Final = ("use_kl_loss", "kl_loss_coef")
_REWARD: Final = ("add_token_level_kl", "init_kl_coef")


def map_divergence(conversion: Conversion) -> None:
    """Maps the divergence: ROLL's loss term is always k3, its penalty on rewards what `kl_penalty` says."""
    in_loss = conversion.flag(_LOSS[0]) and conversion.number(_LOSS[1]) > 0
    in_reward = conversion.flag(_REWARD[0]) and conversion.number(_REWARD[1]) > 0
    if in_loss:
        conversion.put("algorithm.kl.coefficient", conversion.number(_LOSS[1]), *reversed(_LOSS))
        conversion.put("algorithm.kl.apply_to", "loss", _LOSS[0])
        conversion.put("algorithm.kl.estimator", "k3", _LOSS[0])
    if in_reward and in_loss:
        conversion.mark(
            _REWARD[0], Fate.UNSUPPORTED, "only one place for the divergence; use_kl_loss has it in the loss"
        )
    elif in_reward:
        _penalty(conversion)
    conversion.used(*_LOSS, _REWARD[0])
    _coefficient(conversion, in_reward and not in_loss)
    if not in_reward or in_loss:
        for key in ("kl_penalty", "target_kl", "kl_horizon"):
            if conversion.value(key) is not None:
                conversion.mark(key, Fate.IGNORED, "only the penalty on rewards (add_token_level_kl) reads it")
            conversion.used(key)
    _reference(conversion, in_loss or in_reward)


def _penalty(conversion: Conversion) -> None:
    conversion.put("algorithm.kl.coefficient", conversion.number(_REWARD[1]), _REWARD[1])
    conversion.put("algorithm.kl.apply_to", "reward", _REWARD[0])
    name = conversion.choice("kl_penalty", tuple(_ESTIMATORS))
    change = f"{name} is not there; k1 estimates the same divergence" if name in _APPROXIMATED else ""
    conversion.put("algorithm.kl.estimator", _ESTIMATORS[name], "kl_penalty", change=change)
    if conversion.value("target_kl") is not None:
        conversion.put("algorithm.kl.target", conversion.number("target_kl"), "target_kl")
        conversion.put("algorithm.kl.horizon", conversion.integer("kl_horizon", 1), "kl_horizon")
    else:
        conversion.mark("kl_horizon", Fate.IGNORED, "target_kl is not set")
        conversion.used("target_kl")


def _coefficient(conversion: Conversion, is_used: bool) -> None:
    key = _REWARD[1]
    if is_used:
        conversion.used(key)
    elif conversion.value(key) and conversion.has(key):
        why = "without add_token_level_kl it changes no reward in ROLL either, only loads a reference to measure by"
        conversion.mark(key, Fate.IGNORED, why)
    else:
        conversion.used(key)
    if conversion.flag("enable_reference") and conversion.settings.get(("algorithm", "kl", "coefficient")) is None:
        conversion.mark("enable_reference", Fate.IGNORED, "a reference is loaded only where a divergence is trained on")
    conversion.used("enable_reference")


def _reference(conversion: Conversion, is_used: bool) -> None:
    key = "reference.model_args.model_name_or_path"
    path, policy = conversion.text(key), conversion.settings.get(("model", "path"))
    if not is_used:
        switched_on = (
            conversion.flag("enable_reference") or conversion.flag(_LOSS[0]) or conversion.number(_REWARD[1]) > 0
        )
        why = "no divergence is trained on, so there is no reference"
        conversion.mark("reference", Fate.IGNORED if switched_on else Fate.DEAD, why)
        return
    if path is not None and path != policy:
        conversion.put("learner.reference.path", path, key)
    conversion.used(key)
    why = "the learner holds the reference, on its own devices and in its own precision"
    conversion.rest("reference", Fate.IGNORED, why)
