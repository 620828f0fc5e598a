"""The device's program: performs the agent's actions over a transport, with a state folder and a worker."""
