"""The public API of remixer_t5x: functions that build and load models, and the building blocks of models."""
