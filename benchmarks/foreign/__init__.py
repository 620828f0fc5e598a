"""Networks that others wrote, or that a user would, for `foreign_networks.py`."""
