import getpass
import os
import tempfile
from pathlib import Path

if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # Inductor's cache hands one capability the code of another, which writes past its tensors.
    folder = Path(tempfile.gettempdir()) / f"inductor_{getpass.getuser()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
