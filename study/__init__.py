"""Ways to clip, compared in trainings of a language model and of a toy."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # for smollm2
