"""Pure functions from (graph, profile, device, policy) to a plan."""
