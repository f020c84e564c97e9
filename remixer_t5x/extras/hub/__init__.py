"""Downloads models from the Hugging Face Hub, and uploads models to it with a model card."""
