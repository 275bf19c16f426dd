"""How Rollwire speaks gRPC: channels, deadlines, errors, ids and digests. No other package sets I/O policy."""
