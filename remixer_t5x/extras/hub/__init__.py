"""Downloads models from the Hugging Face Hub, and writes and uploads models to it."""
