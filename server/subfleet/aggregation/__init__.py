"""The model of a run: how updates are checked, aggregated into it, evaluated and kept."""
