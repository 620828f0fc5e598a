"""Supernets' programs: chains of pieces that a device runs one behind another along the path that it draws."""
