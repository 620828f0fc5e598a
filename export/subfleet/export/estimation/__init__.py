"""Estimates the memory of a submodel's training program without writing it."""
