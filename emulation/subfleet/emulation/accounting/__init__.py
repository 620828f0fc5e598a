"""Emulated fleets without training: decisions, bytes and seconds from cost estimates alone."""
