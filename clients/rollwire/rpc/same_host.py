"""Handing a file to a process on the same host: the reader listens at a socket, the source sends the descriptor there.

That both see the socket in `/dev/shm` is what proves that they share a host. Nothing that came over the network is
used as a path: a name has to have one fixed form, and both ends make sure that the other one runs as the same user.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

DIRECTORY: Final = Path("/dev/shm")  # noqa: S108 - names are random, and foreign users are refused
SOCKET_NAME: Final = re.compile(r"rollwire-[0-9a-f]{32}")
_TIMEOUT_S: Final = 1.0
_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid


class HandOverError(Exception):
    """No usable file came; the text is one line."""


def hand_over(name: str, descriptor: int, directory: Path = DIRECTORY) -> bool:
    """Sends a file, for reading only, to the reader that listens at a socket; False if there is no such reader here.

    Args:
        name: `FetchWeightsRequest.same_host_socket`.
        descriptor: The file.
        directory: Where sockets lie.
    """
    if not SOCKET_NAME.fullmatch(name):
        return False
    path = directory / name
    try:
        found = path.lstat()
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(str(path))
            if _peer_user(connection) != os.geteuid():
                return False
            readable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return socket.send_fds(connection, [b"\0"], [readable]) == 1
            finally:
                os.close(readable)
    except OSError:  # another host's name, a reader that has gone away, a container that cannot see it
        return False


class SameHostOffer:
    """A reader's side: a socket for one file. Use as a context manager.

    Args:
        enabled: False makes no socket.
        directory: Where the socket lies.

    Attributes:
        name: `FetchWeightsRequest.same_host_socket`; empty when there is no socket.
    """

    def __init__(self, *, enabled: bool = True, directory: Path = DIRECTORY) -> None:
        self.name = ""
        self._enabled = enabled
        self._path = directory / f"rollwire-{secrets.token_hex(16)}"
        self._descriptors: list[int] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def __enter__(self) -> Self:
        if not self._enabled:
            return self
        with suppress(OSError):
            self._listener.setblocking(False)
            self._listener.bind(str(self._path))
            self._path.chmod(0o600)
            self._listener.listen(1)
            self.name = self._path.name
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        with suppress(OSError):
            self._path.unlink()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def take(self) -> int:
        """Returns the file that has come; it is closed with the offer.

        Raises:
            HandOverError: None has come from a process of this user, or it is no regular file.
        """
        try:
            connection, _ = self._listener.accept()
            with connection:
                connection.setblocking(False)
                if _peer_user(connection) != os.geteuid():
                    raise HandOverError("another user connected")
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise HandOverError(f"no file came ({error.strerror})") from error
        self._descriptors += descriptors
        if len(descriptors) != 1 or not stat.S_ISREG(os.fstat(descriptors[0]).st_mode):
            raise HandOverError("what came is no file")
        return descriptors[0]


def read_exactly(descriptor: int, target: memoryview, offset: int) -> None:
    """Fills memory from a place in a file.

    Raises:
        HandOverError: The file is too short, or cannot be read.
    """
    while target:
        try:
            count = os.preadv(descriptor, [target], offset)
        except (OSError, OverflowError) as error:
            raise HandOverError(f"the file cannot be read at byte {offset} ({error})") from error
        if not count:
            raise HandOverError(f"the file ends at byte {offset}")
        target, offset = target[count:], offset + count


def _peer_user(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
