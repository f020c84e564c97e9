"""What `import remixer_t5x` offers: models from config files, trained models, and their building blocks."""
