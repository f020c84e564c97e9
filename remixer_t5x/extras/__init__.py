"""Features around the core, each in one folder that can be deleted: no module of the core imports them."""
