"""Emulated fleets on one machine: partitions of data, client processes, runs in one process."""
