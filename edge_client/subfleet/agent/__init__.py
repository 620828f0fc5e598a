"""What a device does about everything that happens to it: pure decisions, without input or output."""
