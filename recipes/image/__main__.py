"""``python -m gen.recipes.image``."""

from gen.recipes.image.recipe import main

if __name__ == "__main__":
    main()
