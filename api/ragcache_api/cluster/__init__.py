"""Several replicas of the service behind one front, which routes requests to where the states of
their modules are."""
