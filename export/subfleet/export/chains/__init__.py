"""Programs of supernets: chains of pieces that a device runs one after the other along the path that it draws."""
