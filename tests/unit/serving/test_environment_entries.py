from __future__ import annotations

from typing import Any

import pytest

from rollwire.serving.config import ConfigError, RunConfig, load_config
from rollwire.serving.config.loader import dump_config

AGENT = {"tag": "Agent", "source": "agent"}
LAKE = {"tag": "Lake"}
NO_VALIDATION = {"validation": {"episodes": 0}}


def config(*entries: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig.model_validate({"environments": list(entries), **sections})


def test_a_run_may_mix_sources_and_validate_on_an_entry_that_is_not_trained() -> None:
    found = config(AGENT, {"tag": "Pushed", "source": "pushed", "weight": 3}, {"tag": "Lake", "weight": 0})
    assert [(entry.source, entry.weight) for entry in found.environments] == [
        ("agent", 1),
        ("pushed", 3),
        ("environment", 0),
    ]


def test_the_training_temperature_is_that_of_the_trained_entries() -> None:
    found = config({**LAKE, "sampling": {"temperature": 0.7}}, {"tag": "Other", "weight": 0})
    assert found.training_temperature == 0.7
    assert config(LAKE, sampling={"temperature": 0.9}).training_temperature == 0.9


@pytest.mark.parametrize(
    ("entries", "sections", "message"),
    [
        ([AGENT], {}, "validation.episodes is 128, but environments has no entry with source environment"),
        ([{**LAKE, "weight": 0}], {}, "environments has only entries with weight 0"),
        ([LAKE, {**AGENT, "weight": 0}], {}, "'Agent' has source agent and weight 0, but validation plays only"),
        ([LAKE, {**AGENT, "validation_sampling": {}}], {}, "source agent and validation_sampling"),
        ([LAKE, {"tag": "B", "weight": 0, "sampling": {}}], {}, "'B' has weight 0 and sampling, but is not trained"),
        (
            [{**LAKE, "sampling": {"top_k": 5}}],
            {},
            "environments entry 'Lake': sampling.top_p is 1.0 and sampling.top_k",
        ),
        ([{**LAKE, "sampling": {"temperature": 0}}], {}, "'Lake': sampling.temperature is 0; training needs"),
        (
            [LAKE, {"tag": "B", "sampling": {"temperature": 0.5}}],
            {},
            "different temperatures (Lake 1, B 0.5), but a training step scores all of its samples at one",
        ),
        (
            [{**LAKE, "max_new_tokens_per_turn": 4096}],
            {},
            "'Lake' has max_new_tokens_per_turn 4096, but an episode holds",
        ),
        ([LAKE, AGENT], {"run": {"deterministic": True}}, "'Agent' has source agent: what comes from outside"),
        (
            [LAKE, {"tag": "P", "source": "pushed"}],
            {"placement": "colocated"},
            "a pusher could not generate; set placement=separate",
        ),
        ([{**LAKE, "source": "robot"}], {}, "Input should be 'environment', 'agent' or 'pushed'"),
        ([{"tag": "a b"}], {}, "environments holds the tag 'a b'"),
    ],
)
def test_entries_that_do_not_go_together(entries: list[dict[str, Any]], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        config(*entries, **sections)
    assert message in str(raised.value)


def test_a_user_reads_one_line(tmp_path: Any) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("environments: [{tag: A, source: agent}]")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert str(raised.value).startswith("validation.episodes is 128, but") and "\n" not in str(raised.value)


def test_what_is_stored_is_read_back(tmp_path: Any) -> None:
    found = config(AGENT, {**LAKE, "sampling": {"temperature": 1.0}, "max_new_tokens_per_turn": 7}, **NO_VALIDATION)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(found))
    assert load_config(path) == found
