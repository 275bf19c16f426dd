"""The configuration of a run: one YAML file, strict models, overrides on the command line."""

from rollwire.serving.config.loader import ConfigError, load_config
from rollwire.serving.config.models import RunConfig

__all__ = ["ConfigError", "RunConfig", "load_config"]
