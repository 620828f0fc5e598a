"""The part of a program that ExecuTorch delegates to XNNPACK."""
