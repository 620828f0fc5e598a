"""The journal of a run: its durable state, and the records of what happened."""
