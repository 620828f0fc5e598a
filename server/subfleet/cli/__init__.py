"""The `subfleet` command: the top layer. Each command loads only what it needs."""
