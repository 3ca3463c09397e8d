"""Several replicas of the service behind one gateway, which routes requests to where the states of
their modules are."""
