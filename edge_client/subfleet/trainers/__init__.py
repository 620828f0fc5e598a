"""Trainers, one module for each runtime, loaded by entry-point name (group `subfleet.trainers`)."""
