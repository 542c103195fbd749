"""Settings for every test run: two threads, and kernels kept between runs in the repository's own cache folder.

They stand in the environment before torch is imported, so that child processes of tests share them.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TORCHLAZY_STORE", "off")  # a test compiles what it tests, and counts what it compiles
os.environ.setdefault("TORCHLAZY_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "torchlazy"))
