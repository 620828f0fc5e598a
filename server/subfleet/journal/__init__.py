"""What a run writes down before it acts, and what it tells of itself."""
