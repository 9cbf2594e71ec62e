"""`autoprec demo`: two small tasks on real data that every machine has, four precisions, and one grown layer."""
