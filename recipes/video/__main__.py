"""``python -m gen.recipes.video``."""

from gen.recipes.video.recipe import main

if __name__ == "__main__":
    main()
