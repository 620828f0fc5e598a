"""The league: every federated method on one fleet of 50 unequal clients, on the same logs and the same seeds."""
