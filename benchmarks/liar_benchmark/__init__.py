"""Runs with sixteen honest members and four liars of different kinds."""
