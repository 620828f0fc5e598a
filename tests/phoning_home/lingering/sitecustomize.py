"""Registered before anything else, so that it is the last to happen at the end of a process."""

import atexit
import os
import time

atexit.register(time.sleep, float(os.environ["LINGER_S"]))
