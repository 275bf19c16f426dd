"""Settings of algorithms that contradict each other or that nothing would read are refused, with what to do."""

from __future__ import annotations

import pytest

from rollwire.serving.config import load_config
from rollwire.serving.config.loader import ConfigError, dump_config

GAE = "algorithm.advantage=gae"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["algorithm.gamma=0.9"], "advantage=grpo does not read it.*reinforce_plus_plus"),
        (["algorithm.gae_lambda=0.9"], "algorithm.gae_lambda is 0.9"),
        (["algorithm.value_clip=0.2"], "choose gae"),
        (["algorithm.step_advantage_weight=2"], "choose gigpo"),
        (["algorithm.policy_loss=topr", "algorithm.clip_low=0.1"], "policy_loss=topr does not read it"),
        (["algorithm.policy_loss=cispo", "algorithm.dual_clip=3"], "algorithm.dual_clip is 3"),
        (["algorithm.dual_clip=0.5"], "allowed: > 1"),
        (["algorithm.aggregation=fixed_length"], "fixed_length_tokens is 0"),
        (["algorithm.fixed_length_tokens=10"], "aggregation=token_mean does not read it"),
        (["algorithm.importance_weight.level=token"], "set algorithm.recompute_old_logprobs=true"),
        (["algorithm.importance_masks=[{level: token}]"], "set algorithm.recompute_old_logprobs=true"),
        (["algorithm.importance_masks=[{level: token, min_ratio: 2, max_ratio: 1}]"], "max_ratio >= min_ratio"),
        (["algorithm.kl.target=0.1"], "algorithm.kl.coefficient is 0"),
        (["algorithm.kl.coefficient=0.1", "algorithm.kl.estimator=k1"], "gradient of k1 is zero"),
        (["algorithm.kl.coefficient=.nan"], "finite number"),
        (["algorithm.advantage=gigpo", "batch.episodes_per_group=1"], "needs at least 2"),
        (["learner.critic.warmup_steps=5"], "advantage=grpo uses no critic"),
        (["learner.critic.path=builtin:tiny"], "choose algorithm.advantage=gae"),
        ([GAE, "learner.critic.warmup_steps=100"], "the policy would never be trained"),
        (["learner.reference.path=builtin:tiny"], "algorithm.kl.coefficient is 0"),
    ],
)
def test_contradictions_are_refused(overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(None, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [GAE, "algorithm.gamma=0.99", "algorithm.gae_lambda=1", "learner.critic.warmup_steps=3"],
        ["algorithm.advantage=reinforce_plus_plus", "algorithm.kl={coefficient: 0.1, apply_to: reward, estimator: k1}"],
        ["algorithm.policy_loss=topr", "algorithm.kl={coefficient: 0.1, target: 0.05}"],
        ["algorithm.recompute_old_logprobs=true", "algorithm.importance_weight.level=sequence"],
    ],
)
def test_what_is_allowed_is_read_back_from_what_it_resolves_to(overrides: list[str], tmp_path_factory: object) -> None:
    config = load_config(None, overrides)
    path = tmp_path_factory.mktemp("config") / "config.yaml"  # type: ignore[attr-defined]
    path.write_text(dump_config(config))

    assert load_config(path) == config


def test_critic_and_reference_exist_where_something_uses_them() -> None:
    assert load_config(None, [GAE]).needs_critic
    assert load_config(None, ["algorithm.kl.coefficient=0.1"]).needs_reference
    plain = load_config(None, [])
    assert not plain.needs_critic and not plain.needs_reference
