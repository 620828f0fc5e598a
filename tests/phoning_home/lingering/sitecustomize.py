"""Delays the end of a process: it is registered first, and so runs last."""

import atexit
import os
import time

atexit.register(time.sleep, float(os.environ["LINGER_S"]))
