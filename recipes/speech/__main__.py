"""``python -m gen.recipes.speech``."""

from gen.recipes.speech.recipe import main

if __name__ == "__main__":
    main()
