"""Make the demo model family: ``python tools/make_demo.py [--folder FOLDER]``."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egrpo.backends.demo import demo_files, demo_folder  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description="Make the demo model family, from a fixed seed, where it is absent.")
    parser.add_argument("--folder", type=Path, help="where to put it (default: $EGRPO_DEMO_DIR, else assets/demo)")
    folder = demo_folder(parser.parse_args(arguments).folder)
    try:
        files = demo_files(folder)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    for path in files.all():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{digest}  {path.stat().st_size:>9}  {path.relative_to(folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
