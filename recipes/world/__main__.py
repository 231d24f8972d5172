"""``python -m gen.recipes.world``."""

from gen.recipes.world.recipe import main

if __name__ == "__main__":
    main()
