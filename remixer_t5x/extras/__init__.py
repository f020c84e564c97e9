"""Optional features. Any folder can be deleted, because the core package imports it with `lazy.import_extra`."""
