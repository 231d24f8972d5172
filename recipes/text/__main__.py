"""``python -m gen.recipes.text``."""

from gen.recipes.text.recipe import main

if __name__ == "__main__":
    main()
