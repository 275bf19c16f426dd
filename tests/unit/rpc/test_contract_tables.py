"""The tables in `rollwire.rpc` and in docs/wire.md cover the published contract, no more and no less."""

from __future__ import annotations

import re
from pathlib import Path

from rollwire.rpc.deadlines import DEADLINES_S, WITHOUT_DEADLINE
from rollwire.rpc.errors import Reason
from rollwire.rpc.limits import KEEPALIVE_MIN_INTERVAL_S, KEEPALIVE_TIME_S, RETRYABLE_METHODS
from rollwire.v1 import coordinator_pb2, environment_pb2, learner_pb2, rollout_pb2, weights_pb2

ROOT = Path(__file__).resolve().parents[3]
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module in (environment_pb2, rollout_pb2, learner_pb2, coordinator_pb2, weights_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def test_every_method_has_a_deadline() -> None:
    assert set(DEADLINES_S) | WITHOUT_DEADLINE == set(METHODS)
    assert not set(DEADLINES_S) & WITHOUT_DEADLINE


def test_only_streams_in_both_directions_live_without_deadline() -> None:
    for name in WITHOUT_DEADLINE:
        assert METHODS[name].client_streaming and METHODS[name].server_streaming


def test_only_known_methods_without_client_stream_are_retried() -> None:
    retried = {f"/{service}/{method}" for service, methods in RETRYABLE_METHODS.items() for method in methods}
    assert retried <= set(METHODS)
    assert not [name for name in retried if METHODS[name].client_streaming]


def test_keepalive_of_client_and_server_agree() -> None:
    assert KEEPALIVE_TIME_S > KEEPALIVE_MIN_INTERVAL_S


def test_docs_list_exactly_the_reasons_that_exist() -> None:
    table = (ROOT / "docs" / "wire.md").read_text()
    documented = set(re.findall(r"^\| `([A-Z_]+)` \|", table, flags=re.MULTILINE))
    assert documented == {reason.value for reason in Reason}


def test_protos_name_only_reasons_that_exist() -> None:
    texts = [path.read_text() for path in (ROOT / "protos" / "rollwire" / "v1").glob("*.proto")]
    named = {name for text in texts for name in re.findall(r"/\s*(?://\s*)?`([A-Z][A-Z_]+)`", text)}
    assert named
    assert named <= {reason.value for reason in Reason}
