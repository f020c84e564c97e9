"""Optional features. Any subfolder can be deleted, because the core package imports extras with `lazy.import_extra`."""
