"""Optional features. Each folder can be deleted, because the core imports it by name with `lazy.import_extra`."""
