"""The `autoprec` command. Each command imports what it needs when it runs, so that help is there at once."""
