"""Third-party networks, and networks as users write them, for `foreign_networks.py`."""
