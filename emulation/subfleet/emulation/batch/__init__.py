"""Emulated fleets in one process: the real server and agents, an in-memory transport and a logical clock."""
