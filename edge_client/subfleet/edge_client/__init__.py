"""The device's program: does what the agent decides, over a link and in a folder, until the server has it."""
