"""Which rank this process is, and the key-value store through which ranks find each other.

The environment variables are torchrun's, so that its elastic agent can start the ranks; `rollwire serve learner` sets
the same ones for the ranks that it starts itself. Importing this module does not load torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollwire.serving.server import ServeError

_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CONNECT_S: Final = 120.0


@dataclass(frozen=True)
class Seat:
    """The place of a process among the ranks.

    Attributes:
        rank: 0 to `size` - 1; rank 0 serves.
        size: Number of ranks.
        local_rank: Number of the rank on its host, which is the number of its device.
        host: Host of the store.
        port: Port of the store.
        store_exists: True if somebody else, such as torchrun's agent, serves the store; else rank 0 does.
        attempt: How often the ranks were started before; each start has keys of its own.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    store_exists: bool = False
    attempt: int = 0

    def open_store(self) -> Any:
        """Returns a connection of its own to the store of these ranks, a `torch.distributed.Store`.

        Raises:
            ServeError: The store does not answer.
        """
        from datetime import timedelta

        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        try:
            store = TCPStore(
                self.host,
                self.port,
                is_master=self.rank == 0 and not self.store_exists,
                timeout=timedelta(seconds=_CONNECT_S),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            raise ServeError(
                f"rank {self.rank} of the learner does not reach the store at {self.host}:{self.port} "
                f"({str(error).splitlines()[0][:200]}); check MASTER_ADDR and MASTER_PORT"
            ) from error
        return PrefixStore(f"rollwire/{self.attempt}", store)


def find_seat(variables: Mapping[str, str] = os.environ) -> Seat | None:
    """Returns the seat that the environment variables give; None when they give none.

    Raises:
        ServeError: Some are missing or wrong.
    """
    given = [name for name in _NEEDED if variables.get(name)]
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return None
    if len(given) < len(_NEEDED):
        missing = ", ".join(name for name in _NEEDED if name not in given)
        raise ServeError(f"the environment has {', '.join(given)} without {missing}; start the ranks with torchrun")
    size = _number(variables, "WORLD_SIZE", 1, 1 << 16)
    rank = _number(variables, "RANK", 0, size - 1)
    return Seat(
        rank=rank,
        size=size,
        local_rank=_number(variables, "LOCAL_RANK", 0, size - 1) if "LOCAL_RANK" in variables else rank,
        host=variables["MASTER_ADDR"],
        port=_number(variables, "MASTER_PORT", 1, 65_535),
        store_exists=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(variables, "TORCHELASTIC_RESTART_COUNT", 0, 1 << 16)
        if "TORCHELASTIC_RESTART_COUNT" in variables
        else 0,
    )


def _number(variables: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = variables[name]
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ServeError(f"the environment variable {name} is {text!r}; allowed: {least} to {most}")
    return int(text)
