"""A module that takes longer to import than a call may take."""

import time

time.sleep(1.0)
READY = "ready"
