"""Optional features. Each folder can be deleted: the core loads them by name (`lazy.import_extra`)."""
