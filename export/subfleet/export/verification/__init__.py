"""Verifies that a written program computes what the original module computes in double precision."""

from subfleet.export.verification.verifying import (
    Run,
    Verified,
    seeded_generator,
    verify_evaluation,
    verify_inference,
    verify_training,
)

__all__ = ["Run", "Verified", "seeded_generator", "verify_evaluation", "verify_inference", "verify_training"]
