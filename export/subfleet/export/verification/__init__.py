"""Verifies that a written program computes what the original module computes in double precision."""
