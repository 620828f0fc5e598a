"""The link to devices: what comes in, what goes out, and the broker between."""
