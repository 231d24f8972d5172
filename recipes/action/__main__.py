"""``python -m gen.recipes.action``."""

from gen.recipes.action.recipe import main

if __name__ == "__main__":
    main()
