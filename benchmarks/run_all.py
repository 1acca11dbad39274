"""Run every benchmark in turn, each in a process of its own, and say which failed.

python benchmarks/run_all.py [--quick] [NAME …]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NOT_BENCHMARKS = {"run_all", "record", "mlm_reference", "peer_process", "gpu_models"}


def main() -> None:
    words = sys.argv[1:]
    options = [word for word in words if word.startswith("-")]
    wanted = [word for word in words if not word.startswith("-")]
    names = wanted or sorted({file.stem for file in HERE.glob("*.py")} - NOT_BENCHMARKS)
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        command = [sys.executable, str(HERE / f"{name}.py"), *options]
        path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        if subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
