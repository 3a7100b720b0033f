"""``python -m egrpo``: see :mod:`egrpo.cli`."""

import sys

from .cli import main

sys.exit(main())
