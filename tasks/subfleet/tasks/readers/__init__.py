"""Readers of the formats in which data sets are published; none of them unpickles or unpacks anything."""
