"""The device's program: performs the agent's actions with a transport, a state folder and a worker."""
