from __future__ import annotations

from rollwire.coordinator.planner import Planner, sampling_settings
from rollwire.coordinator.seeds import environment_seed, sampling_seed
from rollwire.rpc.ids import is_name
from rollwire.serving.config import RunConfig
from rollwire.serving.config.sections import SamplingSection
from rollwire.v1 import trajectory_pb2

CONFIG = RunConfig.model_validate(
    {
        "run": {"seed": 5},
        "batch": {"episodes_per_group": 4},
        "environments": [
            {"tag": "A", "options": {"size": 4, "is_slippery": False, "nested": {"x": [1, None]}}},
            {"tag": "B"},
        ],
        "validation": {"episodes": 3, "sampling": {"temperature": 0.5, "top_k": 7}},
        "rollout": {"max_new_tokens_per_turn": 9, "max_episode_tokens": 300, "episode_timeout_s": 12},
        "services": {"environment": ["127.0.0.1:1"]},
    }
)


def test_a_training_group() -> None:
    plan = Planner(CONFIG).training_group(2)
    assert (plan.group_id, plan.index, plan.environment_tag, plan.episodes) == ("g00000002", 2, "A", 4)
    assert plan.environment_seed == environment_seed(5, "train", "A", 2)
    assert plan.sampling_seed == sampling_seed(5, "train", "A", 2)
    assert dict(plan.environment_options)["size"] == 4
    assert (plan.max_episode_tokens, plan.episode_timeout_s) == (300, 12)
    assert plan.environment_targets == ("127.0.0.1:1",)
    assert plan.sampling.max_tokens == 9


def test_the_validation_set_is_the_same_at_every_step_and_disjoint_from_training() -> None:
    planner = Planner(CONFIG)
    first = planner.validation_groups("val", 0)
    later = planner.validation_groups("val", 10)
    assert [plan.environment_seed for plan in first] == [plan.environment_seed for plan in later]
    assert [plan.sampling_seed for plan in first] == [plan.sampling_seed for plan in later]
    assert [(plan.environment_tag, plan.index, plan.episodes) for plan in first] == [
        (tag, index, 1) for tag in ("A", "B") for index in range(3)
    ]
    training = {planner.training_group(index).environment_seed for index in range(500)}
    assert not training & {plan.environment_seed for plan in first}
    assert first[0].sampling.temperature == 0.5 and first[0].sampling.top_k == 7


def test_group_ids_are_valid_and_unique_in_a_run() -> None:
    planner = Planner(CONFIG)
    greedy = SamplingSection(temperature=0)
    ids = [planner.training_group(index).group_id for index in range(20)]
    for kind in ("val", "val_greedy"):
        for step in (0, 100):
            ids += [plan.group_id for plan in planner.validation_groups(kind, step, greedy)]
    assert all(is_name(group_id) for group_id in ids)
    assert len(set(ids)) == len(ids)


def test_sampling_states_every_value() -> None:
    settings = sampling_settings(SamplingSection(temperature=0.0), 5)
    assert settings.HasField("temperature") and settings.temperature == 0 and settings.top_p == 1
    assert settings.logprob_mode == trajectory_pb2.LOGPROB_MODE_SAMPLED


def test_settings_of_one_entry_and_entries_that_are_not_played_by_rollout_servers() -> None:
    config = RunConfig.model_validate(
        {
            "environments": [
                {"tag": "Agent", "source": "agent", "max_new_tokens_per_turn": 33, "sampling": {"temperature": 0.5}},
                {"tag": "Lake", "weight": 0, "validation_sampling": {"top_k": 3}},
            ],
            "validation": {"episodes": 2, "sampling": {"top_k": 9}},
        }
    )
    planner = Planner(config)
    plan = planner.training_group(5)
    assert (plan.environment_tag, plan.sampling.max_tokens, plan.sampling.temperature) == ("Agent", 33, 0.5)
    played = planner.validation_groups("val", 0)
    assert [(item.environment_tag, item.sampling.top_k) for item in played] == [("Lake", 3)] * 2
    greedy = planner.validation_groups("val_greedy", 0, SamplingSection(temperature=0))
    assert [(item.sampling.temperature, item.sampling.top_k) for item in greedy] == [(0, 0)] * 2
