"""Training of the bundled models, from a recipe and a seed. Nothing else of the project needs it."""
