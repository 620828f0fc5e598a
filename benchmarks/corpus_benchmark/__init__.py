"""Networks that nobody here wrote, recorded and cut."""
