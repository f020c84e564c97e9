"""An HTTP server for one model: `remixer-t5x serve`, docs/guide/serving.md."""
