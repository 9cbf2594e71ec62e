"""From a captured torch.fx graph to ops with names: what a node is, who owns it, what it is called."""
