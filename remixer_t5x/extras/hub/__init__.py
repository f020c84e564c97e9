"""Models on the Hugging Face Hub: folders that are downloaded, and folders that are written and uploaded."""
