from __future__ import annotations

import socket

import pytest

from rollwire.coordinator.errors import RunError
from rollwire.coordinator.own_port import check_port
from rollwire.serving.config import RunConfig


def configured(port: int, host: str = "127.0.0.1") -> RunConfig:
    return RunConfig.model_validate({"coordinator": {"host": host, "port": port, "insecure": True}})


def test_a_port_that_another_run_listens_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RunError, match=rf"coordinator\.port={port} \(Address already in use\): .* another run"):
            check_port(configured(port))
    check_port(configured(port))
    check_port(configured(port))


def test_an_address_of_another_host() -> None:
    with pytest.raises(RunError, match=r"coordinator\.host=192\.0\.2\.1, .* the address is not local"):
        check_port(configured(7700, "192.0.2.1"))


def test_any_free_port() -> None:
    check_port(configured(0))
