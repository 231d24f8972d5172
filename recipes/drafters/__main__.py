"""Entry point of ``python -m gen.recipes.drafters``."""

from gen.recipes.drafters.recipe import main

if __name__ == "__main__":
    raise SystemExit(main())
