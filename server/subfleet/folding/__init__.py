"""The model of a run: how updates are checked, folded into it, evaluated and kept."""
