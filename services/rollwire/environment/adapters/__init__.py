"""Environments of other libraries and servers, as environments of this server. Each library is an extra."""
