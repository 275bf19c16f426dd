"""The tags of a server: found by name, come and go, and nothing else ever follows from a name."""

from __future__ import annotations

import sys

import pytest

from rollwire.environment.host import EnvironmentHost
from rollwire.environment.hosts import Hosts
from rollwire.environment.registry import load_registry
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.serving.config.sections import EnvironmentSection


@pytest.fixture
def hosts() -> Hosts:
    known = load_registry(EnvironmentSection()).environments
    return Hosts({tag: EnvironmentHost(registered, 5) for tag, registered in reversed(known.items())})


def test_the_catalogue_ascends_and_leaves_out_what_is_disabled(hosts: Hosts) -> None:
    tags = hosts.tags()
    assert tags == sorted(tags) == [item.tag for item in hosts.descriptions()]
    disabled = hosts.get(tags[0])
    assert isinstance(disabled, EnvironmentHost)
    disabled.health.disabled = True
    assert [item.tag for item in hosts.descriptions()] == tags[1:]


@pytest.mark.parametrize("tag", ["colorsys:Game", "colorsys", "../x", ""])
def test_nothing_is_imported_for_a_tag(hosts: Hosts, tag: str) -> None:
    sys.modules.pop("colorsys", None)
    with pytest.raises(RollwireError) as caught:
        hosts.find(tag)
    assert caught.value.reason == Reason.UNKNOWN_ENVIRONMENT
    assert "colorsys" not in sys.modules


def test_tags_come_and_go(hosts: Hosts) -> None:
    lake = hosts.find("FrozenLake")
    hosts.add("Pond", lake)
    assert hosts.find("Pond") is lake
    hosts.remove("Pond")
    hosts.remove("Pond")
    assert hosts.get("Pond") is None
    with pytest.raises(RollwireError):
        hosts.find("Pond")
