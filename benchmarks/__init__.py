import os

# Read when torch is imported; otherwise its profiler prints into the progress bar.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
