"""Runs of twenty members, four of which lie, each in a way of its own."""
