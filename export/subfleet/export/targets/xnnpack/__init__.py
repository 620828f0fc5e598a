"""The part of a program that ExecuTorch hands to XNNPACK."""
