"""`WeightsService` beside a server's own service: the same shell for learners and rollout servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, Protocol

import grpc.aio

from rollwire.rpc.errors import invalid_field
from rollwire.rpc.ids import is_name
from rollwire.rpc.same_host import SOCKET_NAME, hand_over
from rollwire.rpc.weight_publisher import WeightStream
from rollwire.rpc.weight_wire import add_fetch_weights_to_server
from rollwire.v1 import weights_pb2

_DIGEST_BYTES: Final = 32


class WeightsSource(Protocol):
    """What holds a version: `rpc.weight_publisher.WeightPublisher` or `rpc.weight_relay.WeightRelay`."""

    def open(self, request: weights_pb2.FetchWeightsRequest) -> WeightStream:
        """Returns the stream that answers a request. Called in a thread; it is read on the event loop.

        Raises:
            RollwireError: As `WeightsService.FetchWeights` says.
        """


class WeightsServicer:
    """Serves `rollwire.v1.WeightsService`.

    Args:
        source: Returns what holds the weights; raises `RollwireError` as long as there is nothing.
    """

    def __init__(self, source: Callable[[], WeightsSource]) -> None:
        self._source = source

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server that has not started."""
        add_fetch_weights_to_server(self.FetchWeights, server)

    async def FetchWeights(
        self, request: weights_pb2.FetchWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """See the contract."""
        source = self._source()
        _check(request)
        stream = await asyncio.to_thread(source.open, request)  # it may have to compose changes
        for message in await asyncio.to_thread(_messages, stream, request.same_host_socket):
            yield message


def _messages(stream: WeightStream, same_host_socket: str) -> Iterable[bytes]:
    """Returns the messages of a stream; hands the version over as a file, if the reader offered that and is here."""
    shared = stream.shared
    if same_host_socket and shared is not None and hand_over(same_host_socket, shared.file.descriptor):
        return stream.handed_over()
    return stream


def _check(request: weights_pb2.FetchWeightsRequest) -> None:
    """Checks the fields. Raises `RollwireError`, INVALID_ARGUMENT / `INVALID_FIELD`."""
    for path in ("version", "have"):
        lineage = getattr(request, path).lineage
        if request.HasField(path) and not is_name(lineage):
            raise invalid_field(f"{path}.lineage", lineage, "[a-z0-9][a-z0-9_.-]{0,62} without '..'")
    accepted = request.accepted_encodings
    if accepted and weights_pb2.TENSOR_ENCODING_FULL not in accepted:
        raise invalid_field("accepted_encodings", list(accepted), "a list that holds TENSOR_ENCODING_FULL, or empty")
    bases = request.low_rank_bases
    if len(bases) not in (0, _DIGEST_BYTES):
        raise invalid_field("low_rank_bases", f"{len(bases)} bytes", f"a digest of {_DIGEST_BYTES} bytes, or empty")
    name = request.same_host_socket
    if name and not SOCKET_NAME.fullmatch(name):
        raise invalid_field("same_host_socket", name, "`rollwire-` and 32 lower-case hexadecimal digits, or empty")
