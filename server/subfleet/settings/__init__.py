"""What a run is: read from a file, checked before anything starts."""
