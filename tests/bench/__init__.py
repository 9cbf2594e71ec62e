"""The suite: five kinds of model on real data. `python -m tests.bench` prints what is measured on them."""
