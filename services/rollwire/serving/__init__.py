"""What every Rollwire server shares: configuration, binding, health, drain, errors and logging."""
