"""Whether a tag works: episodes that fail in a row disable it, loudly."""

from __future__ import annotations

from rollwire.rpc.errors import Reason, precondition
from rollwire.serving.logs import get_logger
from rollwire.v1 import environment_pb2 as pb

_log = get_logger(__name__)


class TagHealth:
    """Counts the failures of a tag.

    Attributes:
        disabled: It failed too often; nothing is opened any more.
    """

    def __init__(self, tag: str, disable_after_failures: int) -> None:
        """Begins with a tag that works.

        Args:
            tag: The tag.
            disable_after_failures: Episodes that fail in a row until the tag is disabled.
        """
        self.disabled = False
        self._tag = tag
        self._disable_after_failures = disable_after_failures
        self._failures_in_a_row = 0
        self._last_failure = ""

    def check(self) -> None:
        """Raises `RollwireError` ENVIRONMENT_DISABLED when the tag is disabled."""
        if self.disabled:
            raise precondition(
                Reason.ENVIRONMENT_DISABLED,
                f"environment {self._tag} is disabled: {self._failures_in_a_row} episodes in a row failed, the last "
                f"one with {self._last_failure}; it stays so until the environment server restarts",
                environment_tag=self._tag,
            )

    def succeeded(self) -> None:
        """An episode ended well."""
        self._failures_in_a_row = 0

    def failed(self, found: pb.EnvironmentFailure) -> None:
        """An episode failed."""
        self._failures_in_a_row += 1
        self._last_failure = f"{found.type}: {found.message}"
        if self._failures_in_a_row >= self._disable_after_failures and not self.disabled:
            self.disabled = True
            _log.error(
                "environment disabled until the server restarts",
                environment_tag=self._tag,
                failed_episodes_in_a_row=self._failures_in_a_row,
                last_failure=self._last_failure,
            )
