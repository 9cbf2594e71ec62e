"""Arithmetic in torch: casts, packed storages, GEMMs with a format per role, histograms. Stateless."""
