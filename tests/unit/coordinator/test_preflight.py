from __future__ import annotations

from collections.abc import Callable

import pytest

from rollwire.coordinator.errors import RunError
from rollwire.coordinator.peers import Descriptions, check_addresses
from rollwire.coordinator.preflight import check_fit, check_launch
from rollwire.serving.config import ConfigError, RunConfig
from rollwire.serving.config.server_settings import learner_settings, rollout_settings
from rollwire.v1 import environment_pb2, learner_pb2, rollout_pb2

CONFIG = RunConfig.model_validate(
    {
        "rollout": {"max_episode_tokens": 512},
        "services": {"environment": ["h:1"], "rollout": ["h:2", "h:3"], "learner": ["h:4"]},
    }
)


def rollout() -> rollout_pb2.RolloutServiceGetInfoResponse:
    return rollout_pb2.RolloutServiceGetInfoResponse(
        model_architecture="Qwen2ForCausalLM",
        tokenizer_hash="a" * 64,
        template_hash="b" * 64,
        max_sequence_tokens=1024,
        episode_capacity=64,
    )


def descriptions() -> Descriptions:
    tags = [environment_pb2.EnvironmentDescription(tag=tag) for tag in ("FrozenLake", "FrozenLakeThink")]
    return Descriptions(
        environments=[environment_pb2.ListEnvironmentsResponse(environments=tags)],
        rollouts=[rollout(), rollout()],
        learner=learner_pb2.LearnerServiceGetInfoResponse(
            model_architecture="Qwen2ForCausalLM",
            tokenizer_hash="a" * 64,
            max_sequence_tokens=1024,
            policy_losses=["ppo_clip"],
        ),
    )


def test_servers_that_fit_pass() -> None:
    check_fit(CONFIG, descriptions())
    without_tokenizer = descriptions()
    without_tokenizer.learner.tokenizer_hash = ""
    check_fit(CONFIG, without_tokenizer)


def test_settings_that_only_servers_act_on_must_be_the_runs() -> None:
    theirs = RunConfig.model_validate({"model": {"dtype": "bfloat16"}, "run": {"max_steps": 7}})
    found = descriptions()
    found.rollouts[1].settings.update(rollout_settings(theirs))
    found.learner.settings.update(learner_settings(theirs))
    found.learner.settings["learner.of_a_newer_build"] = "1"

    with pytest.raises(RunError) as caught:
        check_fit(CONFIG, found)

    ours = 'model.dtype is "float32" in this run\'s configuration, but the '
    assert str(caught.value).splitlines()[:-1] == [
        f'{ours}rollout server at h:3 was started with "bfloat16"',
        f'{ours}learner at h:4 was started with "bfloat16"',
    ]
    found.rollouts[1].settings.update(rollout_settings(CONFIG))
    found.learner.settings.update(learner_settings(CONFIG))
    check_fit(CONFIG, found)


def test_the_length_of_a_run_counts_where_a_schedule_is_laid_out_for_it() -> None:
    short, long = (
        RunConfig.model_validate(
            {**CONFIG.model_dump(), "run": {"max_steps": steps}, "learner": {"optimizer": {"schedule": "linear"}}}
        )
        for steps in (3, 80)
    )
    found = descriptions()
    found.learner.settings.update(learner_settings(long))

    with pytest.raises(RunError, match=r"^run\.max_steps is 3 in this run.*the learner at h:4 was started with 80"):
        check_fit(short, found)


Spoil = Callable[[Descriptions], object]
SPOILS: dict[str, Spoil] = {
    r"at h:1 does not offer \(did you mean FrozenLakeThink\?\); it offers FrozenLakeThink": lambda found: (
        found.environments[0].environments.pop(0)
    ),
    "at h:3 has a Llama, the learner at h:4 a Qwen2ForCausalLM": lambda found: setattr(
        found.rollouts[1], "model_architecture", "Llama"
    ),
    "at h:2 has the tokenizer cccccccccccc": lambda found: setattr(found.rollouts[0], "tokenizer_hash", "c" * 64),
    "max_episode_tokens is 512, but the rollout server at h:3 holds at most 511": lambda found: setattr(
        found.rollouts[1], "max_sequence_tokens", 511
    ),
    "max_episode_tokens is 512, but the learner at h:4 trains at most 500": lambda found: setattr(
        found.learner, "max_sequence_tokens", 500
    ),
    "episodes_per_group is 8, but the rollout server at h:2 runs at most 7": lambda found: setattr(
        found.rollouts[0], "episode_capacity", 7
    ),
    "at h:2 and h:3 have different prompts": lambda found: setattr(found.rollouts[1], "template_hash", "z" * 64),
    "policy_loss is ppo_clip, but the learner at h:4 has only cispo": lambda found: (
        found.learner.policy_losses.__setitem__(0, "cispo")
    ),
}


@pytest.mark.parametrize("text", SPOILS)
def test_what_does_not_fit_is_named(text: str) -> None:
    found = descriptions()
    SPOILS[text](found)
    with pytest.raises(RunError, match=text):
        check_fit(CONFIG, found)


def test_what_comes_from_outside_needs_no_environment_server_but_an_edge() -> None:
    config = RunConfig.model_validate(
        {
            "environments": [{"tag": "Agent", "source": "agent"}, {"tag": "P", "source": "pushed"}],
            "validation": {"episodes": 0},
            "rollout": {"max_episode_tokens": 512},
            "services": {"rollout": ["h:2", "h:3"], "learner": ["h:4"]},
        }
    )
    found = descriptions()
    found.environments.clear()
    check_fit(config, found)
    check_addresses(config)
    with pytest.raises(ConfigError, match=r"'Agent' has source agent, but rollout\.http\.address is null"):
        check_launch(config)
    check_launch(CONFIG)
