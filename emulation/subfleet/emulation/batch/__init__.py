"""Fleets in one process: the real server and the real agents over the memory transport, under a logical clock."""
