"""The server: rounds, assignment of subnets, methods, folding, the journal of a run and its HTTP API."""
