"""The torch.fx pass that puts a plan's casts, formats and storages into a captured graph."""
