"""What may be changed when a run is resumed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollwire.serving.config import ConfigError, RunConfig, load_config
from rollwire.serving.config.resumable import HARMLESS, ROUNDING, fixed_schedule, resumed_config


def compare(*overrides: str, started: tuple[str, ...] = ()) -> bool:
    """Returns whether a run may go on bit for bit with some overrides."""
    return resumed_config(load_config(None, started), load_config(None, [*started, *overrides])).exact


def test_nothing_changed() -> None:
    assert compare()


@pytest.mark.parametrize(
    "override",
    ["run.max_steps=500", "timeouts.train_s=7", "services.learner=[127.0.0.1:5]", "run.keep_checkpoints=9"],
)
def test_harmless_settings(override: str) -> None:
    assert compare(override)


def test_settings_that_change_rounding() -> None:
    assert not compare("learner.world_size=2")
    with pytest.raises(ConfigError, match=r"learner\.world_size is 2, but .* started with 1 and with run\.determin"):
        compare("learner.world_size=2", started=("run.deterministic=true",))


def test_everything_else_is_kept_and_named() -> None:
    with pytest.raises(ConfigError) as raised:
        compare("run.seed=1", "environments=[{tag: Sokoban}]", "learner.critic.path=x", "algorithm.advantage=gae")
    lines = str(raised.value).splitlines()
    assert [line.split(" is ")[0] for line in lines] == [
        "algorithm.advantage",
        "environments",
        "learner.critic.path",
        "run.seed",
    ]
    assert (
        "run.seed is 1, but the run was started with 42; a resumed run keeps it. May be changed: coordinator, device, "
        in lines[3]
    )


def test_a_schedule_is_laid_out_for_its_run() -> None:
    assert fixed_schedule(load_config(None, [])) is None
    assert fixed_schedule(load_config(None, ["learner.optimizer.schedule=cosine"])) == (
        "learner.optimizer.schedule=cosine"
    )
    linear = ("learner.optimizer.schedule=linear",)
    with pytest.raises(ConfigError, match=r"run\.max_steps is 500, but .* learner\.optimizer\.schedule=linear is laid"):
        compare("run.max_steps=500", started=linear)
    with pytest.raises(ConfigError, match=r"start a new run from what this one exported, with model\.path=…"):
        compare("run.max_steps=500", started=linear)
    critic = ("learner.critic.optimizer.schedule=cosine",)
    assert compare("run.max_steps=500", started=critic), "there is no critic"
    with pytest.raises(ConfigError, match=r"learner\.critic\.optimizer\.schedule=cosine"):
        compare("run.max_steps=500", started=(*critic, "algorithm.advantage=gae"))


def test_the_lists_name_settings_that_exist() -> None:
    plain = RunConfig().model_dump()
    for name in HARMLESS + ROUNDING:
        value: object = plain
        for part in name.split("."):
            assert isinstance(value, dict) and part in value, name
            value = value[part]


def test_the_page_lists_what_may_be_changed() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    for opening, ending, known in (
        ("neither weights nor episodes", ";$", HARMLESS),
        ("results by rounding alone", r"\. The run", ROUNDING),
    ):
        found = re.search(rf"^- what changes {opening}: (.*?){ending}", page, re.MULTILINE | re.DOTALL)
        assert found is not None
        assert [name.removesuffix(".*") for name in re.findall(r"`([^`]+)`", found[1])] == list(known)
