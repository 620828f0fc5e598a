"""Inference models with 8-bit integer weights, and the accuracy that they lose."""
