"""Fleets on one machine: partitions of real data, client processes, experiments."""
