"""What this device is and has: its readings, its limits, its runtimes, and what it tells of itself."""
