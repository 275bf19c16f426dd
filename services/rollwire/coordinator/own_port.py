"""The port at which a coordinator itself listens: tried before anything else is started."""

from __future__ import annotations

import socket

from rollwire.coordinator.errors import RunError
from rollwire.serving.config import RunConfig


def check_port(config: RunConfig) -> None:
    """Binds the port for a moment, so that a run that cannot listen costs no start of servers.

    Raises:
        RunError: It is in use, or the address is not one of this host.
    """
    place = config.coordinator
    if place.port == 0:
        return
    try:
        found = socket.getaddrinfo(place.host.strip("[]"), place.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a run that has just ended is no obstacle
            attempt.bind(address)
            attempt.listen(1)
    except OSError as error:
        raise port_error(config, error.strerror or str(error)) from error


def port_error(config: RunConfig, seen: str = "") -> RunError:
    """Returns the error for a port at which the coordinator cannot listen.

    Args:
        config: The run.
        seen: What the operating system says.
    """
    place = config.coordinator
    return RunError(
        f"the coordinator cannot listen on coordinator.host={place.host}, coordinator.port={place.port}"
        f"{f' ({seen})' if seen else ''}: the port is in use, such as by another run, or the address is not local; "
        "choose another one, or port 0 for a free one"
    )
