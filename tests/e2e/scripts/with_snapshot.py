"""Runs another script and asks memtrace for a snapshot at its end, while all that it holds is still alive.

A snapshot at the exit of the process comes after Python has taken the program apart, and freed everything.
"""

import os
import runpy
import sys

from here import snapshot_here

sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
alive = runpy.run_path(sys.argv[0], run_name="__main__")
snapshot_here()
