"""The commands' arguments, one module per group. Importing them imports nothing that a command needs to run."""
