"""Tests that anybody's environment server or provider can be run against: subclass, say where it is, run pytest."""

from rollwire.compliance.environments import EnvironmentCompliance
from rollwire.compliance.failures import FailureCompliance
from rollwire.compliance.providers import ProviderCompliance

__all__ = ["EnvironmentCompliance", "FailureCompliance", "ProviderCompliance"]
