"""``python -m smdlib``: what a rollout will take, and whether the promise holds on a model of yours."""

import sys

from smdlib._cli import main

if __name__ == "__main__":
    sys.exit(main())
