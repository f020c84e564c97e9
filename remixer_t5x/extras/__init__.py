"""Optional features. Any subfolder can be deleted, because the core imports extras with `lazy_imports.import_extra`."""
