"""Inside a worker: answers the calls of its sessions, one after another, until the server closes the connection.

Started by a zygote, either as its fork or, as a program of its own, with arguments: descriptor of the connection,
descriptor of a file that holds the setup, process id of the zygote.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf import json_format

from rollwire.client.closing import close_environment, closed_on_failure
from rollwire.client.drawings import draw
from rollwire.client.results import MAX_METRICS, aggregations, failure_of, start_response, step_response
from rollwire.environment.isolation.frames import FrameReader, Kind, frame
from rollwire.environment.isolation.limits import confine
from rollwire.environment.isolation.process_tree import die_with_parent
from rollwire.environment.isolation.setup import Prepared, ProcessSetup, prepare
from rollwire.rpc.errors import Reason
from rollwire.v1 import environment_pb2 as pb

_READ_BYTES: Final = 1 << 16
_LOGGED_FRAMES: Final = 20
_LOGGED_CHARACTERS: Final = 16_000


class _RefusedOptionsError(Exception):
    """The constructor refuses options of the request."""


@dataclass
class Worker:
    """The sessions of one process.

    Attributes:
        connection: To the server.
        prepared: Makes environments.
    """

    connection: socket.socket
    prepared: Prepared

    def __post_init__(self) -> None:
        self._pid = os.getpid()
        self._environments: dict[str, Any] = {}
        self._known_modes: Any = None

    def serve(self) -> None:
        """Answers calls until the server closes the connection."""
        self._send(Kind.STARTED)
        reader = FrameReader()
        while data := self.connection.recv(_READ_BYTES):
            for _, payload in reader.feed(data):
                reply = self._answer(pb.SessionCall.FromString(payload))
                self._send(Kind.REPLY, reply.SerializeToString())

    def _answer(self, call: pb.SessionCall) -> pb.SessionReply:
        kind = call.WhichOneof("call")
        if kind == "step":
            return pb.SessionReply(call_id=call.call_id, step=self._step(call.step))
        if kind == "open":
            return self._open(call)
        if kind == "render":
            return self._render(call)
        return pb.SessionReply(call_id=call.call_id, close=self._close(call.close))

    def _step(self, request: pb.StepRequest) -> pb.StepResponse:
        try:
            reply = self._environments[request.session_id].step(request.action)
            response = step_response(reply)
            modes = reply[4].get("metrics_agg_mode")
            if modes and modes != self._known_modes:
                self._learn(modes)
            return response
        except BaseException as error:  # an environment may raise anything, SystemExit too
            return pb.StepResponse(failure=self._failed(error))

    def _open(self, call: pb.SessionCall) -> pb.SessionReply:
        try:
            environment = self._construct(call.open)
            with closed_on_failure(environment):
                response = start_response(environment.reset(call.open.seed), environment.max_turns)
            self._environments[call.open.request_id] = environment
            return pb.SessionReply(call_id=call.call_id, open=response)
        except _RefusedOptionsError as error:
            refused = pb.CallError(
                code=grpc.StatusCode.INVALID_ARGUMENT.value[0], reason=Reason.INVALID_FIELD, message=str(error)
            )
            return pb.SessionReply(call_id=call.call_id, error=refused)
        except BaseException as error:
            return pb.SessionReply(call_id=call.call_id, open=pb.OpenSessionResponse(failure=self._failed(error)))

    def _construct(self, request: pb.OpenSessionRequest) -> Any:
        overrides = self.prepared.schema.requested(json_format.MessageToDict(request.options))
        try:
            return self.prepared.factory(**{**self.prepared.options, **overrides})
        except (ValueError, TypeError) as error:
            if overrides:  # the caller's mistake must not disable the tag for others
                raise _RefusedOptionsError(failure_of(error).message) from error
            raise

    def _render(self, call: pb.SessionCall) -> pb.SessionReply:
        try:
            drawing = draw(self._environments[call.render.session_id], call.render.format)
            return pb.SessionReply(call_id=call.call_id, render=drawing)
        except BaseException as error:
            found = self._failed(error)
            unsupported = pb.CallError(
                code=grpc.StatusCode.FAILED_PRECONDITION.value[0],
                reason=Reason.RENDER_UNSUPPORTED,
                message=f"{found.type}: {found.message}",
            )
            return pb.SessionReply(call_id=call.call_id, error=unsupported)

    def _close(self, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        try:
            close_environment(self._environments.pop(request.session_id))
        except BaseException as error:
            self._failed(error)
        return pb.CloseSessionResponse()

    def _learn(self, modes: Any) -> None:
        """Tells the server how further metrics are aggregated. Raises `InvalidResultError`."""
        found = aggregations(modes)
        learned = pb.EnvironmentDescription(metric_aggregation=dict(list(found.items())[:MAX_METRICS]))
        self._send(Kind.LEARNED, learned.SerializeToString())
        self._known_modes = dict(modes)

    def _failed(self, error: BaseException) -> pb.EnvironmentFailure:
        stack = "".join(traceback.format_exception(error, limit=-_LOGGED_FRAMES))[-_LOGGED_CHARACTERS:]
        self._send(Kind.STACK, stack.encode(errors="replace"))
        return failure_of(error)

    def _send(self, kind: Kind, payload: bytes = b"") -> None:
        if os.getpid() != self._pid:
            os._exit(1)  # a fork of the environment came back from a call: it is nobody's worker
        self.connection.sendall(frame(kind, payload))


def serve_and_exit(connection: socket.socket, prepared: Prepared) -> None:
    """Serves, and ends the process without what the zygote has registered for its own end."""
    status = 1
    try:
        Worker(connection, prepared).serve()
        status = 0
    except OSError:  # the server is gone
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    """Serves as a program of its own, where a fork of the zygote would not be safe."""
    connection, setup_file, zygote_pid = map(int, sys.argv[1:])
    die_with_parent(zygote_pid)
    with os.fdopen(setup_file, "rb") as file:
        setup = ProcessSetup.from_json(file.read())
    prepared = prepare(setup)
    confine(setup.memory_mib)
    serve_and_exit(socket.socket(fileno=connection), prepared)


if __name__ == "__main__":
    main()
