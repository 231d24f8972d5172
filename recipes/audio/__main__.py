"""``python -m gen.recipes.audio``."""

from gen.recipes.audio.recipe import main

if __name__ == "__main__":
    main()
