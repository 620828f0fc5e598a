"""One game for three emulators: the same network, samples and steps in each."""
