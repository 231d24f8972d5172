"""``python -m gen.recipes.motion``."""

from gen.recipes.motion.recipe import main

if __name__ == "__main__":
    main()
