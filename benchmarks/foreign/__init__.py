"""Third-party networks, and hand-written ones as a user would write, for `foreign_networks.py`."""
