"""Tests that anybody's environment server or provider can be run against: subclass, say where it is, run pytest."""

import pytest

# Before they are imported: their assertions then say which values differ, as those of a test module do.
pytest.register_assert_rewrite(
    "rollwire.compliance.environments",
    "rollwire.compliance.failures",
    "rollwire.compliance.game",
    "rollwire.compliance.providers",
)

from rollwire.compliance.environments import EnvironmentCompliance  # noqa: E402
from rollwire.compliance.failures import FailureCompliance  # noqa: E402
from rollwire.compliance.providers import ProviderCompliance  # noqa: E402

__all__ = ["EnvironmentCompliance", "FailureCompliance", "ProviderCompliance"]
