"""The device: readings, limits, runtimes, and its profile for the server."""
