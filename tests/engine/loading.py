"""A module that takes long to load. It first writes the number of its process."""

from __future__ import annotations

import os
import time
from pathlib import Path

if "LOADING" in os.environ:
    Path(os.environ["LOADING"]).write_text(str(os.getpid()))
    while True:  # a signal ends the sleep
        time.sleep(1)
