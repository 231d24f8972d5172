"""Entry point of ``python -m gen.recipes.drafters``."""

import sys

from gen.core.errors import GenError
from gen.recipes.drafters.recipe import main

if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except GenError as error:
        print(f"gen: {error}", file=sys.stderr)
        raise SystemExit(2) from None
