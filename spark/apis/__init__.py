"""The wire formats of other servers, one file an API."""
