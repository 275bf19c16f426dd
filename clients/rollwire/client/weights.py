"""Client of `WeightsService`."""

from __future__ import annotations

from collections.abc import AsyncIterator

from rollwire.client.base import ServiceClient
from rollwire.rpc.channel import open_channel
from rollwire.rpc.weight_wire import WEIGHTS_SERVICE, fetch_weights_method
from rollwire.v1 import weights_pb2


class WeightsClient(ServiceClient):
    """Reads weights from a learner or a rollout server. All methods raise `RollwireError`."""

    service_name = WEIGHTS_SERVICE

    def __init__(self, target: str) -> None:
        super().__init__(target, open_channel(target))
        self._fetch_weights = fetch_weights_method(self._channel)

    def fetch_weights(
        self, request: weights_pb2.FetchWeightsRequest, *, timeout_s: float | None = None
    ) -> AsyncIterator[bytes]:
        """Streams a version as serialised `FetchWeightsResponse` messages, for `rpc.weight_stream.receive_weights`."""
        return self._stream("FetchWeights", self._fetch_weights, request, timeout_s)
