import os

# Read when torch is imported: its profiler would print into the progress bar.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
